"""A model hub that lies, in every answer to `edgellm pull`."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.robustness.attack.harness import Attack, Found
from testkit import ROOT
from testkit.gguf.random_model import Shape, write

REPO, COMMIT, FILE = "ann/tiny-GGUF", "0123456789abcdef0123456789abcdef01234567", "tiny-Q4_K_M.gguf"
_SECRET = "hf_secretSECRETsecretSECRETsecretSECRET12"
_ENOUGH = 90.0  # seconds after which the user presses Ctrl-C
_DRIP = 6.0  # the same if the hub drips on purpose
_HEARD = 15.0  # seconds until an interrupted pull ends
_MOST_MEMORY = 600 * 2**20
_BLOCK = bytes(2**16)


@dataclass
class Hub:
    """A hub with one `lie`, which should serve `data`."""

    lie: str
    data: bytes
    url: str = ""
    elsewhere: str = ""
    tokens: list[str] = field(default_factory=list)  # received by the other host


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        if self.path.startswith("/api/models/"):
            self.listing()
        else:
            self.file(body)

    def listing(self) -> None:
        lie, honest = self.hub.lie, {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": FILE}]}
        if lie.startswith("listing: redirect"):
            return self.redirect(lie)
        if lie == "listing: endless":
            return self.endless(b'{"sha": "' + _BLOCK)
        if lie == "listing: bomb":
            return self.whole(gzip.compress(bytes(2**30)), {"Content-Encoding": "gzip"})
        if lie == "listing: drip":
            return self.drip(b" ")
        if lie == "listing: error without end":
            return self.endless(_BLOCK, 500)
        changed = _LISTINGS.get(lie)
        made = honest if changed is None else changed(honest)
        return self.whole(made if isinstance(made, bytes) else json.dumps(made).encode(), {})

    def file(self, body: bool) -> None:
        lie, data = self.hub.lie, self.hub.data
        if lie.startswith("file: redirect") and (body or "head" in lie):
            return self.redirect(lie)
        headers = _HEADERS.get(lie, {})
        if not body:
            self.send_response(200)
            size = {"file: endless": 2**24, "file: small": 10, "file: long": len(data) * 9}.get(lie, len(data))
            etag = hashlib.sha256(b"other" if lie == "file: wrong hash" else data).hexdigest()
            for name, value in (
                {"Content-Length": str(size), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT} | headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            return None
        if lie in ("file: endless", "file: long"):
            return self.endless(_BLOCK)
        if lie == "file: error without end":
            return self.endless(_BLOCK, 404)
        if lie == "file: error bomb":
            return self.whole(gzip.compress(bytes(2**30)), {"Content-Encoding": "gzip"}, 403)
        if lie == "file: drip":
            return self.drip(b"G")
        if lie == "file: header drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            return self.dripped(b"X: y\r\n")
        if lie == "file: bomb":
            data = gzip.compress(bytes(2**28))
        if lie == "file: truncated":
            data = data[: len(data) // 2]
        if lie == "file: not a model":
            data = b"<html>".ljust(len(data), b"\x1b")
        return self.whole(data, headers)

    def redirect(self, lie: str) -> None:
        target = {
            "other host": f"{self.hub.elsewhere}{self.path}", "file url": "file:///etc/passwd", "itself": self.path,
            "ftp": "ftp://127.0.0.1/x", "no url": "\x7f::::", "javascript": "javascript:alert(1)",
        }[lie.rpartition(" to ")[2]]  # fmt: skip
        self.send_response(302)
        self.send_header("Location", target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def whole(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def endless(self, block: bytes, status: int = 200) -> None:
        self.close_connection = True
        self.send_response(status)
        self.end_headers()
        for _ in range(2**36 // len(block)):
            self.wfile.write(block)

    def drip(self, byte: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.hub.data)))
        self.end_headers()
        self.dripped(byte)

    def dripped(self, some: bytes) -> None:
        for _ in range(10_000):
            self.wfile.write(some)
            self.wfile.flush()
            time.sleep(0.5)


def _named(*names: object) -> Callable[[dict[str, Any]], object]:
    return lambda honest: honest | {"siblings": [{"rfilename": name} for name in names]}


_LISTINGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "listing: deep": lambda _: b"[" * 200_000,
    "listing: no JSON": lambda _: b"\xff\xfe<html>",
    "listing: a number": lambda _: 7,
    "listing: empty": lambda _: {},
    "listing: huge": lambda honest: honest | {"siblings": [{"rfilename": f"f{i}-Q8_0.gguf"} for i in range(300_000)]},
    "listing: too huge": lambda honest: honest | {"x": "x" * 2**25},
    "listing: long number": lambda _: b'{"sha": ' + b"9" * 10_000 + b"}",
    "listing: siblings a text": lambda honest: honest | {"siblings": "x" * 99},
    "listing: siblings of siblings": lambda honest: honest | {"siblings": [[], None, 3, {"rfilename": {}}]},
    "listing: commit a list": lambda honest: honest | {"sha": [COMMIT]},
    "listing: commit leads out": lambda honest: honest | {"sha": "../../../../x"},
    "name: leads out": _named("../../../../evil-Q4_K_M.gguf"),
    "name: absolute": _named("/tmp/evil-Q4_K_M.gguf"),
    "name: backslashes": _named("..\\..\\evil-Q4_K_M.gguf"),
    "name: a dot": _named("./evil-Q4_K_M.gguf"),
    "name: refs": _named("../../refs/main/x-Q4_K_M.gguf"),
    "name: escape": _named("\x1b]0;owned\x07\x1b[2J-Q4_K_M.gguf"),
    "name: line ends": _named("a\r\nerror: fine-Q4_K_M.gguf"),
    "name: right to left": _named("\u202efug.x-Q4_K_M.gguf"),
    "name: null": _named("a\0b-Q4_K_M.gguf"),
    "name: half a character": _named("\udcff-Q4_K_M.gguf"),
    "name: long": _named("x" * 5_000 + "-Q4_K_M.gguf"),
    "name: deep": _named("a/" * 3_000 + "x-Q4_K_M.gguf"),
    "name: a link": _named("x-Q4_K_M.gguf/y-Q4_K_M.gguf", "x-Q4_K_M.gguf"),
    "name: a query": _named("x-Q4_K_M.gguf?a=b#.gguf"),
}  # fmt: skip
_HEADERS = {
    "size: negative": {"Content-Length": "-5"},
    "size: long": {"X-Linked-Size": "9" * 5_000},
    "size: huge": {"X-Linked-Size": str(2**62)},
    "size: words": {"X-Linked-Size": "many"},
    "etag: leads out": {"ETag": '"../../../evil"'},
    "etag: empty": {"ETag": '""'},
    "etag: long": {"ETag": '"' + "a" * 9_000 + '"'},
    "etag: another model's": {"X-Linked-ETag": '"' + "0" * 64 + '"'},
    "commit: leads out": {"X-Repo-Commit": "../../../evil"},
    "xet: elsewhere": {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": "http://127.0.0.1:9/x"},
    "header: escape": {"X-Error-Message": "\x1b]0;owned\x07"},
}
_TARGETS = ("other host", "file url", "itself", "ftp", "no url", "javascript")
LIES = (
    *_LISTINGS, *_HEADERS,
    *(f"{what}: redirect to {where}" for what in ("listing", "file") for where in _TARGETS),
    *(f"file: redirect head to {where}" for where in _TARGETS),
    "listing: endless", "listing: bomb", "listing: drip", "listing: error without end", "file: endless", "file: small",
    "file: long", "file: wrong hash", "file: error without end", "file: error bomb", "file: drip", "file: header drip",
    "file: bomb", "file: truncated", "file: not a model",
)  # fmt: skip


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that leave halfway."""


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def lying(hub: Hub) -> Iterator[Hub]:
    """Serve `hub`, and another host that notes the tokens which reach it."""

    class Lying(_Handler):
        pass

    class Elsewhere(_Handler):
        def answer(self, *, body: bool) -> None:
            hub.tokens += [value for value in self.headers.values() if _SECRET in value]
            super().answer(body=body)

    Lying.hub, Elsewhere.hub = hub, Hub("", hub.data)
    with _serving(Lying) as hub.url, _serving(Elsewhere) as hub.elsewhere:
        yield hub


