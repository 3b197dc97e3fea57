"""Measure what copied drafts are worth where the verifier is across a network (CoordGen beside Synera).

    python -m bench.coordgen.link [--cases 8] [--token-ms 30] [--pass-ms 60] [--megabits 10] [--round-trip-ms 20]

The bundled pair runs at the pace of a device (see `testkit.processes.paced_pair`), greedy, with every token verified.
Each case of a task is answered in each way in turn: by the verifier alone, which then writes several tokens for each
request; with copies; with drafts of the small model, which drafts on meanwhile; and with both. The text must be the
same in all ways, else the exit code is 1.

Columns: milliseconds for each token of whole replies, from the question to the last token, and the speed as a multiple
of the verifier alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from bench.coordgen.tasks import SEED, TASKS
from bench.harness.report import write
from bench.harness.statistics import spread
from edgellm.engine import Message
from edgellm.llm import LLM
from edgellm.storage import resolve
from models.corpus import held_out
from testkit.network.relay import Network
from testkit.processes.paced_pair import PASS, TOKEN, paced_pair, paced_verifier

MOST = 96
WAYS: Mapping[str, tuple[bool, str]] = {
    "the verifier alone": (False, "off"),
    "copies": (False, "auto"),
    "the small model": (True, "off"),
    "both": (True, "auto"),
}
"""Whether the small model drafts, and `--retrieval`."""


@dataclass
class Way:
    """One way of answering, and what came of it on one task."""

    pair: LLM
    retrieval: str
    took: list[float] = field(default_factory=list)  # seconds, each reply
    rounds: int = 0
    written: list[list[int]] = field(default_factory=list)

    def answer(self, messages: Sequence[Message]) -> None:
        reply = self.pair.reply(messages, max_tokens=MOST, budget=1.0, retrieval=self.retrieval)
        began = perf_counter()
        self.written.append([token.id for token in reply])
        self.took.append(perf_counter() - began)
        self.rounds += reply.summary.rounds

    @property
    def pace(self) -> float:
        """Seconds a token."""
        return sum(self.took) / self.tokens

    @property
    def tokens(self) -> int:
        return sum(map(len, self.written))


def measured(task: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every way on one task, each with a pair of its own, so that each remembers its own past."""
    network = Network(arguments.megabits, arguments.round_trip_ms * 1e-3)
    with ExitStack() as stack:
        model = resolve("edgellm-verifier")
        relay = stack.enter_context(paced_verifier(model, arguments.pass_ms * 1e-3, network, len(WAYS)))
        address, ways = f"127.0.0.1:{relay.port}", {}
        for name, (drafts, retrieval) in WAYS.items():
            draft = "edgellm-draft" if drafts else None
            pair = stack.enter_context(paced_pair(draft, address, arguments.token_ms * 1e-3))
            ways[name] = Way(pair, retrieval)
        for case in held_out(TASKS[task], arguments.cases, SEED):
            messages = [Message(turn.role, turn.text) for turn in case.prompt]
            for way in ways.values():
                way.answer(messages)
    alone = ways["the verifier alone"]
    return {
        name: {
            "ms_a_token": 1e3 * way.pace,
            "speed": alone.pace / way.pace,
            "spread": spread([one / two for one, two in zip(alone.took, way.took, strict=True)]),
            "tokens_a_round": way.tokens / way.rounds,
            "same_text": way.written == alone.written,
        }
        for name, way in ways.items()
    }


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table: milliseconds for each token, and the speed against the verifier alone."""
    lines = [f"| task | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for task, ways in results["tasks"].items():
        cells = (f"{row['ms_a_token']:.0f} ms, {row['speed']:.2f}×" for row in ways.values())
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--token-ms", type=float, default=1e3 * TOKEN)
    parser.add_argument("--pass-ms", type=float, default=1e3 * PASS)
    parser.add_argument("--megabits", type=float, default=10.0)
    parser.add_argument("--round-trip-ms", type=float, default=20.0)
    parser.add_argument("--name", default="link", help="of the result file")
    arguments = parser.parse_args()
    tasks = {}
    for task in TASKS:
        tasks[task] = measured(task, arguments)
        sys.stdout.write(table({"tasks": {task: tasks[task]}}).splitlines()[-1] + "\n")
        sys.stdout.flush()
    setting = {name: getattr(arguments, name) for name in ("cases", "token_ms", "pass_ms", "megabits", "round_trip_ms")}
    sys.stdout.write(table({"tasks": tasks}))
    sys.stdout.write(f"written: {write(arguments.name, 'bench.coordgen.link', {**setting, 'tasks': tasks}, SEED)}\n")
    sys.exit(0 if all(row["same_text"] for ways in tasks.values() for row in ways.values()) else 1)


if __name__ == "__main__":
    main()
