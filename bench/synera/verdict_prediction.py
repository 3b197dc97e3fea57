"""Measure how often the right verdict is among the likeliest predictions (Synera, 4.4).

The pair writes held-out replies at a budget, as a device that waits for its verifier does. At each verdict but
a reply's last, the sixteen likeliest predictions are made and the rank of the right one is noted. So a column shows how
often that many branches would hit, on a device that has time for all of them.

`known` is the factor by which tokens that already occur in the text are taken as likelier than the draft model says
(`parallel.CONTEXT_BOOST`). The second row of each is for rejections alone. The last line says how many of the
verifier's corrections are such tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.synera.quality import profile_of
from edgellm.engine import Context, ContextSpec, Model, top2
from edgellm.spec.drafters import parallel
from edgellm.spec.drafters.parallel import MAX_BRANCHES, BranchingDrafter, ParallelDrafter, likely_corrections
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance
from edgellm.spec.gates.rules import BudgetController, choose
from edgellm.spec.loop import generate
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Drafter, DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import Chunk, Ids, Round, Sampling
from edgellm.storage import resolve
from edgellm.verifier.in_process import LocalVerifier
from testkit.questions import MOST, PairFiles, PairName, Question, pair_files, questions

SEED = 4004
POSITIONS = 1024


class Guesser(Drafter):
    """The device's side: drafts, and notes the rank of the right verdict among its guesses."""

    def __init__(self, model: Model, closing: ExitStack) -> None:
        self._model = model
        context = Context(model, ContextSpec(n_ctx=POSITIONS, n_seq=1 + MAX_BRANCHES, threads=1))
        self.own = BranchingDrafter(model, context)
        closing.callback(self.own.close)
        self._behind = closing.enter_context(Context(model, ContextSpec(n_ctx=POSITIONS, threads=1)))
        self.acceptance = ConfidenceAcceptance()
        self._ahead = ParallelDrafter(
            self.own, is_eog=model.is_eog, rejection=self.acceptance.rejection, branches=MAX_BRANCHES
        )
        self.places: list[int] = []
        """Rank of the right guess, from 0; MAX_BRANCHES if none was right."""
        self.rejected: list[bool] = []
        self.there: list[bool] = []
        """For each verdict, whether the verifier's own token stood in the text."""
        self._prefix: Ids = np.empty(0, dtype=np.int32)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        self._prefix = state.ids
        return self.own.propose(state, gamma)

    def observe(self, state: GenerationState, turn: Round) -> None:  # noqa: ARG002
        """Note the rank of a round's verdict among the guesses."""
        chunk, verdict = turn.chunk, turn.verdict
        if verdict is None:
            return
        came = [*chunk.ids[: verdict.accepted].tolist(), *verdict.tokens[:1].tolist()]
        if not any(map(self._model.is_eog, came)) and len(verdict.tokens):
            self.places.append(self._place(chunk, verdict.accepted, came[-1]))
            self.rejected.append(verdict.accepted < len(chunk))
            self.there.append(came[-1] in self._prefix)
        self.acceptance.observe(chunk, verdict.accepted)

    def _place(self, chunk: Chunk, accepted: int, token: int) -> int:
        likely = [(guess.accepted, guess.token) for guess in self._ahead.predictions(self._prefix, chunk)]
        if accepted == len(chunk):  # tokens after the whole chunk are computed only now
            whole = np.concatenate((self._prefix, chunk.ids))
            row = self._behind.decode(whole[self._behind.sync(whole) :])[0]
            behind = iter(likely_corrections(row, top2(row).p1, len(likely), np.unique(whole))[0].tolist())
            likely = [(at, next(behind)) if at == accepted else (at, one) for at, one in likely]
        return likely.index((accepted, token)) if (accepted, token) in likely else MAX_BRANCHES


def hits(cases: list[Question], files: PairFiles, budget: float) -> Figures:
    """Return the shares of verdicts among the 1, 2, ... likeliest guesses: of all verdicts, and of rejections alone."""
    with ExitStack() as closing:
        small, big = (closing.enter_context(Model.load(resolve(name))) for name in (files.draft, files.verifier))
        local = LocalVerifier(big, ContextSpec(n_ctx=POSITIONS, threads=1))
        closing.callback(local.close)
        guesser = Guesser(small, closing)
        profile = profile_of(small.path, big.path, files.profile)
        controller, options = BudgetController(), ReplyOptions(budget=budget)
        for seed, question in enumerate(cases):
            prompt = big.chat_prompt(question.messages)
            choice = choose(options, 0, profile=profile, controller=controller, linked=True)
            events = generate(
                GenerationState(
                    prompt,
                    Sampling(0.0, seed=seed),
                    limits=GenerationLimits(MOST, POSITIONS, choice.gamma),
                    rules=DraftRules(choice.stop_below, choice.lookup_below, context=ContextLookup(prompt)),
                ),
                vocabulary=big,
                drafter=guesser,
                gate=choice.gate,
                verifier=local,
                stats=Summary(),
            )
            for _ in events:
                pass
    places, rejected, there = (np.array(seen) for seen in (guesser.places, guesser.rejected, guesser.there))

    def among(counted: Any) -> list[float]:
        return [round(float((counted <= at).mean()), 4) for at in range(MAX_BRANCHES)]

    return {
        "verdicts": len(places), "rejections": int(rejected.sum()), "share": controller.share,
        "there_at_rejections": round(float(there[rejected].mean()), 4),
        "hits": among(places), "hits_of_rejections": among(places[rejected]),
    }  # fmt: skip


def weighing(known: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a row in which tokens of the text weigh `known` times as much."""
    with patch.object(parallel, "CONTEXT_BOOST", known):
        return {"known": known, **measure()}


def table(results: Mapping[str, Any]) -> str:
    """Return two lines for each factor of known tokens: all verdicts, and rejections."""
    rows = results["rows"]
    shown = (1, 2, 3, 4, 6, 8, 12, 16)
    lines = [f"{'known':>12}{'verdicts':>10}" + "".join(f"{many:>7}" for many in shown)]
    for row in rows:
        for name, key in (("verdicts", "hits"), ("rejections", "hits_of_rejections")):
            head = f"{row['known']:12g}" if key == "hits" else f"{'rejections':>12}"
            lines.append(f"{head}{row[name]:10}" + "".join(f"{row[key][many - 1]:7.3f}" for many in shown))
    there = rows[-1]["there_at_rejections"]
    return "\n".join([*lines, f"of rejections {there:.1%} are for a token that stands in the text"]) + "\n"


def measure(
    pair: PairName = "home",
    cases: Annotated[int, "a family"] = 40,
    budget: float = 0.2,
    known: Annotated[Sequence[float], "how much tokens of the question are preferred"] = (1.0, 3.0, 10.0, 30.0, 100.0),
) -> Figures:
    """Return the shares of hits for each preference."""
    asked, files = questions(cases, SEED, pair), pair_files(pair)
    rows = [weighing(weight, lambda: hits(asked, files, budget)) for weight in track(known, "preferences")]
    return {"pair": pair, "budget": budget, "rows": rows}
