"""The cost model of a transformer: FLOPs, bytes of weights, activations and cache (CSGO, 2.1); devices and the links
between them (2.2), and the four devices of the paper's setting (5.1)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from edgellm.layer_range import LayerRange, chain

Floats = npt.NDArray[np.float64]


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
    def of(shape: TransformerShape, name: str = "", cached: bool = True) -> "ModelCosts":
        """Return equal layers, no embedding and no head, as in the paper, which has no cache either (equation 22)."""
        many = shape.layers
        return ModelCosts(name, shape, (shape.weights,) * many, (shape.cache if cached else 0.0,) * many)

    @property
    def bytes(self) -> float:
        return sum(self.layer_bytes) + self.embedding + (0.0 if self.tied else self.head)

    def size(self, layers: LayerRange) -> float:
        """Return the bytes of some layers, with the embedding before the first one, and the head after the last."""
        ends = self.embedding * (layers.start == 0) + self.head * (layers.stop == self.shape.layers)
        return sum(self.layer_bytes[layers.start : layers.stop]) + ends


_CURVES = np.geomspace(1e-4, 5.0, 20_000)  # b: a device's best speed needs from some 10,000 tokens down to 1


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The curve c(t) = peak (1 - e^(-bt)). `peak`, in FLOP/s, is the product of c* and `a` in equations 8 and 9, which
    speeds alone cannot tell apart; `worst` is the largest distance of a measured speed from the curve, as a share."""

    peak: float
    b: float
    worst: float


def fit_utilisation(tokens: Sequence[int], speeds: Sequence[float]) -> Utilisation:
    """Return the curve with the least sum of squared relative errors. For each b of a grid, with g = 1 - e^(-bt), the
    best peak is sum(g/c) / sum(g²/c²)."""
    t, c = np.asarray(tokens, dtype=float), np.asarray(speeds, dtype=float)
    shares = -np.expm1(-np.outer(_CURVES, t)) / c
    peaks = shares.sum(1) / (shares**2).sum(1)
    errors = np.abs(peaks[:, None] * shares - 1.0)
    best = int((errors**2).sum(1).argmin())
    return Utilisation(float(peaks[best]), float(_CURVES[best]), float(errors[best].max()))


@dataclass(frozen=True, slots=True)
class LayersOnDevice:
    """The layers of a model that a device has, counted from 0: `stored` on its disk (None: any), and `loaded`.

    A device cannot load layers that are not on its disk, and need not load loaded layers. Its stage begins with one of
    the `pieces` on its disk and ends with one, none of which overlap; None: it may hold any layers. `cut`: the pieces
    that it has of a model's file, from which others have to be cut before they are loaded; None: nothing has to be cut.
    """

    stored: frozenset[int] | None = None
    loaded: frozenset[int] = frozenset()
    pieces: tuple[LayerRange, ...] | None = None
    cut: frozenset[LayerRange] | None = None

    def takes(self, layers: LayerRange) -> bool:
        """Return whether these layers are there, and can be loaded without their neighbours."""
        if self.pieces is not None and not chain(self.pieces, layers):
            return False
        return self.stored is None or self.stored.issuperset(layers)


ANY_LAYERS = LayersOnDevice()


