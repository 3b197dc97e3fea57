"""A reader of foreign data, bad input for it, and the outcome: inputs taken, refused, and strange ones."""

import base64
import json
import random
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import Message

from edgellm.errors import EdgeError
from tests.fuzz.mutation import mutated, tweaked

CORPUS = Path(__file__).with_name("corpus.json")
MEMORY = 4 * 2**20  # bytes that reading an input may take
PER_BYTE = 32  # further bytes for each byte of the input
WEIGHED = 4  # of so many inputs the memory of one is measured, which is slow


@dataclass(frozen=True)
class Reader:
    """What reads foreign data: good inputs, bytes or messages, and a function that raises an EdgeError for bad ones."""

    name: str
    seeds: Sequence[bytes | Message]
    read: Callable[[bytes], object]

    def inputs(self, count: int, seed: int) -> Iterator[bytes]:
        """Yield inputs that once did harm, the good ones, then mutations of them; always the same for a seed."""
        rng = random.Random(f"{self.name}/{seed}")
        whole = [one.SerializeToString() if isinstance(one, Message) else one for one in self.seeds]
        yield from (base64.b64decode(one) for one in json.loads(CORPUS.read_text()).get(self.name, ()))
        yield from whole
        for _ in range(count):
            one = rng.choice(self.seeds)
            if isinstance(one, Message) and rng.random() < 0.7:
                data = tweaked(one, rng)
                yield data if rng.random() < 0.85 else mutated(data, rng, whole)
            else:
                yield mutated(one.SerializeToString() if isinstance(one, Message) else one, rng, whole)


@dataclass
class Outcome:
    """What became of inputs; `strange` ones were neither taken nor refused, or took much memory."""

    taken: int = 0
    refused: int = 0
    strange: list[str] = field(default_factory=list)

    def take(self, reader: Reader, data: bytes, *, weigh: bool = False) -> None:
        """Try one input. With `weigh` its memory is measured."""
        if weigh:
            tracemalloc.start()
        try:
            reader.read(data)
            self.taken += 1
        except EdgeError:
            self.refused += 1
        except Exception as error:  # noqa: BLE001 - finding these is what this is for
            self.strange.append(f"{type(error).__name__}: {error} by {base64.b64encode(data).decode()}")
        if weigh:
            most = tracemalloc.get_traced_memory()[1] - PER_BYTE * len(data)
            tracemalloc.stop()
            if most > MEMORY:
                self.strange.append(f"{most} bytes by {base64.b64encode(data).decode()}")


def fire(reader: Reader, count: int, seed: int) -> Outcome:
    """Try `count` mutations and the corpus. Warnings count as strange errors."""
    done = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, data in enumerate(reader.inputs(count, seed)):
            done.take(reader, data, weigh=number % WEIGHED == 0)
    return done
