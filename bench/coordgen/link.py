"""Measure the gain of copied drafts when the verifier is across a network (CoordGen beside Synera).

    python -m bench.coordgen.link [--cases 8] [--token-ms 30] [--pass-ms 60] [--megabits 10] [--round-trip-ms 20]

The bundled pair runs at the pace of a device (see `testkit.processes.paced_pair`), greedy, with every token verified.
Each case of a task is answered by each method in turn: by the verifier alone, which then writes several tokens for each
request; with copies; with drafts of the small model, which drafts on meanwhile; and with both. The text must be the
same in all methods, else the exit code is 1.

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
from models.home.corpus import held_out
from testkit.network.relay import Network
from testkit.processes.paced_pair import PASS, TOKEN, paced_pair, paced_verifier

MOST = 96
METHODS: Mapping[str, tuple[bool, str]] = {
    "the verifier alone": (False, "off"),
    "copies": (False, "auto"),
    "the small model": (True, "off"),
    "both": (True, "auto"),
}
"""For each method, whether the small model drafts, and `--retrieval`."""


@dataclass
class Method:
    """A method of answering, and its measurements on one task."""

    pair: LLM
    retrieval: str
    took: list[float] = field(default_factory=list)  # seconds of each reply
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
        """Seconds for each token."""
        return sum(self.took) / self.tokens

    @property
    def tokens(self) -> int:
        return sum(map(len, self.written))


def measured(task: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return figures of every method on one task, each with a pair of its own, which remembers its own past."""
    network = Network(arguments.megabits, arguments.round_trip_ms * 1e-3)
    with ExitStack() as stack:
        model = resolve("edgellm-verifier")
        relay = stack.enter_context(paced_verifier(model, arguments.pass_ms * 1e-3, network, len(METHODS)))
        address, methods = f"127.0.0.1:{relay.port}", {}
        for name, (drafts, retrieval) in METHODS.items():
            draft = "edgellm-draft" if drafts else None
            pair = stack.enter_context(paced_pair(draft, address, arguments.token_ms * 1e-3))
            methods[name] = Method(pair, retrieval)
        for case in held_out(TASKS["home"][task], arguments.cases, SEED):
            messages = [Message(turn.role, turn.text) for turn in case.prompt]
            for method in methods.values():
                method.answer(messages)
    alone = methods["the verifier alone"]
    return {
        name: {
            "ms_a_token": 1e3 * method.pace,
            "speed": alone.pace / method.pace,
            "spread": spread([one / two for one, two in zip(alone.took, method.took, strict=True)]),
            "tokens_a_round": method.tokens / method.rounds,
            "same_text": method.written == alone.written,
        }
        for name, method in methods.items()
    }


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table: milliseconds for each token, and the speed against the verifier alone."""
    lines = [f"| task | {' | '.join(METHODS)} |", f"|---|{'---|' * len(METHODS)}"]
    for task, methods in results["tasks"].items():
        cells = (f"{row['ms_a_token']:.0f} ms, {row['speed']:.2f}×" for row in methods.values())
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
    for task in TASKS["home"]:
        tasks[task] = measured(task, arguments)
        sys.stdout.write(table({"tasks": {task: tasks[task]}}).splitlines()[-1] + "\n")
        sys.stdout.flush()
    setting = {name: getattr(arguments, name) for name in ("cases", "token_ms", "pass_ms", "megabits", "round_trip_ms")}
    sys.stdout.write(table({"tasks": tasks}))
    sys.stdout.write(f"written: {write(arguments.name, 'bench.coordgen.link', {**setting, 'tasks': tasks}, SEED)}\n")
    sys.exit(0 if all(row["same_text"] for methods in tasks.values() for row in methods.values()) else 1)


if __name__ == "__main__":
    main()
