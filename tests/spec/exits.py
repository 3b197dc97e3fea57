"""The draft model cut in two, and the same chunk worked out the long way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model, check_gguf, cut, top2
from edgellm.engine.gguf.cuttable import check_cuttable
from edgellm.spec.drafters.early_exit import EarlyExitDrafter
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.protocols import Drafter
from edgellm.spec.sampling import distribution, draw
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Sampling

EXIT, N_CTX = 5, 768
CLOSE = 1e-4


def shards(path: Path, folder: Path) -> tuple[Model, Model]:
    n_layer = check_cuttable(check_gguf(path))
    cut(path, folder / "lower.gguf", 0, EXIT, head=True)
    cut(path, folder / "upper.gguf", EXIT + 1, n_layer - 1, head=True)
    return Model.load(folder / "lower.gguf"), Model.load(folder / "upper.gguf")


class Parts:
    """The draft model in float32, whole and cut behind layer `EXIT`."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.whole = Model.load(path)
        self.lower, self.upper = shards(path, folder)
        self._references = {
            model: Context(model, ContextSpec(n_ctx=N_CTX, threads=1)) for model in (self.whole, self.lower)
        }

    def drafter(self, threshold: float = 0.7) -> EarlyExitDrafter:
        return EarlyExitDrafter.open(self.lower, self.upper, n_ctx=N_CTX, threads=1, threshold=threshold)

    def plain(self) -> ModelDrafter:
        return ModelDrafter(self.whole, Context(self.whole, ContextSpec(n_ctx=N_CTX, threads=1)))

    def logits(self, model: Model, ids: Ids) -> Floats:
        """By a context that computes all its layers for every token."""
        context = self._references[model]
        return context.decode(ids[context.sync(ids) :])[0].copy()

    def naive(self, prefix: Ids, gamma: int, sampling: Sampling, threshold: float) -> Chunk:
        """The same chunk, with both heads asked about every token."""
        ids, facts, exits = prefix, [], []
        while len(ids) < len(prefix) + gamma:
            logits = self.logits(self.lower, ids)
            margin = top2(logits).p1 - top2(logits).p2
            exits.append(EXIT if margin > threshold else None)
            if exits[-1] is None:
                logits = self.logits(self.whole, ids)
            facts.append(top2(logits))
            token = draw(distribution(logits, sampling), sampling.seed, len(ids))
            ids = np.append(ids, token).astype(np.int32)
            if self.whole.is_eog(token):
                break
        return Chunk(
            ids=ids[len(prefix) :],
            confidence=np.array([f.p1 for f in facts], np.float32),
            margin=np.array([f.p1 - f.p2 for f in facts], np.float32),
            exit_layers=tuple(exits),
        )

    def close(self) -> None:
        for context in self._references.values():
            context.close()
        for model in (self.whole, self.lower, self.upper):
            model.close()


def check_same(chunk: Chunk, expected: Chunk) -> None:
    assert chunk.ids.tolist() == expected.ids.tolist()
    assert chunk.exit_layers == expected.exit_layers
    np.testing.assert_allclose(chunk.confidence, expected.confidence, atol=CLOSE)
    np.testing.assert_allclose(chunk.margin, expected.margin, atol=CLOSE)


def verdicts(drafter: Drafter, prompt: Ids, rounds: int, seed: int, n_vocab: int) -> Iterator[tuple[Ids, Chunk]]:
    """Prefixes as a verifier makes them: some of a chunk accepted, then a token of its own."""
    rng = np.random.default_rng(seed)
    prefix = prompt
    for _ in range(rounds):
        chunk = drafter.propose(GenerationState(prefix), int(rng.integers(1, 7)))
        yield prefix, chunk
        accepted = chunk.ids[: rng.integers(0, len(chunk) + 1)]
        prefix = np.concatenate((prefix, accepted, rng.integers(2, n_vocab, 1))).astype(np.int32)


class Counted(Context):
    """Notes the rows of every call."""

    def __init__(self, model: Model, capture: Capture | None = None) -> None:
        super().__init__(model, ContextSpec(N_CTX, threads=1), capture=capture)
        self.calls: list[int] = []

    def decode(self, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        self.calls.append(len(ids))
        return super().decode(ids, seq=seq, outputs=outputs)

    def decode_embeddings(self, rows: Floats, *, seq: int = 0, outputs: int = 1) -> Floats:
        self.calls.append(len(rows))
        return super().decode_embeddings(rows, seq=seq, outputs=outputs)


def counted(parts: Parts, threshold: float) -> tuple[EarlyExitDrafter, Counted, Counted]:
    lower, upper = Counted(parts.lower, Capture(outputs=(EXIT,), stop_after=EXIT)), Counted(parts.upper)
    return EarlyExitDrafter(lower, upper, threshold=threshold), lower, upper
