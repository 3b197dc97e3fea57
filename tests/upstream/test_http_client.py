"""Addresses and keys, and connections: kept, ended by either side, encrypted, and with answers of every form."""

import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from edgellm.errors import InvalidOption, VerifierLost
from edgellm.llm.model_loading import is_remote
from edgellm.rpc.trust.identity import web_certificate
from edgellm.upstream import http_client
from edgellm.upstream.http_client import HttpClient, ServerURL, read_key


@pytest.mark.parametrize(
    ("text", "base", "model", "loopback"),
    [
        ("http://gpu-box:8000/", "http://gpu-box:8000", "", False), ("http://box", "http://box", "", False),
        ("https://box.example/v1/", "https://box.example", "", False),
        ("https://box.example/llm/v1#org/model-7b", "https://box.example/llm", "org/model-7b", False),
        ("http://[::1]:8000", "http://[::1]:8000", "", True), ("http://127.0.0.1:1", "http://127.0.0.1:1", "", True),
        ("https://localhost", "https://localhost", "", True),
    ],
)  # fmt: skip
def test_addresses(text: str, base: str, model: str, loopback: bool) -> None:
    url = ServerURL.parse(text)
    assert (str(url), url.model, url.is_loopback, url.is_encrypted) == (base, model, loopback, "https" in text)
    assert is_remote(text)


@pytest.mark.parametrize(
    "text", ["http://", "ftp://box", "http://box:port", "http://me:secret@box", "http://box?key=1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        ServerURL.parse(text)
    assert "secret" not in str(raised.value)


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGELLM_VERIFIER_KEY", raising=False)
    assert read_key() == ""
    monkeypatch.setenv("EDGELLM_VERIFIER_KEY", "from-the-environment")
    assert read_key() == "from-the-environment"
    path = tmp_path / "key"
    path.write_text("from-a-file\n")
    assert read_key(path) == "from-a-file"
    for bad in ("", "two words", "line\nline"):
        path.write_text(bad)
        with pytest.raises(InvalidOption) as raised:
            read_key(path)
        assert "words" not in str(raised.value)
    with pytest.raises(InvalidOption, match="no key file"):
        read_key(tmp_path / "missing")


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class Scripted:
    """A server that answers the requests of each connection with what it was told, ends it, or `resets` it, and is gone
    behind the last one."""

    def __init__(
        self, *connections: tuple[bytes, ...], tls: ssl.SSLContext | None = None, resets: bool = False
    ) -> None:
        self._connections, self._tls, self._resets = connections, tls, resets
        self.heads: list[bytes] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for answers in self._connections:
            came, _ = self._listening.accept()
            with suppress(OSError), came if self._tls is None else self._tls.wrap_socket(came, True) as line:
                for answer in answers:
                    self.heads.append(line.recv(65536))
                    line.sendall(answer)
                if self._resets:
                    line.recv(1)  # the next request, which is not answered
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._listening.close()

    def close(self) -> None:
        self._thread.join()


def client_of(port: int, scheme: str = "http") -> Iterator[HttpClient]:
    client = HttpClient(ServerURL.parse(f"{scheme}://127.0.0.1:{port}/llm"), "the-key")
    yield client
    client.close()


@pytest.mark.parametrize("resets", [False, True])
def test_a_connection_is_kept_and_replaced_when_the_server_has_ended_it(resets: bool) -> None:
    server = Scripted((OK, OK), (OK,), resets=resets)
    for client in client_of(server.port):
        for _ in range(3):
            assert client.wait(client.post("/completion", {"n": 1})).json == {}
    server.close()
    assert len(server.heads) == 3
    assert all(head.startswith(b"POST /llm/completion HTTP/1.1\r\n") for head in server.heads)
    assert all(b"Authorization: Bearer the-key\r\n" in head and head.endswith(b'{"n":1}') for head in server.heads)


ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n[" % 2**26 + b"[]," * 2**10


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "is gone"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", "is gone"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "is gone"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * 99_999, "is gone"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", "not asked for"),
        (ENDLESS, "more than 2048 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_answer(answer: bytes, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER", 2**11)
    server = Scripted((answer,))
    for client in client_of(server.port):
        with pytest.raises(VerifierLost, match=says):
            client.wait(client.get("/props"))
    server.close()


def test_a_certificate_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = web_certificate(tmp_path, ["127.0.0.1"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server = Scripted((OK,), (OK,), tls=tls)
    for client in client_of(server.port, "https"):
        with pytest.raises(VerifierLost, match="certificate verify failed"):
            client.wait(client.get("/props"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    for client in client_of(server.port, "https"):
        assert client.wait(client.get("/props")).json == {}
    server.close()
