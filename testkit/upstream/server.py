"""The conformance server: HTTP on loopback in front of a dialect, and the faults of real servers."""

import json
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from testkit.upstream.dialects import Dialect, Invalid, Missing, UnknownModel
from testkit.upstream.loopback import LoopbackHandler, LoopbackServer


class Fault(StrEnum):
    """What goes wrong with an answer to a POST."""

    GARBAGE = "bytes that are not JSON"
    FOREIGN = "JSON of another form"
    TRUNCATED = "an answer that breaks off"
    DROPPED = "a connection that ends without an answer"
    STALLED = "no answer"
    HUGE = "an answer without end"
    NAN = "numbers that are none"
    STRANGE = "tokens outside the vocabulary"
    BUSY = "status 429"
    FAILED = "status 500"
    REFUSED = "status 400"


class UpstreamServer(LoopbackServer):
    """A server in front of a dialect. `fault` is what happens to each POST from now on, until `heal`."""

    def __init__(self, dialect: Dialect, *, key: str = "", port: int = 0) -> None:
        self.dialect, self.key = dialect, key
        self.fault: Fault | None = None
        self.requests: list[tuple[str, Any, Mapping[str, str]]] = []
        self._released = threading.Event()
        super().__init__(_Handler, port)

    def stall(self) -> None:
        """Wait until the server is healed or closed."""
        self._released.wait()

    def heal(self) -> None:
        """Answer rightly from now on, and end what waits for an answer."""
        self.fault = None
        self._released.set()
        self._released = threading.Event()

    def close(self) -> None:
        """End the server, and the connections that wait for it."""
        self._released.set()
        super().close()


class _Handler(LoopbackHandler):
    @property
    def upstream(self) -> UpstreamServer:
        found: UpstreamServer = self.owner
        return found

    def get(self) -> None:
        if self.allowed():
            self.answer(lambda: self.upstream.dialect.get(self.path), None)

    def post(self, body: bytes) -> None:
        asked = json.loads(body)
        self.upstream.requests.append((self.path, asked, dict(self.headers)))
        if self.allowed():
            self.answer(lambda: self.upstream.dialect.post(self.path, asked), self.upstream.fault)

    def allowed(self) -> bool:
        if not self.upstream.key or self.headers.get("Authorization") == f"Bearer {self.upstream.key}":
            return True
        message = f"wrong key {self.headers.get('Authorization')}"
        self.send(401, json.dumps({"error": {"message": message}}).encode())
        return False

    def answer(self, made: Callable[[], Any], fault: Fault | None) -> None:
        if fault is Fault.STALLED:
            self.upstream.stall()
        if fault in (Fault.STALLED, Fault.DROPPED):
            self.close_connection = True
        elif fault is Fault.HUGE:
            self.endless()
        elif fault in _ANSWERS:
            self.send(*_ANSWERS[fault])
        else:
            self.say(made, fault)

    def say(self, made: Callable[[], Any], fault: Fault | None) -> None:
        try:
            data = json.dumps(_spoilt(made(), fault)).encode()
        except Missing:
            self.send(404, b'{"detail": "Not Found"}')
            return
        except UnknownModel as error:
            self.send(404, json.dumps(error.answer).encode())
            return
        except Invalid as error:
            self.send(400, json.dumps({"error": {"message": str(error)}}).encode())
            return
        if fault is Fault.TRUNCATED:
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
        else:
            self.send(200, data)

    def endless(self) -> None:
        self.close_connection = True
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b" " * 65536)
        except OSError:
            return


_ANSWERS: dict[Fault | None, tuple[int, bytes, dict[str, str]]] = {
    Fault.BUSY: (429, b'{"error": "too many requests"}', {"Retry-After": "1"}),
    Fault.FAILED: (500, b'{"error": {"message": "NaN in logits"}}', {}),
    Fault.REFUSED: (400, b'{"error": {"message": "too many tokens"}}', {}),
    Fault.GARBAGE: (200, b"<html>Bad gateway</html>", {}),
}


def _spoilt(found: Any, fault: Fault | None) -> Any:
    """Return an answer with all its numbers, or all that may be tokens, replaced by what they cannot be."""
    if fault is Fault.FOREIGN:
        return {"result": [found]}
    if isinstance(found, dict):
        return {key: _spoilt(value, fault) for key, value in found.items()}
    if isinstance(found, list):
        return [_spoilt(value, fault) for value in found]
    if fault is Fault.NAN and isinstance(found, float):
        return float("nan")
    if fault in (Fault.NAN, Fault.STRANGE) and type(found) is int and found > 1:
        return 2**30 if fault is Fault.STRANGE else float("nan")
    return found
