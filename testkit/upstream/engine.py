"""The model behind the conformance server: real tokens, real rows, and a prefix cache by blocks as vLLM has one."""

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from edgellm.engine import Context, ContextSpec, Floats, Model
from edgellm.spec.sampling import distribution, draw
from edgellm.spec.types import Sampling

BLOCK = 16


class Engine:
    """One model and one context, for one request at a time."""

    def __init__(self, model: Model, positions: int = 512) -> None:
        self.model, self.positions = model, positions
        self._context = Context(model, ContextSpec(n_ctx=positions, threads=1))
        self._lock = threading.Lock()
        self._blocks: set[tuple[str, tuple[int, ...]]] = set()
        self._random = np.random.default_rng(7)
        self._rows: dict[bytes, Floats] = {}

    def rows(self, ids: Sequence[int], outputs: int) -> list[Floats]:
        """Return the last `outputs` rows of logits of a text. Rows are kept, since tests ask for the same ones."""
        text = np.array(ids, dtype=np.int32)
        keys = [text[:end].tobytes() for end in range(len(text) - outputs + 1, len(text) + 1)]
        with self._lock:
            if missing := next((keys[at:] for at, key in enumerate(keys) if key not in self._rows), []):
                kept = self._context.sync(text[: len(text) - len(missing) + 1])
                computed = self._context.decode(text[kept:], outputs=len(missing))
                self._rows |= {key: row.copy() for key, row in zip(missing, computed, strict=True)}
            return [self._rows[key] for key in keys]

    def cached(self, ids: Sequence[int], salt: str = "") -> int:
        """Return how many tokens of a text are in the cache of whole blocks, all but its last at most, and keep it."""
        found = 0
        with self._lock:
            for end in range(BLOCK, len(ids), BLOCK):
                if (salt, tuple(ids[:end])) not in self._blocks:
                    break
                found = end
            self._blocks |= {(salt, tuple(ids[:end])) for end in range(BLOCK, len(ids) + 1, BLOCK)}
        return found

    def write(
        self, ids: Sequence[int], n: int, sampling: Sampling, seed: int | None,
        bias: Mapping[int, float] = MappingProxyType({}), among: Sequence[int] | None = None,
    ) -> tuple[list[int], list[Floats]]:  # fmt: skip
        """Return up to `n` tokens behind a text, to the end of the turn, and the row of each, as it was before `bias`
        was added and tokens that are not `among` some removed."""
        random = self._random if seed is None else np.random.default_rng(seed)
        text, tokens, rows = list(ids), [], []
        for _ in range(n):
            row = self.rows(text, 1)[0]
            token = draw(distribution(_steered(row, bias, among), sampling), int(random.integers(2**63)), len(text))
            tokens.append(token)
            rows.append(row)
            text.append(token)
            if self.model.is_eog(token):
                break
        return tokens, rows

    def close(self) -> None:
        self._context.close()


def _steered(row: Floats, bias: Mapping[int, float], among: Sequence[int] | None) -> Floats:
    if not bias and among is None:
        return row
    found = row.copy() if among is None else np.full_like(row, -1e30)
    if among is not None:
        found[list(among)] = row[list(among)]
    if bias:
        found[list(bias)] += np.array(list(bias.values()), dtype=np.float32)
    return found


def logprobs(row: Floats) -> Floats:
    """Return the logarithms of a row's probabilities."""
    top = row.max()
    found: Floats = row - (top + np.log(np.exp(row - top).sum(dtype=np.float64)).astype(np.float32))
    return found


def top(row: Floats, k: int) -> list[tuple[int, float]]:
    """Return the `k` likeliest tokens of a row with their log-probabilities, the likeliest first."""
    found = logprobs(row)
    best = np.argpartition(-row, k)[:k] if k < len(row) else np.arange(len(row))
    return [(int(token), float(found[token])) for token in best[np.lexsort((best, -row[best]))]]
