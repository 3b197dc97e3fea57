"""A decoder, bad input for it, and the outcome: inputs taken, and refused with which error."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import tempfile
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from google.protobuf.message import Message

from bench.robustness.fuzz.mutate import mutated, tweaked
from edgellm.errors import EdgeError

CORPUS = Path(__file__).with_name("corpus.json")
MEMORY = 4 * 2**20  # bytes that reading an input may take
PER_BYTE = 32  # further bytes for each byte of the input
_WEIGHED = 500  # inputs of a target whose memory is measured, which is slow: of a short run one in _SPARED
_SPARED = 4
_KEPT = 20


@dataclass(frozen=True)
class Target:
    """A decoder: good inputs (bytes, or messages), and a function that raises an EdgeError for bad ones.

    Of a long run it takes its `share` of a million inputs.
    """

    name: str
    seeds: Sequence[bytes | Message]
    read: Callable[[bytes], object]
    share: int


@dataclass
class Outcome:
    """The outcome of a target's inputs; `strange` ones were neither taken nor refused with an EdgeError."""

    inputs: int = 0
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    strange: list[dict[str, str]] = field(default_factory=list)
    most_memory: int = 0  # bytes beyond the allowance for the input's length
    longest: float = 0.0  # seconds
    seconds: float = 0.0


def label(text: str) -> str:
    """Return an error message without the parts that depend on the input."""
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/[^/\s]+", "FOLDER", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", text)
    return re.sub(r"\d[\d.e+-]*|nan|inf", "N", text)[:70]


def inputs(target: Target, count: int, seed: int) -> Any:
    """Yield the saved corpus, the good inputs, then mutations of them; always the same for a seed."""
    rng = random.Random(f"{target.name}/{seed}")
    whole = [one.SerializeToString() if isinstance(one, Message) else one for one in target.seeds]
    yield from (base64.b64decode(one) for one in json.loads(CORPUS.read_text()).get(target.name, ()))
    yield from whole
    for _ in range(count):
        one = rng.choice(target.seeds)
        if isinstance(one, Message) and rng.random() < 0.7:
            data = tweaked(one, rng)
            yield data if rng.random() < 0.85 else mutated(data, rng, whole)
        else:
            yield mutated(one.SerializeToString() if isinstance(one, Message) else one, rng, whole)


def fire(target: Target, count: int, seed: int) -> Outcome:
    """Try `count` mutations and the corpus. Warnings count as strange errors."""
    done = Outcome()
    began = perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, data in enumerate(inputs(target, count, seed)):
            every = max(_SPARED, count // _WEIGHED)
            take(target, data, done, weigh=number % every == 0)
    done.seconds = perf_counter() - began
    return done


def take(target: Target, data: bytes, done: Outcome, *, weigh: bool) -> None:
    """Try one input and add its outcome to `done`. With `weigh` its memory is measured, which takes time."""
    done.inputs += 1
    if weigh:
        tracemalloc.start()
    began = perf_counter()
    try:
        target.read(data)
        done.taken += 1
    except EdgeError as error:
        done.refused[f"{type(error).__name__}: {label(error.what)}"] += 1
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - finding these is what this is for
        if type(error).__name__ == "Refused":
            done.refused[str(error)] += 1
        elif len(done.strange) < _KEPT:
            found = f"{type(error).__module__}.{type(error).__name__}: {error}"
            done.strange.append({"error": found[:300], "input": base64.b64encode(data).decode()})
    if weigh:
        most = tracemalloc.get_traced_memory()[1] - PER_BYTE * len(data)
        tracemalloc.stop()
        done.most_memory = max(done.most_memory, most)
        if most > MEMORY:
            done.strange.append({"error": f"{most} bytes", "input": base64.b64encode(data).decode()})
    else:
        done.longest = max(done.longest, perf_counter() - began)
