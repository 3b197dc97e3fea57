"""Measure how often a sampled draft is accepted, by rejection sampling and by two ways of sharing random numbers.

    python -m bench.coordgen.sampled_drafts [--pair home|code] [--cases 12] [--temperatures 0.7 1.0]
        [--name sampled_drafts]

The verifier samples replies to held-out cases; at each place its distribution p and the draft model's q are compared,
and the chance of acceptance is computed exactly:

- *rejection*: a draft from q is accepted with min(1, p/q) (Leviathan et al. 2023). No coupling of two draws agrees more
  often, but the text depends on the drafts, which have to be drawn from q and sent with it;
- *interval*: both draw by one number in [0, 1), from the tokens in the order of their ids;
- *race*: both draw by the same arrival times of the tokens, as `spec.sampling.draw` does (Daliri et al. 2024).

*Of 4* is the mean number of accepted tokens of a chunk of 4, if places were independent. *kept* is how many tokens of q
truncation leaves: rejection sampling has to send their ids and probabilities.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.harness.report import write
from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.sampling import distribution, draw
from edgellm.spec.types import Distribution, Floats, Sampling
from edgellm.storage import resolve
from models.home.corpus import HELD_OUT_SEED
from testkit.questions import Question, parsed_with_pair, questions

POSITIONS = 1024
MOST = 64
GAMMA = 4
WAYS = ("rejection", "interval", "race")
SETTINGS = {"everything": Sampling(top_k=0, top_p=1.0), "top-k 40, top-p 0.95": Sampling()}

Shares = npt.NDArray[np.float64]


def aligned(p: Distribution, q: Distribution) -> tuple[Shares, Shares]:
    """Return the probabilities of the tokens of either distribution, in the order of their ids, each (k,)."""
    ids = np.union1d(p.ids, q.ids)
    both = np.zeros((2, len(ids)))
    for row, one in enumerate((p, q)):
        both[row, ids.searchsorted(one.ids)] = one.probs
    both /= both.sum(axis=1, keepdims=True)
    return both[0], both[1]


def rejection(p: Shares, q: Shares) -> float:
    """Return the chance that speculative sampling accepts a draft: the overlap of the distributions."""
    return float(np.minimum(p, q).sum())


def interval(p: Shares, q: Shares) -> float:
    """Return the chance that one number falls into the same token's interval of both."""
    ends = np.cumsum([p, q], axis=1)
    return float(np.maximum(0.0, ends.min(axis=0) - (ends - (p, q)).max(axis=0)).sum())


def race(p: Shares, q: Shares) -> float:
    """Return the chance that one token wins both races.

    Token x does with probability 1 / sum over y of max(p_y / p_x, q_y / q_x). Tokens that are less likely than 1 in a
    million in both are left out.
    """
    likely = np.maximum(p, q) > 1e-6
    p, q = p[likely], q[likely]
    shared = (p > 0) & (q > 0)
    if not shared.any():
        return 0.0
    longest = np.maximum(p[:, None] / p[shared], q[:, None] / q[shared])
    return float((1.0 / longest.sum(axis=0)).sum())


def rows_of(question: Question, draft: Context, verifier: Context, sampling: Sampling) -> tuple[Floats, Floats]:
    """Return the logits of the draft model and of the verifier, each (tokens, n_vocab), at each place of a reply that
    the verifier samples."""
    model = verifier.model
    text = model.chat_prompt(question.messages).tolist()
    start = len(text)
    verifier.clear()
    rows = [verifier.decode(np.array(text, dtype=np.int32))[0].copy()]
    while len(rows) < MOST and not model.is_eog(
        token := draw(distribution(rows[-1], sampling), sampling.seed, len(text))
    ):
        text.append(token)
        rows.append(verifier.decode(np.array([token], dtype=np.int32))[0].copy())
    draft.clear()
    drafted = draft.decode(np.array(text[: start + len(rows) - 1], dtype=np.int32), outputs=len(rows)).copy()
    return drafted, np.array(rows)


def places(
    cases: list[Question], draft: Context, verifier: Context, temperature: float
) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield for each place of each reply and each setting its name, the three chances, and the tokens kept of q."""
    for seed, question in enumerate(cases):
        sampling = Sampling(temperature, seed=seed)
        for q_row, p_row in zip(*rows_of(question, draft, verifier, sampling), strict=True):
            for name, setting in SETTINGS.items():
                cut = Sampling(temperature, setting.top_k, setting.top_p)
                q = distribution(q_row, cut)
                both = aligned(distribution(p_row, cut), q)
                yield name, (rejection(*both), interval(*both), race(*both), float(len(q.ids)))


def measured(draft: str, verifier: str, cases: list[Question], temperatures: list[float]) -> list[dict[str, Any]]:
    """Return a row for each temperature and setting."""
    rows = []
    with ExitStack() as closing:
        small, big = (
            closing.enter_context(
                Context(closing.enter_context(Model.load(resolve(name))), ContextSpec(n_ctx=POSITIONS))
            )
            for name in (draft, verifier)
        )
        for temperature in temperatures:
            found: dict[str, list[tuple[float, ...]]] = {}
            for name, four in places(cases, small, big, temperature):
                found.setdefault(name, []).append(four)
            for name, values in found.items():
                *mean, kept = np.mean(values, axis=0).tolist()
                of_chunk = [sum(share**n for n in range(1, GAMMA + 1)) for share in mean]
                rows.append(
                    {
                        "temperature": temperature, "setting": name, "places": len(values), "kept": kept,
                        "accepted": dict(zip(WAYS, mean, strict=True)),
                        "of_chunk": dict(zip(WAYS, of_chunk, strict=True)),
                    }
                )  # fmt: skip
    return rows


def table(results: Mapping[str, Any]) -> str:
    """Return the chances as a table."""
    header = f"{'T':>4}  {'sampling':21}{'places':>7}" + "".join(f"{way:>11}" for way in WAYS)
    lines = [f"{header}   of 4 by each{'kept':>8}"]
    for row in results["rows"]:
        shares = "".join(f"{row['accepted'][way]:11.3f}" for way in WAYS)
        of_chunk = " ".join(f"{row['of_chunk'][way]:.2f}" for way in WAYS)
        lines.append(
            f"{row['temperature']:4}  {row['setting']:21}{row['places']:7}{shares} {of_chunk:>14}{row['kept']:8.1f}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12, help="of each family")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--name", default="sampled_drafts", help="of the result file")
    arguments = parsed_with_pair(parser)
    cases = questions(arguments.cases, pair=arguments.pair)
    rows = measured(arguments.draft, arguments.verifier, cases, arguments.temperatures)
    figures = {"pair": arguments.pair, "rows": rows}
    print(table(figures), end="")
    print(f"written: {write(arguments.name, 'bench.coordgen.sampled_drafts', figures, HELD_OUT_SEED)}")


if __name__ == "__main__":
    main()