@dataclass(frozen=True, slots=True)
class Device:
    """One device in a plan (psi_k): peak FLOP/s and the two constants of its utilisation, bytes/s of `disk`, bytes of
    `memory` for the model, its loaded layers included, bits/s to and from the access point, seconds of `latency` that
    each transfer has on its side, bytes/s of `bandwidth` for weights in a decode (0: a token's time follows from U(1)),
    its layers, the `unit` of these speeds (graphics cards such as CUDA0, "" for the processor, None if unknown), and
    `opening`, the seconds to connect to it before it can begin to load.
    """

    name: str
    flops: float
    util_a: float
    util_b: float
    disk: float
    memory: float
    uplink: float
    downlink: float
    latency: float = 0.0
    bandwidth: float = 0.0
    layers: LayersOnDevice = ANY_LAYERS
    unit: str | None = None
    opening: float = 0.0

    @classmethod
    def unmeasured(cls, name: str, layers: LayersOnDevice = ANY_LAYERS) -> Self:
        """Return an unmeasured device, with the speeds of an average laptop, and endless memory."""
        return cls(name, 1e11, 1.0, 0.1, 5e8, 1e15, 1e8, 1e8, 5e-3, 1e10, layers)

    def updated(self, layers: LayersOnDevice, memory: float, unit: str) -> "Device":
        """Return the device as it is now, without measurements of another `unit` than computes there now."""
        known = self if self.unit in (None, unit) else self.unmeasured(self.name)
        return replace(known, layers=layers, memory=memory or known.memory, unit=unit)

    def utilisation(self, tokens: float) -> float:
        """Return U(t) = a (1 - e^(-b t)), equation 8."""
        return self.util_a * -math.expm1(-self.util_b * tokens)

    def speed(self, tokens: float) -> float:
        """Return c_k, the FLOP/s of a pass over `tokens` tokens, equation 9."""
        return self.flops * self.utilisation(tokens)


@dataclass(frozen=True, slots=True)
class Link:
    """A link from one device to another: bits/s, and seconds until the first bit arrives."""

    rate: float
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """Return the seconds to send `size` bytes, equation 20."""
        return self.latency + 8.0 * size / self.rate


Links = Mapping[tuple[str, str], Link]
"""Measured links by the names of sender and receiver; they replace the two devices' own rates."""


def link(one: Device, other: Device, links: Links) -> Link:
    """Return the link from one device to another: the measured one, or through the access point; endless within one."""
    if one is other:
        return Link(math.inf)
    star = Link(min(one.uplink, other.downlink), one.latency + other.latency)
    return links.get((one.name, other.name), star)


def sending(devices: Sequence[Device], size: float, links: Links) -> Floats:
    """Return the seconds to send `size` bytes from the row's device to the column's, (K, K)."""
    return np.array([[link(one, other, links).seconds(size) for other in devices] for one in devices])


_TABLE_1 = (  # c* in TFLOP/s, a, b, r in MB/s, m in GB, uplink power in dBm, metres
    (165, 0.4, 5.1e-4, 5000, 20, 20, 1),
    (70, 0.7, 8.7e-4, 4000, 10, 18, 3),
    (30, 0.8, 1.1e-3, 3000, 8, 15, 5),
    (20, 0.8, 1.8e-3, 2000, 8, 15, 7),
)


def _radio(power: float, metres: float) -> float:
    """Return the bits/s in the paper's cell at a power in dBm: half of Shannon's bound (equations 10-12)."""
    hertz, gain = 160e6, _ratio(-47.2) * metres**-3.0
    noise = 1e-3 * _ratio(-174.0) * hertz
    return 0.5 * hertz * math.log2(1.0 + 1e-3 * _ratio(power) * gain / noise)


def _ratio(decibels: float) -> float:
    return math.pow(10.0, decibels / 10.0)


def devices() -> tuple[Device, ...]:
    """Return the four devices of Table 1, with 25 dBm of power at the access point."""
    found = []
    for number, (tera, a, b, disk, memory, power, metres) in enumerate(_TABLE_1, 1):
        uplink, downlink = _radio(power, metres), _radio(25.0, metres)
        found.append(Device(f"Device {number}", tera * 1e12, a, b, disk * 1e6, memory * 1e9, uplink, downlink))
    return tuple(found)


def model() -> ModelCosts:
    """Qwen3-14B in bf16: 660.6 MB a layer; no embedding, no head and no cache, as in the paper."""
    return ModelCosts.of(TransformerShape(40, 5120, 40, 8, 128, 17408), "Qwen3-14B", cached=False)
