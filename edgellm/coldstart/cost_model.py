"""The cost model of a transformer: FLOPs, bytes of weights, activations and cache (CSGO, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The measures of a transformer with grouped-query attention and SwiGLU, all layers alike; each is above 0."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    d_ff: int
    bytes_per_weight: float = 2.0
    bytes_per_activation: float = 2.0

    def flops(self, tokens: float, context: float | None = None) -> float:
        """Return W_l: FLOPs of a layer for `tokens` tokens that attend to `context` (default `tokens`), eq. 1-3."""
        context = tokens if context is None else context
        attention = (
            4 * tokens * self.d_head * (self.d_model * self.heads + self.d_model * self.kv_heads + context * self.heads)
        )
        return attention + 6 * tokens * self.d_model * self.d_ff

    def activation(self, tokens: float) -> float:
        """Return A_l: bytes that go from device to device, equation 4, where numbers have two bytes."""
        return self.bytes_per_activation * tokens * self.d_model

    @property
    def weights(self) -> float:
        """P_l: bytes of one layer, equations 5-7 (whose factors 4 and 6 include two bytes per weight)."""
        attention = 4 * self.d_model * self.d_head * (self.heads + self.kv_heads)
        return (attention + 6 * self.d_model * self.d_ff) * self.bytes_per_weight / 2.0

    @property
    def cache(self) -> float:
        """Bytes of keys and values of one layer for one token, as 16-bit floats."""
        return 2 * 2 * self.kv_heads * self.d_head


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model to be planned: its shape and its real sizes.

    `layer_bytes` and `cache_bytes`, (L,): weights of each layer, and its keys and values for one token. `embedding`
    is added to the first layer and `head` to the last, in bytes; a `tied` head is the embedding again, so a device that
    holds all layers needs it once. `head_flops`: for the one row from which a token is chosen.

    `begins`: layers with which a stage may begin, and before which, or at the end, a stage may end; None: any.
    `files`: layers with which a file begins, which is loaded as a whole; None: all.
    """

    name: str
    shape: TransformerShape
    layer_bytes: tuple[float, ...]
    cache_bytes: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0
    tied: bool = False
    head_flops: float = 0.0
    begins: frozenset[int] | None = None
    files: frozenset[int] | None = None

    @staticmethod
    def of(shape: TransformerShape, name: str = "", cached: bool = True) -> ModelCosts:
        """Return equal layers, no embedding and no head, as in the paper, which has no cache either (equation 22)."""
        many = shape.layers
        return ModelCosts(name, shape, (shape.weights,) * many, (shape.cache if cached else 0.0,) * many)

    @property
    def bytes(self) -> float:
        return sum(self.layer_bytes) + self.embedding + (0.0 if self.tied else self.head)
