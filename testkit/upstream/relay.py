"""A relay in front of a stock server, which keeps what is asked and answered."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request with its JSON, and the status and JSON of the answer."""

    path: str
    body: Any
    status: int
    answer: Any


class Relay:
    """Hands requests on to the server at an address on loopback, in threads of this process."""

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url)
        self.exchanges: list[Exchange] = []
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.relay = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}{self.target.path}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    relay: Relay


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # as `testkit.upstream.server` says

    def do_GET(self) -> None:
        self.hand_on(None)

    def do_POST(self) -> None:
        self.hand_on(self.rfile.read(int(self.headers["Content-Length"])))

    def hand_on(self, body: bytes | None) -> None:
        relay: Relay = self.server.relay  # type: ignore[attr-defined]  # set by it
        headers = {name: self.headers[name] for name in ("Content-Type", "Authorization") if name in self.headers}
        # a connection of its own each time: servers close those that have been idle for some seconds
        onward = http.client.HTTPConnection(relay.target.hostname or "", relay.target.port)
        onward.request(self.command, relay.target.path + self.path, body, headers)
        answer = onward.getresponse()
        data = answer.read()
        onward.close()
        relay.exchanges.append(Exchange(self.path, _json(body), answer.status, _json(data)))
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:  # the client has given up
            self.close_connection = True

    def log_message(self, *_arguments: object) -> None:
        return


def _json(data: bytes | None) -> Any:
    try:
        return None if data is None else json.loads(data)
    except ValueError:
        return None
