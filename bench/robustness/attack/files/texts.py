"""Texts that kill or hold up a tokenizer: every pre-tokenizer, in this process and through HTTP."""

import http.client
import json
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.robustness.attack.harness import Attack, Found
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


ATTACKS = (
    Attack("text-tokenizers", "12 texts of up to 4 MiB with 35 pre-tokenizers, tokenised", _in_process),
    Attack("text-http", "the same through /v1/completions of a server, and a small request after it", _http),
    Attack("text-held-up", "a small request beside megabytes of control tokens", _held_up),
)
