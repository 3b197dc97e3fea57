"""Check that the text is the verifier's own, token by token, with every combination of sources.

    python -m bench.coordgen.lossless [--rounds 17] [--max-tokens 64] [--threads N] [--name ...]
        [--device host|rpc|card]

On f32 copies of the bundled pair. Each round writes one held-out case with every combination of sources, greedy and
sampled: by the verifier alone, by the draft model alone, and greedily by both together. These models' LM heads are too
small to be computed late; so the verifier alone also writes with late heads, with the cost curve of a device on which
much is drafted. All of this runs in one process, so that there are past replies to copy.

Columns: replies; how many equal those without retrieval from the same seed; `ties`, greedy differences between nearly
equal logits; `bugs`, all other differences; tokens, and how many of them were copied. Exit code 1 if there is a bug.
With `--device rpc` or `card` the models are on a device whose memory is not the host's; what they are compared with is
not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import edgellm.llm.cost_curves
import edgellm.llm.model_loading
from bench.harness.report import write
from bench.robustness.lossless import ON_HOST, difference, prompts
from edgellm.engine import Message, Model, to_f32
from edgellm.llm import LLM
from edgellm.spec.draft_length import CostCurve
from edgellm.spec.params import SOURCES
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from testkit.processes.rpc_device import DEVICES, require_device

LATE = "the verifier alone, late heads"
CHEAP = CostCurve((1, 64), (1.0, 1.3), heads=(0.2, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.2))
"""A curve of cheap rows, so that drafts are long and often rejected in the middle."""


@contextmanager
def late() -> Iterator[None]:
    """Compute heads late, even where that does not pay."""
    with ExitStack() as stack:
        for module in (edgellm.llm.model_loading, edgellm.llm.cost_curves):
            stack.enter_context(patch.object(module, "head_pays", lambda _model: True))
        stack.enter_context(patch.object(edgellm.llm.cost_curves.ModelCurve, "current", lambda _: CHEAP))
        yield


def switches() -> list[str]:
    """Return every combination of sources, in the form of `--retrieval`."""
    return [",".join(some) for n in range(1, len(SOURCES) + 1) for some in combinations(SOURCES, n)]


def questions(rounds: int) -> Iterator[tuple[int, str, list[Message]]]:
    """Yield number, sources and prompt of each reply; every combination gets `rounds` prompts."""
    cases = prompts(rounds * len(switches()))
    for number, (case, sources) in enumerate(zip(cases, switches() * rounds, strict=True)):
        yield number, sources, [Message(turn.role, turn.text) for turn in case.prompt]


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table with a row for each method of writing."""
    lines = ["| method | replies | equal | ties | bugs | tokens | copied |", "|---|---|---|---|---|---|---|"]
    for writer, row in found["ways"].items():
        cells = (row.get(key, 0) for key in ("replies", "equal", "tie", "bug", "tokens", "copied"))
        lines.append(f"| {writer} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=17, help=f"prompts for each of {len(switches())} combinations")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="on which the models are")
    parser.add_argument("--name", default="lossless", help="of the result file")
    arguments = parser.parse_args()
    require_device(arguments.device)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        small, big = Path(folder) / "draft.gguf", Path(folder) / "verifier.gguf"
        to_f32(resolve("edgellm-draft"), small)
        to_f32(resolve("edgellm-verifier"), big)
        pairs: list[tuple[str, Path | str, Path | str]] = [
            ("the verifier alone", "none", big),
            (LATE, "none", big),
            ("the draft model alone", small, "none"),
            ("both", small, big),
        ]
        for writer, draft, verifier in pairs:
            with (
                late() if writer == LATE else nullcontext(),
                LLM.open(draft, verifier, threads=arguments.threads) as pair,
                LLM.open(
                    "none" if writer == "both" else draft, verifier, threads=arguments.threads, hardware=ON_HOST
                ) as bare,
                Model.load(small if verifier == "none" else big) as model,
            ):
                for temperature in (0.0, 0.8) if writer != "both" else (0.0,):
                    name = writer + (", sampled" if temperature else "")
                    found = counts[name] = Counter()
                    for number, sources, messages in questions(arguments.rounds):
                        options = {"max_tokens": arguments.max_tokens, "temperature": temperature, "seed": number}
                        reply = pair.reply(messages, retrieval=sources, **options)
                        ours = [token.id for token in reply]
                        theirs = [token.id for token in bare.reply(messages, retrieval="off", **options)]
                        found["replies"] += 1
                        found["tokens"] += len(ours)
                        found["copied"] += reply.summary.retrieved
                        if ours == theirs:
                            found["equal"] += 1
                            continue
                        kind = difference(model, pair.prompt_ids(messages), ours, theirs)[0]
                        found[kind] += 1
                        sys.stdout.write(f"{name}, prompt {number}, {sources}: {kind}\n")
                    sys.stdout.write(f"{name}: {dict(found)}\n")
                    sys.stdout.flush()
    ways = {name: dict(found) for name, found in counts.items()}
    figures = {"device": arguments.device, "rounds": arguments.rounds, "ways": ways}
    sys.stdout.write(table(figures) + "\n")
    sys.stdout.write(f"written: {write(arguments.name, 'bench.coordgen.lossless', figures, HELD_OUT_SEED)}\n")
    sys.exit(1 if any(found["bug"] for found in counts.values()) else 0)


if __name__ == "__main__":
    main()
