"""A stock server of ours in a process of its own, which can be killed, stopped, started again, and told to fail.

    python -m testkit.upstream.process KIND MODEL PORT [HOST [NAME]]

serves until its input ends. A line of input is the name of a fault, or an empty one: no fault.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from edgellm.engine import Model
from testkit import ROOT
from testkit.upstream.dialects import MODEL, Dialect, LlamaServer, Sglang, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer
from testkit.upstream.text_dialects import LlamaCppPython, LmStudio, MlxLm, Ollama, Tabby

KINDS: Mapping[str, Callable[[Engine], Dialect]] = {
    "vllm-score": lambda engine: Vllm(engine, scores=True, counts=True, most=64),
    "vllm-fan-out": lambda engine: Vllm(engine, counts=True, most=64),
    "sglang": Sglang,
    "llama-server": LlamaServer,
    "llama-cpp-python": LlamaCppPython,
    "ollama": Ollama,
    "lm-studio": LmStudio,
    "tabbyapi": Tabby,
    "mlx-lm": MlxLm,
}
POSITIONS = 1024


class UpstreamProcess:
    """A server's process at a port of its own."""

    def __init__(self, kind: str, model: Path) -> None:
        """Start a server of one of `KINDS`; it is up when `wait` returns."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._run = [sys.executable, "-m", "testkit.upstream.process", kind, str(model), str(self.port)]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._run, cwd=ROOT, text=True, stdin=subprocess.PIPE)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Wait until the server answers. Raise TimeoutError after a minute."""
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(self.url + "/v1/models", timeout=60).close()
            except (urllib.error.URLError, OSError):
                if time.monotonic() > end:
                    raise TimeoutError("the server does not start") from None
                time.sleep(0.02)
            else:
                return

    def fail(self, fault: Fault | None) -> None:
        """Answer so from the next request on."""
        if self._process.stdin is not None:
            self._process.stdin.write(f"{'' if fault is None else fault.name}\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill it, and start it again."""
        self.close()
        self._process = self._started()

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def main() -> None:
    kind, path, port, *more = sys.argv[1:]
    host = more[0] if more else "127.0.0.1"
    name = more[1] if len(more) > 1 else MODEL
    with Model.load(Path(path)) as model:
        engine = Engine(model, positions=POSITIONS)
        with UpstreamServer(KINDS[kind](engine).serving_as(name), port=int(port), host=host) as server:
            for line in sys.stdin:
                server.heal()
                server.fault = Fault[line.strip()] if line.strip() else None


if __name__ == "__main__":
    main()
