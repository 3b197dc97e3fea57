"""The memory that layers take besides their weights: keys and values, and the buffers of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.engine import native
from edgellm.engine.gguf.reader import TENSOR_TYPES, GgufHeader, dimensions
from edgellm.engine.hardware import CACHE_TYPES

_PAD = 256  # llama.cpp rounds the cells of a cache up to a multiple of this
_OUTPUT, _FLASH, _PLAIN = 2, 5, 9  # rows of the embedding's width that live beside the largest tensors of a pass


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The sizes of one model's graph, from which its memory follows; `params` is the number of weights of one layer.

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
        """Return the bytes of these layers' keys and values, for `sessions` sequences of `context` positions each."""
        return self.kv * layers * sessions * _cells(context)

    def batch(self, layers: int, context: int, rows: int, *, ends: bool) -> int:
        """Return the bytes of the buffers in which a block of these layers computes `rows` rows.

        `ends`: the block has the embedding, or the head.

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


def costs_of(header: GgufHeader, cache_type: str | None = None) -> MemoryEstimate:
    """Return the estimate for a model that can be cut, or for some of its layers, with keys and values of that type.

    Raises:
        ModelUnsupported: the header does not say what its layers look like.
    """
    known = dimensions(header)
    exact = all(TENSOR_TYPES[t.kind][0] == "F32" for t in header.tensors)
    _name, values, size = TENSOR_TYPES[CACHE_TYPES["f32" if exact else cache_type or "f16"]]
    blocks = [t for t in header.tensors if t.name.startswith("blk.")]
    return MemoryEstimate(
        kv=known.kv_heads * (known.keys + known.values) * size // values, heads=known.heads, width=known.d_model,
        ff=known.d_ff,
        vocabulary=max((t.shape[-1] for t in header.tensors if t.name in ("token_embd.weight", "output.weight")),
                       default=1),
        params=sum(t.n_elements for t in blocks) // known.layers, exact=exact,
    )  # fmt: skip