def _pull(hub: Hub, folder: Path) -> str:
    """Return the harm of the lie to the command line; empty if there is none."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HF_TOKEN": _SECRET,
                   "EDGELLM_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    environment.pop("HF_HUB_CACHE", None)
    with (folder / "said").open("w+b") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "edgellm", "pull", REPO], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env=environment, cwd=ROOT,
        )  # fmt: skip
        trouble = _ended(child, _DRIP if "drip" in hub.lie else _ENOUGH)
        output.seek(0)
        words = output.read().decode("utf-8", "replace")
    if trouble:
        return trouble
    if child.returncode not in (0, 1, 130):
        return f"exit code {child.returncode}: {words[-200:]}"
    if "Traceback" in words or "unexpected" in words:
        return f"surprised: {words[-200:]}"
    if raw := {one for one in words if not (one.isprintable() or one in "\n\r\t")}:
        return f"wrote {raw} to the terminal"
    if hub.tokens:
        return "sent another host the user's token"
    return _left(hub, folder, child.returncode)


def _ended(child: subprocess.Popen[bytes], enough: float) -> str:
    """Wait for the end as an impatient user does; return the harm."""
    memory = [0]
    deadline, interrupted = time.monotonic() + enough, False
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            memory.append(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
            return f"took {memory[-1] >> 20} MiB" if memory[-1] > _MOST_MEMORY else ""
        if time.monotonic() > deadline:
            child.send_signal(signal.SIGKILL if interrupted else signal.SIGINT)
            if interrupted:
                child.wait()
                return "ignored Ctrl-C"
            interrupted, deadline = True, time.monotonic() + _HEARD
        time.sleep(0.02)


def _left(hub: Hub, folder: Path, code: int) -> str:
    """Return the harm in the files that are left."""
    cache = folder / "hf" / "hub" / f"models--{REPO.replace('/', '--')}"
    strange = [path for path in folder.rglob("*evil*") if ".locks" not in path.parts]
    models = [path for path in cache.glob("snapshots/**/*.gguf") if path.is_file()]
    if strange or [path for path in models if not path.resolve().is_relative_to(cache / "blobs")]:
        return f"left {strange or models} behind"
    if any(path.read_bytes() != hub.data for path in models):
        return "kept a model that is another one"
    return "" if (code == 0) == bool(models) else f"exit code {code} with {len(models)} models"


def _run(quick: bool) -> Found:
    wrong, taken = [], 0
    lies = LIES[::4] if quick else LIES
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model.gguf"
        write(model, Shape("llama", 400, 2, 32, 2, 1, 64, 512), "F32")
        for number, lie in enumerate(lies):
            folder = Path(name) / str(number)
            folder.mkdir()
            with lying(Hub(lie, model.read_bytes())) as hub:
                if trouble := _pull(hub, folder):
                    wrong.append(f"{lie}: {trouble}")
                taken += any((folder / "hf").glob("hub/*/snapshots/**/*.gguf"))
    return Found(len(lies), tuple(wrong), {"models taken": float(taken)})


ATTACKS = (
    Attack("hostile-hub", "a model hub that lies in listings, names, sizes, hashes, bodies and redirects", _run),
)
