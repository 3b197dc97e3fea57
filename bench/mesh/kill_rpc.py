"""Kill a device that holds layers over RPC while a reply is written, or stop its server: when does the text go on?

    python -m bench.mesh.kill_rpc [ROUNDS] [--stop] [--seed 0]

The model is a hybrid, which cannot be cut, over two workers on loopback; a noisy copy of it drafts. In each round one
worker, chosen at random, is killed with its server at a random token. From then on the draft model writes alone,
marked as unverified, until the model is there again over the rest; tokens are then taken at a reader's pace. The text
before must be the model's own, and no token may be missing. The table has the seconds from the kill to the first token
that the draft model wrote alone, and from there to the next verified one.

With `--stop` it is the server alone that is stopped (SIGSTOP), while the worker that has started it goes on. That is
noticed by the silence, which may last `model.LEAST_SILENCE` in a model as small as this one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import report
from bench.harness.statistics import spread
from edgellm.engine import Context, ContextSpec, Ids, Model, ModelFile
from edgellm.llm.rpc_llm import RpcOptions, open_over_rpc
from edgellm.mesh.ggml_rpc.model import LEAST_SILENCE
from edgellm.spec.types import Source
from testkit.gguf.architectures import write
from testkit.processes.worker import WorkerProcess

ARCHITECTURE = "qwen35"
TOKENS = 140
PACE = 0.05  # seconds that a reader takes for a token
QUESTION = "The mug is on the shelf. The key is in the drawer. Where is the mug, and where is the key?"
KILL_GOAL = 1.0  # seconds
STOP_GOAL = LEAST_SILENCE + 5.0
"""Seconds: the silence itself, and what a machine with other work takes to notice it."""


@dataclass(frozen=True)
class Round:
    """What followed the kill or stop of `victim` at token `at`: seconds to the first unverified token, and to the next
    verified one, if the reply was not over before."""

    victim: str
    at: int
    next_s: float
    verified_s: float | None
    tokens: int
    unverified: int
    problems: tuple[str, ...]


def alone(path: Path, prompt: Ids) -> list[int]:
    """Return the model's own greedy text."""
    found: list[int] = []
    with Model.load(path, probe=False) as model, Context(model, ContextSpec(n_ctx=512, threads=1)) as context:
        ids = prompt
        for _ in range(TOKENS):
            found.append(int(context.decode(ids)[0].argmax()))
            ids = np.array(found[-1:], dtype=np.int32)
    return found


def one_round(
    model: Path, draft: Path, workers: dict[str, WorkerProcess], own: list[int], rng: random.Random, *, stop: bool
) -> Round:
    """Open the pair, kill a worker or `stop` its server while it writes, and return what followed."""
    victim, at = rng.choice(list(workers)), rng.randrange(8, 48)
    peers = tuple(f"{name}={worker.address}" for name, worker in workers.items())
    options = RpcOptions("here:1,a:2-3,b:4", peers=peers, context=512, sessions=1)
    with open_over_rpc(ModelFile.open(model), options, draft=draft, history=False) as opened:
        ids: list[int] = []
        killed, next_s, verified_s, unverified = 0.0, 0.0, None, 0
        problems: list[str] = []
        for token in opened.pair.reply(QUESTION, max_tokens=TOKENS, retrieval="off"):
            now = time.perf_counter()
            if token.source is Source.DRAFT:
                unverified += 1
                if not killed:
                    problems.append("a token is unverified before the loss")
                elif not next_s:
                    next_s = now - killed
                time.sleep(PACE)
            elif killed and unverified and verified_s is None:
                verified_s = now - killed
            ids.append(token.id)
            if len(ids) == at:
                if stop:
                    workers[victim].stop_rpc_server()
                else:
                    workers[victim].hit("kill")
                killed = time.perf_counter()
        if ids[:at] != own[:at]:
            problems.append("the text before the loss is not the model's")
        if not next_s:
            problems.append("the text did not go on")
    return Round(victim, at, next_s, verified_s, len(ids), unverified, tuple(problems))


def table(found: dict[str, Any]) -> str:
    """Return a summary of the rounds."""
    next_s, verified, rounds = found["next_s"], found["verified_s"], found["rounds"]
    hit = found.get("hit", "kill")
    alone = f"{1e3 * next_s['median']:.0f} ms after the {hit} in the median, {next_s['max']:.2f} s at most"
    lines = [
        f"{found['without_problems']} of {rounds} rounds without a problem (a token lost, wrong or unmarked)",
        f"the draft model wrote alone {alone}",
        f"within {found['goal_s']:.0f} s: {found['within_goal']} of {rounds}",
    ]
    if verified is not None:
        lines.append(
            f"verified again: in {found['verified_again']} of {rounds} replies before they ended, after"
            f" {verified['median']:.1f} s in the median, {verified['max']:.1f} s at most"
        )
    lines.append(
        f"unverified tokens in a reply of {found['tokens']}: {found['unverified']['median']:.0f} in the median"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=50)
    parser.add_argument("--stop", action="store_true", help="stop the servers instead of killing the workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="kill_rpc", help="of the result file")
    args = parser.parse_args()
    hit, goal = ("stop", STOP_GOAL) if args.stop else ("kill", KILL_GOAL)
    rng = random.Random(args.seed)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, draft = folder / "model.gguf", folder / "draft.gguf"
        write(ARCHITECTURE, model)
        write(ARCHITECTURE, draft, noise=0.12)
        with Model.load(model, text_only=True) as text:
            from edgellm.llm import compose

            own = alone(model, text.chat_prompt(compose(QUESTION)))
        workers = {at: WorkerProcess(model, folder / at, rpc=True) for at in "ab"}
        try:
            for _ in range(args.rounds):
                for worker in workers.values():
                    worker.wait()
                rounds.append(one_round(model, draft, workers, own, rng, stop=args.stop))
                print(rounds[-1], file=sys.stderr, flush=True)
                workers[rounds[-1].victim].again()
        finally:
            for worker in workers.values():
                worker.close()
    verified = [one.verified_s for one in rounds if one.verified_s is not None]
    found: dict[str, Any] = {
        "rounds": len(rounds), "tokens": TOKENS, "hit": hit, "goal_s": goal,
        "without_problems": sum(not one.problems for one in rounds),
        "within_goal": sum(0 < one.next_s <= goal for one in rounds), "next_s": spread([one.next_s for one in rounds]),
        "verified_again": len(verified), "verified_s": spread(verified) if verified else None,
        "unverified": spread([float(one.unverified) for one in rounds]), "each": [asdict(one) for one in rounds],
    }  # fmt: skip
    path = report.write(args.name, "bench.mesh.kill_rpc", found, args.seed)
    print(table(found))
    print(f"written: {path}")
    sys.exit(1 if found["without_problems"] < len(rounds) else 0)


if __name__ == "__main__":
    main()
