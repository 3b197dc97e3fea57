"""An HTTP server on loopback, in threads of this process."""

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class LoopbackServer:
    """Answers by handlers, which know it as `owner`."""

    def __init__(self, handler: "type[LoopbackHandler]", port: int = 0) -> None:
        self._http = _Http(port, handler, self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._http.server_address[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End the server."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, handler: "type[LoopbackHandler]", owner: LoopbackServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", port), handler)

    def handle_error(self, *_: Any) -> None:
        """A client that leaves half-way is no error here."""


class LoopbackHandler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: the second of two waits 40 ms for the first to be acknowledged

    @property
    def owner(self) -> Any:
        assert isinstance(self.server, _Http)
        return self.server.owner

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post(self.rfile.read(int(self.headers["Content-Length"])))

    def get(self) -> None:
        """Answer a GET."""
        raise NotImplementedError

    def post(self, body: bytes) -> None:
        """Answer a POST."""
        raise NotImplementedError

    def send(
        self, status: int, data: bytes, headers: Mapping[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:  # the client has given up
            self.close_connection = True

    def log_message(self, *_arguments: object) -> None:
        return
