"""Measure the bytes of a drafted chunk as it is sent, against whole distributions (Synera, 4.2).

    python -m bench.synera.compression [--cases 20] [--chunks 16] [--draft PATH] [--seed 0]

Chunks of four tokens are drawn by the bundled draft model along held-out cases, and from made-up logits over a
vocabulary of 152,000 tokens: a noisy power law of the rank over shuffled ids, from sharp (exponent 3) to flat (1).

Columns: `tokens` that remain of a distribution, the bytes of a whole request after the first of a reply, the bytes of
`whole` distributions (4 for each token of the vocabulary and each draft), and the share `saved`. `moved` is the
probability that rounding moved to other tokens, half the sum of differences: acceptance falls by at most that much.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from bench.harness.report import write
from bench.harness.statistics import spread
from edgellm.engine import Context, Message, Model
from edgellm.services.verification_codec import write_verify
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.sampling import Purpose, distribution, draw, exact_distribution, uniforms
from edgellm.spec.state import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Distribution, Floats, Sampling
from edgellm.storage import resolve
from edgellm.verifier.requests import VerifyRequest
from models.home.corpus import held_out
from models.home.families import FAMILIES

GAMMA, WIDE = 4, 152_000
SAMPLINGS = {
    "greedy": Sampling(),
    "top-k 40, top-p 0.95": Sampling(0.8),
    "top-k 40": Sampling(0.8, top_p=1.0),
    "top-p 0.95": Sampling(0.8, top_k=0),
    "everything": Sampling(1.0, top_k=0, top_p=1.0),
}
EXPONENTS = (3.0, 2.0, 1.5, 1.0)


@dataclass
class Tally:
    """The requests of one kind."""

    vocabulary: int
    sent: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    drafted: int = 0

    def add(self, chunk: Chunk) -> None:
        """Count a request within a reply: the verifier has all tokens before the chunk but its own last one."""
        last = np.array([self.vocabulary - 1], dtype=np.int32)
        ask = VerifyRequest(0, GREEDY, 500, last, chunk, round=100)
        self.sent.append(write_verify(ask).ByteSize())
        self.tokens += [len(drawn.ids) for drawn in chunk.distributions or ()]
        self.drafted += len(chunk)

    def figures(self) -> dict[str, Any]:
        whole = 4 * self.vocabulary * self.drafted / len(self.sent)
        return {
            "bytes_per_chunk": spread(self.sent),
            "whole_bytes_per_chunk": whole,
            "saved": 1.0 - sum(self.sent) / len(self.sent) / whole,
            "tokens_per_distribution": spread(self.tokens or [1.0]),
            "moved": spread(self.moved or [0.0]),
        }


def apart(one: Distribution, other: Distribution) -> float:
    """Return the total variation distance; every token of `other` is one of `one`."""
    left = one.probs.astype(np.float64)
    left[one.ids.searchsorted(other.ids)] -= other.probs
    return float(np.abs(left).sum()) / 2


class Watched(Context):
    """A context that keeps the rows that drafts were drawn from."""

    rows: list[Floats]

    def decode(self, ids: Any, *, seq: int = 0, outputs: int = 1) -> Floats:
        row = super().decode(ids, seq=seq, outputs=outputs)
        self.rows.append(row[-1].copy())
        return row


def of_the_pair(model: Model, sampling: Sampling, cases: int, chunks: int) -> Tally:
    """Return the requests of chunks that the draft model draws, all of which are accepted."""
    tally = Tally(model.n_vocab)
    context = Watched(model, n_ctx=model.n_ctx_train, threads=1)
    with closing(ModelDrafter(model, context)) as drafter:
        streams = [held_out(family, -(-cases // len(FAMILIES))) for family in FAMILIES]
        for case in islice((case for group in zip(*streams, strict=True) for case in group), cases):
            text = model.chat_prompt([Message(turn.role, turn.text) for turn in case.prompt])
            for _ in range(chunks):
                context.rows = []
                chunk = drafter.propose(GenerationState(text, sampling), GAMMA)
                tally.add(chunk)
                for row, drawn in zip(context.rows, chunk.distributions or (), strict=False):
                    tally.moved.append(apart(exact_distribution(row, sampling), drawn))
                if model.is_eog(int(chunk.ids[-1])):
                    break
                text = np.concatenate((text, chunk.ids))
    return tally


def made_up(sampling: Sampling, exponent: float, chunks: int, seed: int) -> Tally:
    """Return the requests of chunks from made-up logits over a big vocabulary."""
    tally = Tally(WIDE)
    rng = np.random.default_rng(seed)
    for number in range(chunks):
        drawn: list[Distribution] = []
        for row in _rows(rng, exponent):
            drawn.append(distribution(row, sampling))
            tally.moved.append(apart(exact_distribution(row, sampling), drawn[-1]))
        numbers = uniforms(seed, number * GAMMA, GAMMA, Purpose.DRAFT)[:, 0]
        ids = [draw(q, float(u)) for q, u in zip(drawn, numbers, strict=True)]
        tally.add(Chunk(np.array(ids, dtype=np.int32), distributions=None if sampling.greedy else tuple(drawn)))
    return tally


def _rows(rng: np.random.Generator, exponent: float) -> Iterator[Floats]:
    for _ in range(GAMMA):
        logits = -exponent * np.log(np.arange(1, WIDE + 1)) + rng.normal(0, 0.5, WIDE)
        yield rng.permutation(logits).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=16, help="of each case, and of each kind of made-up logits")
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="compression", help="of the result file")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    print(HEAD)
    with Model.load(resolve(arguments.draft)) as model:
        for name, sampling in SAMPLINGS.items():
            tally = of_the_pair(model, sampling, arguments.cases, arguments.chunks)
            results.append({"drafts": f"pair ({model.n_vocab})", "sampling": name, **tally.figures()})
            print(_row(results[-1]), flush=True)
    for exponent in EXPONENTS:
        for name, sampling in SAMPLINGS.items():
            tally = made_up(sampling, exponent, arguments.chunks, arguments.seed)
            results.append({"drafts": f"{WIDE}, exponent {exponent:g}", "sampling": name, **tally.figures()})
            print(_row(results[-1]), flush=True)
    figures = {"gamma": GAMMA, "requests": results}
    print(f"written: {write(arguments.name, 'bench.synera.compression', figures, arguments.seed)}")


HEAD = f"{'drafts':<22}{'sampling':<22}{'tokens':>8}{'bytes a chunk':>15}{'whole':>12}{'saved':>10}{'moved':>10}"


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each source of drafts and sampling method."""
    return "\n".join([HEAD, *map(_row, results["requests"])]) + "\n"


def _row(row: dict[str, Any]) -> str:
    return (
        f"{row['drafts']:<22}{row['sampling']:<22}{row['tokens_per_distribution']['median']:>8.0f}"
        f"{row['bytes_per_chunk']['median']:>15.0f}{row['whole_bytes_per_chunk']:>12.0f}{row['saved']:>10.3%}"
        f"{row['moved']['median']:>10.1e}"
    )


if __name__ == "__main__":
    main()
