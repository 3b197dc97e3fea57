"""Measure the time between tokens against bandwidth, with ids alone and with whole distributions (Synera, Fig. 13).

    python -m bench.synera.bandwidth [--cases 1] [--budget 0.2] [--megabits 0.1 0.3 1 3 10 100] [--vocabulary 32000]

The bundled pair runs at the pace of a device (see `testkit.processes.paced_pair`), over a network with a round trip of
20 ms. It samples at temperature 0.8, where rejection sampling would need the distributions that drafts were drawn from.

Columns: the draft model `alone`; `ids`, our protocol, which sends drafted ids alone; and `whole`, with 4 more bytes in
each chunk for every token of the vocabulary and every draft, for a vocabulary as large as that of the paper's models.
The replies are the same in both; only their times differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.harness.figures import empty_plot, save_plot
from bench.harness.report import write
from bench.synera.stalls import Method
from edgellm.services.client.verifier_client import SentRequest
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from testkit.network.relay import Network
from testkit.processes.paced_pair import PASS, TOKEN, paced_pair, paced_verifier
from testkit.questions import parsed_with_pair, questions

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


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each network."""
    cases, rows = questions(arguments.cases, pair=arguments.pair), []
    for megabits in arguments.megabits:
        network = Network(megabits, 0.020)
        with ExitStack() as closing:
            relay = closing.enter_context(paced_verifier(resolve(arguments.verifier), PASS, network))
            address = f"127.0.0.1:{relay.port}"
            methods = {
                "alone": Method({"gate": "never", "temperature": TEMPERATURE}),
                "ids": Method({"budget": arguments.budget, "temperature": TEMPERATURE}),
                "whole": Method({"budget": arguments.budget, "temperature": TEMPERATURE}),
            }
            pairs = {
                name: closing.enter_context(paced_pair(arguments.draft, address, TOKEN, arguments.profile))
                for name in methods
            }
            for seed, question in enumerate(cases):
                for name in ("alone", "ids"):
                    methods[name].answer(pairs[name], question, seed)
                with whole_distributions(arguments.vocabulary):
                    methods["whole"].answer(pairs["whole"], question, seed)
        figures = {name: method.figures(methods["alone"]) for name, method in methods.items()}
        rows.append({"megabits": megabits, **figures})
        print(table({"networks": rows[-1:]}), end="", flush=True)
    return rows


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


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw the time between tokens against bandwidth (Fig. 13)."""
    made = empty_plot(
        "Slower and slower networks", "bandwidth, Mbit/s", "time between tokens, ms", xscale="log", yscale="log"
    )
    if made is None:
        return None
    figure, axes = made
    rows = found["networks"]
    for name, style in (("alone", ":k"), ("ids", "-o"), ("whole", "--s")):
        points = [row[name]["time_between_tokens_ms"] for row in rows]
        axes.plot([row["megabits"] for row in rows], points, style, label=name)
    return save_plot(figure, axes, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1, help="a family")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--megabits", type=float, nargs="+", default=[0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
    parser.add_argument("--vocabulary", type=int, default=32_000, help="size of the vocabulary for whole distributions")
    parser.add_argument("--name", default="bandwidth", help="of the result file")
    arguments = parsed_with_pair(parser)
    figures = {"budget": arguments.budget, "vocabulary": arguments.vocabulary, "networks": run(arguments)}
    print(f"written: {write(arguments.name, 'bench.synera.bandwidth', figures, HELD_OUT_SEED, plot=plot)}")


if __name__ == "__main__":
    main()
