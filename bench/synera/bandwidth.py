"""Measure the time between tokens against bandwidth, with ids alone and with whole distributions (Synera, Fig. 13).

The bundled pair runs at the pace of a device (see `testkit.processes.paced_pair`), over a network with a round trip of
20 ms. It samples at temperature 0.8, where rejection sampling would need the distributions that drafts were drawn from.

Columns: the draft model `alone`; `ids`, our protocol, which sends drafted ids alone; and `whole`, with 4 more bytes in
each chunk for every token of the vocabulary and every draft, for a vocabulary as large as that of the paper's models.
The replies are the same in both; only their times differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Annotated, Any
from unittest.mock import patch

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.synera.stalls import Method
from edgellm.services.client.verifier_client import SentRequest
from edgellm.storage import resolve
from testkit.network.relay import Network
from testkit.processes.paced_pair import PASS, TOKEN, paced_pair, paced_verifier
from testkit.questions import PairFiles, PairName, Question, pair_files, questions

TEMPERATURE = 0.8
_UNKNOWN = b"\xfa\x3f"  # field 1023, of bytes, which decoders skip as unknown


def _length(n: int) -> bytes:
    """Return a protobuf varint."""
    parts = []
    while n > 127:
        parts.append(n & 127 | 128)
        n >>= 7
    return bytes([*parts, n])


@contextmanager
def padded_requests(padding: Callable[[SentRequest], int]) -> Iterator[None]:
    """Add as many bytes to each request as `padding` returns for it."""
    frame = SentRequest.frame

    def padded(asked: SentRequest, position: int) -> bytes:
        data = frame(asked, position)
        n = padding(asked)
        asked.bytes_up += n
        return data + _UNKNOWN + _length(n) + bytes(n) if n else data

    with patch.object(SentRequest, "frame", padded):
        yield


def whole_distributions(vocabulary: int) -> AbstractContextManager[None]:
    """Pad requests by the bytes of whole distributions."""
    return padded_requests(lambda asked: 4 * vocabulary * len(asked.request.draft))


def on_network(megabits: float, files: PairFiles, cases: Sequence[Question], budget: float, vocabulary: int) -> Figures:
    """Return the figures of a network."""
    with ExitStack() as closing:
        relay = closing.enter_context(paced_verifier(resolve(files.verifier), PASS, Network(megabits, 0.020)))
        address = f"127.0.0.1:{relay.port}"
        methods = {
            "alone": Method({"gate": "never", "temperature": TEMPERATURE}),
            "ids": Method({"budget": budget, "temperature": TEMPERATURE}),
            "whole": Method({"budget": budget, "temperature": TEMPERATURE}),
        }
        pairs = {
            name: closing.enter_context(paced_pair(files.draft, address, TOKEN, files.profile)) for name in methods
        }
        for seed, question in enumerate(cases):
            for name in ("alone", "ids"):
                methods[name].answer(pairs[name], question, seed)
            with whole_distributions(vocabulary):
                methods["whole"].answer(pairs["whole"], question, seed)
    return {"megabits": megabits, **{name: method.figures(methods["alone"]) for name, method in methods.items()}}


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each network."""
    return "".join(
        f"{row['megabits']:>7g} Mbit/s"
        + "".join(
            f"   {name} {row[name]['time_between_tokens_ms']:.1f} ms ({_bytes(name, row[name])})"
            for name in ("alone", "ids", "whole")
        )
        + "\n"
        for row in results["networks"]
    )


def _bytes(name: str, row: dict[str, Any]) -> str:
    bytes_per_token: float = row["bytes_per_token"]
    return f"{bytes_per_token:.0f} B a token" if bytes_per_token or name == "alone" else "no verdict came in time"


def measure(
    pair: PairName = "home",
    cases: Annotated[int, "a family"] = 1,
    budget: float = 0.2,
    megabits: Sequence[float] = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0),
    vocabulary: Annotated[int, "tokens of whole distributions"] = 32_000,
) -> Figures:
    """Return the figures of all networks."""
    asked, files = questions(cases, pair=pair), pair_files(pair)
    rows = [on_network(each, files, asked, budget, vocabulary) for each in track(megabits, "networks")]
    return {"budget": budget, "vocabulary": vocabulary, "networks": rows}
