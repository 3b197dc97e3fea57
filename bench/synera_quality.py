"""What each gate makes of a budget: quality by task family, beside baselines and an oracle (Synera, Table 4, Fig. 14).

    python -m bench.synera_quality [--cases 300] [--budgets 0.1 0.2 0.4] [--profile-cases 40]

Greedy, on held-out cases; the profile is made on other ones. Exact match, and ROUGE-1 for free text, in percent. Every
gate is asked for the same share of chunks; what it really spent stands beside its score. The oracle knows the verdicts
and the right replies: it verifies rejected chunks only, where that changes the score most.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.pair_quality import rouge_1
from bench.report import write
from edgellm.engine import Capture, Context, Message, Model
from edgellm.spec.budget import Ledger
from edgellm.spec.drafter import ModelDrafter
from edgellm.spec.edgefm import edgefm
from edgellm.spec.gates import (
    AlwaysGate,
    ConfidenceGate,
    CountingGate,
    HybridGate,
    ImportanceGate,
    NeverGate,
    RandomGate,
    SyneraGate,
)
from edgellm.spec.local import LocalVerifier
from edgellm.spec.loop import Limits, generate
from edgellm.spec.pool import ContextPool
from edgellm.spec.profile import Profile, build
from edgellm.spec.profiling import Watcher
from edgellm.spec.protocols import Gate
from edgellm.spec.records import GREEDY, Ids, Token
from edgellm.spec.stats import Stats
from edgellm.spec.worth import WorthGate
from edgellm.store import resolve
from models.case import Case
from models.corpus import held_out
from models.families import FAMILIES

POSITIONS, MOST, GAMMA = 1024, 96, 4
PROFILED = 1001  # another seed than that of the cases that are judged


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out case, as the models see it."""

    case: Case
    prompt: Ids

    def score(self, text: str) -> float:
        if self.case.metric == "rouge":
            return 100.0 * rouge_1(self.case.answer, text)
        return 100.0 * (text == self.case.answer)


@dataclass(frozen=True, slots=True)
class Path:
    """Scores of a reply after 0, 1, 2 ... of its rejected chunks were corrected, in order."""

    scores: tuple[float, ...]
    chunks: int


class Bench:
    """The pair, ready to answer."""

    def __init__(self, draft: str, verifier: str, layers: tuple[int, ...], closing: ExitStack) -> None:
        self.small = closing.enter_context(Model.load(resolve(draft)))
        big = closing.enter_context(Model.load(resolve(verifier)))
        capture = Capture(attention=layers) if layers else None
        self.drafter = ModelDrafter(self.small, Context(self.small, n_ctx=POSITIONS, capture=capture), layers)
        self.verifier = LocalVerifier(big, ContextPool(lambda: Context(big, n_ctx=POSITIONS)), POSITIONS)
        self.layers = layers

    def questions(self, family: str, count: int, seed: int | None = None) -> list[Question]:
        cases = held_out(family, count) if seed is None else held_out(family, count, seed)
        return [
            Question(case, self.small.chat_prompt([Message(t.role, t.text) for t in case.prompt])) for case in cases
        ]

    def profile(self, count: int) -> Profile:
        session = self.verifier.open(GREEDY)
        watcher = Watcher(self.drafter, session, self.small.is_eog, GAMMA, MOST)
        runs = [watcher.run(q.prompt) for family in FAMILIES for q in self.questions(family, count, PROFILED)]
        session.close()
        return build(runs, draft_hash="", verifier_hash="", gamma=GAMMA, layers=self.layers)

    def reply(self, question: Question, gate: Gate, gamma: int = GAMMA) -> str:
        stats = Stats()
        events = generate(
            question.prompt, alphabet=self.small, drafter=self.drafter, gate=gate, verifier=self.verifier,
            sampling=GREEDY, limits=Limits(MOST, POSITIONS, gamma), stats=stats,
        )  # fmt: skip
        return b"".join(event.piece for event in events if isinstance(event, Token)).decode(errors="replace")

    def whole(self, question: Question, threshold: float, ledger: Ledger) -> str:
        """EdgeFM: the share of replies that the verifier wrote."""
        stats = Stats()
        events = edgefm(
            question.prompt, alphabet=self.small, drafter=self.drafter, verifier=self.verifier, threshold=threshold,
            sampling=GREEDY, limits=Limits(MOST, POSITIONS, GAMMA), stats=stats,
        )  # fmt: skip
        text = b"".join(event.piece for event in events if isinstance(event, Token)).decode(errors="replace")
        ledger.enter(stats.passes > 0)
        return text

    def path(self, question: Question) -> Path:
        """The reply with its first rejected chunks corrected, for every number of them."""
        session = self.verifier.open(GREEDY)
        scores: list[float] = []
        chunks = 0
        while True:
            left, ids, chunks = len(scores), question.prompt, 0
            text = b""
            corrected = 0
            while len(ids) < len(question.prompt) + MOST:
                chunk = self.drafter.draft(ids, GAMMA, GREEDY)
                chunks += 1
                new = chunk.ids
                if corrected < left:
                    verdict = session.submit(ids, chunk).result()
                    if verdict.accepted < len(chunk):
                        new = np.concatenate((chunk.ids[: verdict.accepted], verdict.tokens[:1]))
                        corrected += 1
                ended = [at for at, token in enumerate(new.tolist()) if self.small.is_eog(token)]
                kept = new[: ended[0]] if ended else new
                text += b"".join(self.small.piece(token) for token in kept.tolist())
                ids = np.concatenate((ids, new))
                if ended:
                    break
            if corrected < left:  # there was nothing more to correct
                break
            scores.append(question.score(text.decode(errors="replace")))
        session.close()
        return Path(tuple(scores), chunks)


