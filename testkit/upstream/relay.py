"""A relay in front of a stock server, which keeps what is asked and answered."""

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from testkit.upstream.loopback import LoopbackHandler, LoopbackServer


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request with its JSON, and the status and JSON of the answer."""

    path: str
    body: Any
    status: int
    answer: Any


class Relay(LoopbackServer):
    """Hands requests on to the server at an address on loopback."""

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url)
        self.exchanges: list[Exchange] = []
        super().__init__(_Handler)

    @property
    def url(self) -> str:
        return super().url + self.target.path


class _Handler(LoopbackHandler):
    def get(self) -> None:
        self.hand_on(None)

    def post(self, body: bytes) -> None:
        self.hand_on(body)

    def hand_on(self, body: bytes | None) -> None:
        relay: Relay = self.owner
        headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
        # a connection of its own each time: servers close those that have been idle for some seconds
        onward = http.client.HTTPConnection(relay.target.hostname or "", relay.target.port)
        onward.request(self.command, relay.target.path + self.path, body, headers)
        answer = onward.getresponse()
        data = answer.read()
        onward.close()
        relay.exchanges.append(Exchange(self.path, _json(body), answer.status, _json(data)))
        self.send(answer.status, data, kind=answer.headers.get("Content-Type", "application/json"))


def _json(data: bytes | None) -> Any:
    try:
        return None if data is None else json.loads(data)
    except ValueError:
        return None
