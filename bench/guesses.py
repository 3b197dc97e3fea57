"""How often is the right verdict among the likeliest guesses at it? (Synera, 4.4)

    python -m bench.guesses [--cases 40] [--budget 0.2] [--known 1 3 10 30 100]

The bundled pair writes held-out replies at a budget, as a device that waits for its verifier does. At each verdict but
a reply's last the guesser says its sixteen likeliest ones, and the right one's place is counted: so this is how often
so many branches hit, where the device has time for them all. `--known`: so many times as likely as the draft model says
are tokens that stand in the text (`guess.KNOWN`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.answers import MOST, Question, questions
from bench.report import write
from edgellm.api.profiles import find_profile
from edgellm.engine import Context, Model
from edgellm.spec import guess
from edgellm.spec.acceptance import Acceptance
from edgellm.spec.ahead import ALTERNATIVES, AheadDrafter
from edgellm.spec.budget import Ledger
from edgellm.spec.choice import choose
from edgellm.spec.drafter import ModelDrafter
from edgellm.spec.guess import MOST_BRANCHES, Guess, likeliest
from edgellm.spec.local import LocalVerifier
from edgellm.spec.loop import Limits, generate
from edgellm.spec.options import ReplyOptions
from edgellm.spec.pool import ContextPool
from edgellm.spec.precedent import Precedents
from edgellm.spec.records import GREEDY, Chunk, Ids, Sampling, Verdict
from edgellm.spec.stats import Stats
from edgellm.store import fingerprint, resolve

SEED = 4004
POSITIONS = 1024


class Guesser:
    """The device's side: drafts, and says where the right verdict was among its guesses."""

    def __init__(self, model: Model, closing: ExitStack) -> None:
        self._model = model
        context = Context(model, n_ctx=POSITIONS, n_seq=1 + MOST_BRANCHES, threads=1)
        self.own = ModelDrafter(model, context, alternatives=ALTERNATIVES)
        closing.callback(self.own.close)
        self._behind = closing.enter_context(Context(model, n_ctx=POSITIONS, threads=1))
        self.acceptance = Acceptance()
        self._ahead = AheadDrafter(
            self.own, is_eog=model.is_eog, rejection=self.acceptance.rejection, branches=MOST_BRANCHES
        )
        self.places: list[int] = []
        """Of the right guess, from 0; MOST_BRANCHES where none was right."""
        self.rejected: list[bool] = []
        self._prefix: Ids = np.empty(0, dtype=np.int32)

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        self._prefix = prefix
        return self.own.draft(prefix, gamma, sampling)

    def close(self) -> None:
        """The drafter is closed with the benchmark."""

    def watch(self, chunk: Chunk, _written: int, verdict: Verdict | None, *_seconds: float) -> None:
        """Of a round: where is its verdict among the guesses?"""
        if verdict is None:
            return
        came = [*chunk.ids[: verdict.accepted].tolist(), *verdict.tokens[:1].tolist()]
        if not any(map(self._model.is_eog, came)) and len(verdict.tokens):
            self.places.append(self._place(chunk, verdict.accepted, came[-1]))
            self.rejected.append(verdict.accepted < len(chunk))
        self.acceptance.told(chunk, verdict.accepted)

    def _place(self, chunk: Chunk, accepted: int, token: int) -> int:
        likely = self._ahead.likely(chunk)
        if accepted < len(chunk):
            return next((at for at, one in enumerate(likely) if _is(one, accepted, token)), MOST_BRANCHES)
        tail = [at for at, one in enumerate(likely) if one.accepted == accepted]
        whole = np.concatenate((self._prefix, chunk.ids))
        row = self._behind.decode(whole[self._behind.sync(whole) :])[0]
        said = likeliest(row, len(tail), np.unique(whole))[0].tolist()
        return tail[said.index(token)] if token in said else MOST_BRANCHES


def _is(one: Guess, accepted: int, token: int) -> bool:
    return one.accepted == accepted and one.token == token


def hits(asked: list[Question], budget: float) -> dict[str, Any]:
    """Shares of verdicts that were among the 1, 2, ... likeliest guesses: of all, and of rejections alone."""
    with ExitStack() as closing:
        small, big = (
            closing.enter_context(Model.load(resolve(name))) for name in ("edgellm-draft", "edgellm-verifier")
        )
        local = LocalVerifier(big, ContextPool(lambda: Context(big, n_ctx=POSITIONS, threads=1)), POSITIONS)
        closing.callback(local.close)
        guesser = Guesser(small, closing)
        profile = find_profile(fingerprint(small.path), fingerprint(big.path))
        if profile is None:
            raise SystemExit("The bundled pair has no profile: python -m models.profile")
        ledger, options = Ledger(), ReplyOptions(budget=budget)
        for question in asked:
            prompt = big.chat_prompt(question.messages)
            choice = choose(options, 0, profile=profile, ledger=ledger, economy=None, linked=True, prompt=prompt)
            own = guesser.own
            own.doubt, own.hesitates, own.precedents = choice.doubt, choice.hesitates, Precedents()
            own.precedents.begin(prompt)
            events = generate(
                prompt, alphabet=big, drafter=guesser, gate=choice.gate, verifier=local, sampling=GREEDY,
                limits=Limits(MOST, POSITIONS, choice.gamma), stats=Stats(), watch=guesser.watch,
            )  # fmt: skip
            for _ in events:
                pass
    places, rejected = np.array(guesser.places), np.array(guesser.rejected)

    def among(counted: Any) -> list[float]:
        return [round(float((counted <= at).mean()), 4) for at in range(MOST_BRANCHES)]

    return {
        "verdicts": len(places), "rejections": int(rejected.sum()), "share": ledger.share,
        "hits": among(places), "hits_of_rejections": among(places[rejected]),
    }  # fmt: skip


def weighing(known: float, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row where tokens of the text weigh so much."""
    with patch.object(guess, "KNOWN", known):
        return {"known": known, **measure()}


def table(rows: list[dict[str, Any]]) -> str:
    shown = (1, 2, 3, 4, 6, 8, 12, 16)
    lines = [f"{'known':>12}{'verdicts':>10}" + "".join(f"{many:>7}" for many in shown)]
    for row in rows:
        for name, key in (("verdicts", "hits"), ("rejections", "hits_of_rejections")):
            head = f"{row['known']:12g}" if key == "hits" else f"{'rejections':>12}"
            lines.append(f"{head}{row[name]:10}" + "".join(f"{row[key][many - 1]:7.3f}" for many in shown))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="a family")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--known", type=float, nargs="+", default=[1.0, 3.0, 10.0, 30.0, 100.0])
    parser.add_argument("--name", default="guesses", help="of the result file")
    arguments = parser.parse_args()
    asked = questions(arguments.cases, SEED)
    rows = [weighing(known, lambda: hits(asked, arguments.budget)) for known in arguments.known]
    print(table(rows), end="")
    figures = {"budget": arguments.budget, "rows": rows}
    print(f"written: {write(arguments.name, 'bench.guesses', figures, SEED)}")


if __name__ == "__main__":
    main()
