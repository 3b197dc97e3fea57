"""A stock server that knows its texts by heart, at the pace of a real one, for many devices at once on a small machine.

    python -m testkit.upstream.paced TEXTS PORT SECONDS

TEXTS is a JSON file with a list of texts, each a list of token ids. The server answers as vLLM does: what comes behind
the beginning of a text is its next token, and behind anything else token 0. All that is asked while a pass of SECONDS
runs is answered together by the next one, as by continuous batching.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testkit import ROOT
from testkit.upstream.dialects import MODEL
from testkit.upstream.engine import BLOCK

POSITIONS = 4096


class PacedServer:
    """Answers for one event loop."""

    def __init__(self, texts: Sequence[Sequence[int]], seconds: float) -> None:
        self._next = {tuple(text[:end]): text[end] for text in texts for end in range(1, len(text))}
        self._seconds = seconds
        self._asked = asyncio.Event()
        self._passed = asyncio.get_running_loop().create_future()

    async def compute(self) -> None:
        """Run passes while something is asked for."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            passed, self._passed = self._passed, asyncio.get_running_loop().create_future()
            await asyncio.sleep(self._seconds)
            passed.set_result(None)

    async def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status of an answer, and its JSON."""
        if (method, path) == ("GET", "/v1/models"):
            return 200, {"data": [{"id": MODEL, "owned_by": "vllm", "max_model_len": POSITIONS}]}
        if (method, path) != ("POST", "/v1/completions") or body.get("logprobs"):
            return 404, {"detail": "Not Found"}
        self._asked.set()
        await asyncio.shield(self._passed)
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [
            {"index": at, "text": "", "token_ids": [self._next.get(tuple(ids), 0)], "finish_reason": "length"}
            for at, ids in enumerate(prompts)
        ]
        cached = sum((len(ids) - 1) // BLOCK * BLOCK for ids in prompts)
        return 200, {"choices": choices, "usage": {"prompt_tokens_details": {"cached_tokens": cached}}}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection until it ends."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                sizes = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
                data = await reader.readexactly(int(sizes[0])) if sizes else b"null"
                status, found = await self.answer(method, path, json.loads(data))
                out = json.dumps(found, separators=(",", ":")).encode()
                writer.write(b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\n" % status)
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(out), out))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class PacedProcess:
    """A paced server in a process of its own."""

    def __init__(self, texts: Path, seconds: float) -> None:
        """Start it, and return when it is up."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        words = [str(texts), str(self.port), str(seconds)]
        self._process = subprocess.Popen([sys.executable, "-m", "testkit.upstream.paced", *words], cwd=ROOT)
        until_open(self.port, self._process)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def until_open(port: int, process: subprocess.Popen[Any], seconds: float = 120.0) -> None:
    """Wait until something listens at a port. Raise TimeoutError after so many seconds, or where the process ends."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end or process.poll() is not None:
                raise TimeoutError(f"nothing listens at port {port}") from None
            time.sleep(0.05)
        else:
            return


async def _main(texts: Path, port: int, seconds: float) -> None:
    server = PacedServer(json.loads(texts.read_text()), seconds)
    computing = asyncio.create_task(server.compute())
    async with await asyncio.start_server(server.serve, "127.0.0.1", port):
        await computing


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