def oracle(paths: Sequence[Path], budget: float) -> list[float]:
    """Each reply's score where `budget` of all chunks is spent on the corrections that gain most for their number."""
    left = budget * sum(path.chunks for path in paths)
    offers = []
    for at, path in enumerate(paths):
        best = 0
        while best < len(path.scores) - 1:  # the upper hull of the path: what each further correction brings on average
            rates = [(path.scores[k] - path.scores[best]) / (k - best) for k in range(best + 1, len(path.scores))]
            step = int(np.argmax(rates)) + best + 1
            if rates[step - best - 1] <= 0:
                break
            offers.append((rates[step - best - 1], at, best, step))
            best = step
    scores = [path.scores[0] for path in paths]
    for _, at, start, step in sorted(offers, key=lambda offer: -offer[0]):
        if step - start <= left:
            scores[at] = paths[at].scores[step]
            left -= step - start
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300, help="a family")
    parser.add_argument("--profile-cases", type=int, default=40, help="a family")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--layers", type=int, nargs="*", default=[1], help="whose attention is importance")
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier")
    arguments = parser.parse_args()
    with ExitStack() as closing:
        bench = Bench(arguments.draft, arguments.verifier, tuple(arguments.layers), closing)
        profile = bench.profile(arguments.profile_cases)
        questions = {family: bench.questions(family, arguments.cases) for family in FAMILIES}
        figures: dict[str, Any] = {"evidence": profile.evidence, "alpha": profile.alpha, "c_th": profile.c_th}
        figures["never"] = run(questions, lambda q, _: bench.reply(q, NeverGate()))
        figures["always"] = run(questions, lambda q, _: bench.reply(q, AlwaysGate()))
        paths = {family: [bench.path(q) for q in asked] for family, asked in questions.items()}
        for budget in arguments.budgets:
            figures[str(budget)] = at_budget(bench, profile, questions, budget)
            scores = oracle([path for family in FAMILIES for path in paths[family]], budget)
            figures[str(budget)]["oracle"] = split(scores, questions)
            sys.stdout.write(table(figures, budget))
            sys.stdout.flush()
    write("synera_quality", "bench.synera_quality", figures, PROFILED)


def at_budget(bench: Bench, profile: Profile, questions: dict[str, list[Question]], budget: float) -> dict[str, Any]:
    """Every gate at one budget."""
    gates: dict[str, Callable[[Ledger, int], Gate]] = {
        "random": lambda ledger, seed: CountingGate(RandomGate(budget, seed), ledger),
        "confidence": lambda ledger, seed: CountingGate(
            ConfidenceGate(profile.confidence_threshold(budget), seed), ledger
        ),
        "importance": lambda ledger, seed: CountingGate(
            ImportanceGate(profile.i_th(budget, coarse=False), seed), ledger
        ),
        "synera": lambda ledger, seed: CountingGate(SyneraGate(profile.c_th, profile.i_th(budget), seed), ledger),
        "worth": lambda ledger, seed: WorthGate(profile, budget, ledger, seed),
    }
    found: dict[str, Any] = {}
    for name, make in gates.items():
        ledger = Ledger()
        answers = run(questions, lambda q, seed, make=make, ledger=ledger: bench.reply(q, make(ledger, seed)))
        found[name] = answers | {"share": ledger.share}
    ledger = Ledger()
    hybrid = CountingGate(HybridGate(profile.token_threshold(budget)), ledger)
    found["hybrid"] = run(questions, lambda q, _: bench.reply(q, hybrid, gamma=1)) | {"share": ledger.share}
    ledger = Ledger()
    threshold = profile.reply_threshold(budget)
    found["edgefm"] = run(questions, lambda q, _: bench.whole(q, threshold, ledger)) | {"share": ledger.share}
    return found


def run(questions: dict[str, list[Question]], answer: Callable[..., str]) -> dict[str, Any]:
    """Mean score a family, and on average. Each reply has a seed of its own."""
    everything = [q for asked in questions.values() for q in asked]
    scores = [q.score(answer(q, seed)) for seed, q in enumerate(everything)]
    return split(scores, questions)


def split(scores: Sequence[float], questions: dict[str, list[Question]]) -> dict[str, Any]:
    """Scores in the order of the questions, as means and 95 % half-widths a family."""
    means, widths, start = {}, {}, 0
    for family, asked in questions.items():
        part = np.array(scores[start : start + len(asked)])
        means[family] = float(part.mean())
        widths[family] = float(1.96 * part.std() / len(part) ** 0.5)
        start += len(asked)
    return {"families": means, "half_width_95": widths, "mean": float(np.mean(list(means.values())))}


def table(figures: dict[str, Any], budget: float) -> str:
    """One budget's table."""
    lines = [f"budget {budget}", f"{'gate':11}{'share':>7}" + "".join(f"{f:>10}" for f in FAMILIES) + f"{'mean':>8}"]
    rows = {"never": figures["never"], **figures[str(budget)], "always": figures["always"]}
    for name, row in rows.items():
        share = row.get("share")
        cells = "".join(f"{row['families'][family]:10.1f}" for family in FAMILIES)
        lines.append(f"{name:11}{'' if share is None else f'{share:.3f}':>7}{cells}{row['mean']:8.2f}")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    main()
