"""What layers take of a memory beside their weights: keys and values, and what a batch is computed in."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.engine import native
from edgellm.engine.gguf.dimensions import dimensions
from edgellm.engine.gguf.reader import GgufHeader
from edgellm.engine.gguf.tensor_types import TENSOR_TYPES

_PAD = 256  # llama.cpp rounds the cells of a cache up to a multiple of so many
_OUTPUT, _FLASH, _PLAIN = 2, 4, 6  # rows of the embedding's width that live beside the largest tensors of a pass


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Of one model: what its graph looks like, in numbers, of which `params` are the weights' of one layer.

    `kv`: bytes of keys and values of one layer for one position. `exact`: computed without flash attention, in f32.
    """

    kv: int
    heads: int
    width: int
    ff: int
    vocabulary: int
    params: int
    exact: bool

    def cache(self, layers: int, context: int, sessions: int) -> int:
        """Bytes of keys and values of so many layers, for `sessions` sequences of `context` positions each."""
        return self.kv * layers * sessions * _cells(context)

    def batch(self, layers: int, context: int, rows: int, *, ends: bool) -> int:
        """Bytes that a block of so many layers computes `rows` rows in; `ends`: it has the embedding, or the head.

        Within some percent of what llama.cpp reserves on a processor (`test_memory_estimate.py`): the largest
        tensors that live at once are those of the feed-forward part, the attention's scores, which flash attention
        does without, or a vocabulary's logits.
        """
        params = self.params * layers + (self.vocabulary * self.width if ends else 0)
        flash = not self.exact and native.flash_pays(params, rows)
        largest = max(
            3 * self.ff + _FLASH * self.width,
            self.vocabulary + _OUTPUT * self.width if ends else 0,
            0 if flash else self.heads * _cells(context) + _PLAIN * self.width,
        )
        mask = _cells(context) * (2 if flash else 4)
        return rows * (4 * largest + mask)


def _cells(context: int) -> int:
    return -(-context // _PAD) * _PAD


def costs_of(header: GgufHeader) -> MemoryEstimate:
    """Of a model that can be cut, or of some of its layers.

    Raises:
        ModelUnsupported: the header does not say what its layers look like.
    """
    known = dimensions(header)
    exact = all(TENSOR_TYPES[t.kind][0] == "F32" for t in header.tensors)
    blocks = [t for t in header.tensors if t.name.startswith("blk.")]
    return MemoryEstimate(
        kv=known.kv_heads * (known.keys + known.values) * (4 if exact else 2), heads=known.heads, width=known.d_model,
        ff=known.d_ff,
        vocabulary=max((t.shape[-1] for t in header.tensors if t.name in ("token_embd.weight", "output.weight")),
                       default=1),
        params=sum(t.n_elements for t in blocks) // known.layers, exact=exact,
    )  # fmt: skip
