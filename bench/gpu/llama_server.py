"""llama-server as a process beside us, over the same file, on the same device."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Self

START_SECONDS = 120.0


class ServerFailed(Exception):
    """llama-server does not start, or does not answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The ids that were written; the seconds from the request to the answer; and as the server counts them: of reading
    the prompt, and of each token behind it."""

    ids: list[int]
    seconds: float
    prompt_seconds: float
    token_seconds: float


class LlamaServer:
    """A llama-server with one slot. Used as a context, it ends with it."""

    def __init__(self, program: Path, model: Path, words: Sequence[str], log: Path) -> None:
        """Start it with `words` behind its usual options. Raise ServerFailed if it does not come up; `log` has why."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-np", "1", *words]
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        end = time.monotonic() + START_SECONDS
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                raise ServerFailed(f"{' '.join(command)} does not come up; see {log}.")
            time.sleep(0.1)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def complete(self, ids: Sequence[int], tokens: int) -> Answer:
        """Return `tokens` greedy ones behind a prompt of `ids`, or fewer where the turn ends. Nothing of an earlier
        prompt is used. Raises ServerFailed."""
        body: dict[str, Any] = {
            "prompt": list(ids), "n_predict": tokens, "temperature": 0.0, "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                found = json.load(answer)
        except urllib.error.URLError as error:
            raise ServerFailed(f"{self._url}: {error}") from None
        seconds, timings = perf_counter() - began, found["timings"]
        return Answer(
            found["tokens"], seconds, timings["prompt_ms"] / 1e3,
            timings["predicted_ms"] / 1e3 / max(1, timings["predicted_n"]),
        )  # fmt: skip

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
