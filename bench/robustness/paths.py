"""Check that a reply at budget 1.0 is the verifier's own on every path that it can take.

    python -m bench.robustness.paths [--prompts 304] [--max-tokens 48] [--draft PATH] [--verifier PATH]
        [--device host|rpc|card]

Greedy, f32 copies of the pair, held-out cases of every family in turn; the verifier in a process of its own.

- *parallel*: the device drafts on from predicted verdicts while it waits, and keeps the drafts of right ones;
- *waiting*: it does not;
- *evicted*: the verifier has a single KV slot, and two replies take turns chunk by chunk, so that each finds its
  session evicted every time and has to send its tokens again;
- *reconnected*: the connection is cut before every reply;
- *early exit*: the draft model is cut in two, and leaves early above a threshold of 1.0, which is never.

Each is compared with the verifier alone in this process. A difference at nearly equal logits is a numerical
tie; any other is a bug, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextlib import closing as close_behind
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.report import write
from bench.robustness.lossless import ON_HOST, TIE, difference, prompts
from edgellm.engine import Message, Model, to_f32
from edgellm.llm import LLM
from edgellm.spec.stream import Reply
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from testkit.network.relay import Network, Relay
from testkit.processes.rpc_device import DEVICES, require_device
from testkit.processes.verifier import VerifierProcess

NEAR = Network(megabits=1000.0, round_trip=0.002)


@dataclass
class Found:
    """The result of one path."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, reply: Reply) -> None:
        summary = reply.summary
        self.counts["bytes up"] += summary.bytes_up
        self.counts["guesses hit"] += summary.guesses_hit
        self.counts["guesses tried"] += summary.guesses_tried
        self.counts["chunks"] += summary.chunks_verified
        self.counts["not wholly verified"] += summary.share_verified != 1.0


class Paths:
    """The pair, ready for every path."""

    def __init__(self, draft: Path, verifier: Path, most: int, closing: ExitStack, device: str) -> None:
        self._most = most
        self.roomy, self.narrow = (
            closing.enter_context(close_behind(VerifierProcess(verifier, n, device=device))) for n in (4, 1)
        )
        with Model.load(draft) as small:
            for served in (self.roomy, self.narrow):
                served.connect(small).close()
        self.near = closing.enter_context(Relay(self.roomy.port, NEAR))
        self.pair = closing.enter_context(LLM.open(draft, f"127.0.0.1:{self.roomy.port}", threads=1))
        self.one, self.two = (
            closing.enter_context(LLM.open(draft, f"127.0.0.1:{self.narrow.port}", threads=1)) for _ in range(2)
        )
        self.cut = closing.enter_context(LLM.open(draft, f"127.0.0.1:{self.near.port}", threads=1))

    def straight(self, cases: Sequence[list[Message]], found: Found, **options: Any) -> list[list[int]]:
        """Write one reply after another."""
        return [self._whole(self.pair, messages, found, **options) for messages in cases]

    def evicted(self, cases: Sequence[list[Message]], found: Found) -> list[list[int]]:
        """Write two replies at a time, a token of each in turn."""
        written: list[list[int]] = []
        for start in range(0, len(cases), 2):
            pairs = zip((self.one, self.two), cases[start : start + 2], strict=False)
            replies = [
                pair.reply(messages, max_tokens=self._most, gate="always", retrieval="off") for pair, messages in pairs
            ]
            texts: list[list[int]] = [[] for _ in replies]
            left = list(zip(replies, texts, strict=True))
            while left:
                for reply, text in list(left):
                    token = next(reply, None)
                    if token is None:
                        left.remove((reply, text))
                        found.add(reply)
                    else:
                        text.append(token.id)
            written += texts
        return written

    def reconnected(self, cases: Sequence[list[Message]], found: Found) -> list[list[int]]:
        """Cut the connection before every reply, and let the device notice and reconnect."""
        written = []
        for messages in cases:
            self.near.cut()
            time.sleep(0.5)
            written.append(self._whole(self.cut, messages, found))
        return written

    def _whole(self, pair: LLM, messages: list[Message], found: Found, **options: Any) -> list[int]:
        reply = pair.reply(messages, max_tokens=self._most, gate="always", retrieval="off", **options)
        ids = [token.id for token in reply]
        found.add(reply)
        return ids


def run(draft: Path, verifier: Path, cases: Sequence[list[Message]], most: int, device: str) -> dict[str, Counter[str]]:
    """Write replies on every path with the models on `device`, and compare them with the verifier alone on the host."""
    with ExitStack() as closing:
        paths = Paths(draft, verifier, most, closing, device)
        alone = closing.enter_context(LLM.open("none", verifier, threads=1, hardware=ON_HOST))
        model = closing.enter_context(Model.load(verifier))
        right = [[token.id for token in alone.reply(messages, max_tokens=most, retrieval="off")] for messages in cases]
        there: dict[str, Callable[[Found], list[list[int]]]] = {
            "parallel": lambda found: paths.straight(cases, found),
            "waiting": lambda found: paths.straight(cases, found, parallel=False),
            "evicted": lambda found: paths.evicted(cases, found),
            "reconnected": lambda found: paths.reconnected(cases, found),
            "early exit": lambda found: paths.straight(cases, found, early_exit="on", exit_threshold=1.0),
        }
        counted = {}
        for name, write_all in there.items():
            found = Found()
            for messages, ours, theirs in zip(cases, write_all(found), right, strict=True):
                found.counts["replies"] += 1
                found.counts["tokens"] += len(ours)
                if ours == theirs:
                    found.counts["equal"] += 1
                else:
                    kind, apart, at = difference(model, paths.pair.prompt_ids(messages), ours, theirs)
                    found.counts[kind] += 1
                    sys.stdout.write(f"{name}, token {at}: logits {apart:.2e} apart: {kind}\n")
            counted[name] = found.counts
            if name == "reconnected":
                found.counts["connections"] = paths.near.connections
            sys.stdout.write(table({"ways": {name: found.counts}}))
            sys.stdout.flush()
        return counted


def table(results: Mapping[str, Any]) -> str:
    """Return a line of counts for each path."""
    return "".join(
        f"{name:12}" + ", ".join(f"{number} {what}" for what, number in sorted(counts.items())) + "\n"
        for name, counts in results["ways"].items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=304)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="on which the models are")
    parser.add_argument("--name", default="paths", help="of the result file")
    arguments = parser.parse_args()
    cases = [[Message(turn.role, turn.text) for turn in case.prompt] for case in prompts(arguments.prompts)]
    require_device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        draft, verifier = Path(folder) / "draft.gguf", Path(folder) / "verifier.gguf"
        to_f32(resolve(arguments.draft), draft)
        to_f32(resolve(arguments.verifier), verifier)
        counted = run(draft, verifier, cases, arguments.max_tokens, arguments.device)
    figures = {"device": arguments.device, "tie_below": TIE, "ways": counted}
    sys.stdout.write(f"written: {write(arguments.name, 'bench.robustness.paths', figures, HELD_OUT_SEED)}\n")
    sys.exit(1 if any(counts["bug"] for counts in counted.values()) else 0)


if __name__ == "__main__":
    main()
