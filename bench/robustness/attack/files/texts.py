"""Texts that kill or hold up a tokenizer: every pre-tokenizer, through the command line, HTTP, and a link."""

import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.robustness.attack.harness import Attack, Found
from edgellm.rpc.address import Address
from testkit import free_port, until_listening
from testkit.gguf.random_model import Shape, write
from testkit.hostile.inputs import PRE_TOKENIZERS, TEXTS
from testkit.processes.http_server import serving

LARGEST = 2**22  # bytes that one text of a request may have
SHORT = Shape("llama", 400, 1, 32, 2, 1, 64, 512)
PATIENCE = 120.0  # seconds for one answer


@dataclass(slots=True)
class Tally:
    """The outcomes so far."""

    tried: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def found(self, **figures: float) -> Found:
        longest = {"longest s": max(self.seconds)} if self.seconds else {}
        return Found(self.tried, tuple(self.wrong), {**longest, **figures})


def lengths(quick: bool) -> tuple[int, ...]:
    return (60_000,) if quick else (1_500, 30_000, 250_000, LARGEST)


def _in_process(quick: bool) -> Found:
    """Tokenise every text with every pre-tokenizer, and compare with llama.cpp's own ids if that survives."""
    from edgellm.engine import Model
    from edgellm.engine.model import TEXT_ONLY
    from edgellm.errors import TextRefused

    tally, refused = Tally(), 0
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE_TOKENIZERS:
            path = Path(folder, f"{pre}.gguf")
            write(path, SHORT, "F32", pre_tokenizer=pre)
            with Model.load(path, TEXT_ONLY) as model:
                for name, made in TEXTS.items():
                    for length in lengths(quick):
                        text, began = made(length), time.perf_counter()
                        tally.tried += 1
                        try:
                            ids = model.tokenize(text, special=True)
                            if pre in ("llama-bpe", "gpt-2", "qwen2") and model.detokenize(ids) != (
                                b"" if name == "control tokens" else text.encode()
                            ):
                                tally.wrong.append(f"{pre}, {length} of {name}: the ids are another text's")
                        except TextRefused:
                            refused += 1
                        tally.seconds.append(time.perf_counter() - began)
            path.unlink()
    return tally.found(refused=refused)


def _chats(quick: bool, *, linked: bool) -> Found:
    tally = Tally()
    pres = ("tekken", "superbpe") if quick else PRE_TOKENIZERS
    with tempfile.TemporaryDirectory() as folder:
        for pre in pres:
            path = Path(folder, f"{pre}.gguf")
            write(path, SHORT, "F32", pre_tokenizer=pre)
            with _verifier(folder, path) if linked else nullcontext("none") as verifier:
                options = ["--draft", str(path), "--verifier", verifier]
                for name, made in TEXTS.items():
                    for length in (60_000, LARGEST) if not quick else (60_000,):
                        text = Path(folder, "text")
                        text.write_text(made(length), encoding="utf-8")
                        _chat(tally, folder, [*options, "--context", str(text)], f"{pre}, {length} of {name}")
    return tally.found()


def _chat(tally: Tally, folder: str, options: list[str], what: str) -> None:
    command = [sys.executable, "-m", "edgellm", "chat", *options, "--max-tokens", "2", "?"]
    began = time.perf_counter()
    tally.tried += 1
    try:
        home = {**os.environ, "EDGELLM_HOME": str(Path(folder, "home"))}
        done = subprocess.run(command, capture_output=True, env=home, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        tally.wrong.append(f"{what}: no end after {PATIENCE:.0f} s")
        return
    tally.seconds.append(time.perf_counter() - began)
    if done.returncode not in (0, 1) or b"unexpected" in done.stderr:
        tally.wrong.append(f"{what}: exit code {done.returncode}: {done.stderr[-200:]!r}")


def _http(quick: bool) -> Found:
    """Send every text to a server, and a small request after each, which must be answered."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        for pre in ("tekken", "superbpe") if quick else PRE_TOKENIZERS:
            path = Path(folder, f"{pre}.gguf")
            write(path, SHORT, "F32", pre_tokenizer=pre)
            with serving(Path(folder, "home"), "--draft", str(path), "--verifier", "none") as (_, url):
                for name, made in TEXTS.items():
                    for length in lengths(quick):
                        _posted(tally, url, made(length - 1_000 if length == LARGEST else length), f"{pre}, {name}")
                _posted(tally, url, "hello", f"{pre}, the next one", 200)
    return tally.found()


def _posted(tally: Tally, url: str, text: str, what: str, expected: int = 0) -> None:
    body = json.dumps({"prompt": text, "max_tokens": 2}, ensure_ascii=False).encode()
    began = time.perf_counter()
    tally.tried += 1
    try:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        status = answer.status
        answer.read()
        connection.close()
    except OSError as error:
        tally.wrong.append(f"{what}: {type(error).__name__}: {error}")
        return
    tally.seconds.append(time.perf_counter() - began)
    if status not in ((expected,) if expected else (200, 400)):
        tally.wrong.append(f"{what}: status {status}")


def _held_up(quick: bool) -> Found:
    """Send a megabyte of control tokens from each of some clients, and a small request from another meanwhile."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "short.gguf")
        write(path, SHORT, "F32", pre_tokenizer="tekken")
        with serving(Path(folder, "home"), "--draft", str(path), "--verifier", "none") as (_, url):
            _posted(tally, url, "hello", "alone", 200)
            large = [
                threading.Thread(target=_posted, args=(tally, url, TEXTS[name](1_000_000), name))
                for name in ("control tokens", "dashes") * (1 if quick else 4)
            ]
            for one in large:
                one.start()
            began = time.perf_counter()
            _posted(tally, url, "hello", "beside large ones", 200)
            beside = time.perf_counter() - began
            for one in large:
                one.join()
    return tally.found(**{"small one beside them s": beside})


@contextmanager
def _verifier(folder: str, path: Path) -> Iterator[str]:
    """Yield the address of a verifier's process."""
    address = Address("127.0.0.1", free_port())
    with serving(Path(folder, "home"), "--role", "verifier", "-m", str(path), "--port", str(address.port)):
        until_listening(address.port)
        yield str(address)


ATTACKS = (
    Attack("text-tokenizers", "12 texts of up to 4 MiB with 35 pre-tokenizers, tokenised", _in_process),
    Attack("text-command-line", "the same through `edgellm chat --context`", partial(_chats, linked=False)),
    Attack("text-http", "the same through /v1/completions of a server, and a small request after it", _http),
    Attack("text-link", "the same through a chat whose verifier is across a link", partial(_chats, linked=True)),
    Attack("text-held-up", "a small request beside megabytes of control tokens", _held_up),
)
