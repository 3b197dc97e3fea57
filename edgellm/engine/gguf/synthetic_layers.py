"""A few layers of a model's shape and quantisation with random weights, to time a device that does not have the model.

Only the header of a cut is sent: some kilobytes. The time of the arithmetic does not depend on the weights, as long as
they are numbers of a sane size; so scales are set, and all else is random.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.engine.cores import minimum_times, plausible_times
from edgellm.engine.gguf.cuttable import DENSE_LEAD, check_cuttable, cut_bytes, cut_points, largest_part
from edgellm.engine.gguf.header import F32, TENSOR_TYPES, TensorInfo
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.engine.layer_block import Block
from edgellm.engine.model import ContextSpec, LoadSpec, Model
from edgellm.engine.vocabulary import Floats
from edgellm.errors import InvalidOption, ModelUnsupported

ENOUGH = 192 * 2**20  # bytes of weights: more than a processor's caches hold
HEADER_MOST = 2**20  # bytes
ROWS = tuple(2**power for power in range(10))
_ROUND_MOST = 10.0  # seconds
_SPELL = 0.25  # least seconds of a measurement
_ROUNDS = 4  # most measurements, apart in time because other load comes and goes; two that agree are enough

# ggml type -> offsets of 16-bit scales in a block (IQ1_M has none of its own, and is filled with small numbers)
_SCALES = {
    2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 9: (0, 2), 10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2),
    14: (208,), 16: (0,), 17: (0,), 18: (0,), 19: (0,), 20: (0,), 21: (0,), 22: (0,), 23: (0,), 34: (52,), 35: (64,),
    41: (0,), 42: (0,),
}  # fmt: skip
_SCALE = np.frombuffer(np.float16(2.0**-12).tobytes(), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Blocks:
    """`layers` layers without their weights: a GGUF's header, and the bytes of weights that follow it. `width` is the
    width of the input rows."""

    header: bytes
    data: int
    layers: int
    width: int

    @property
    def key(self) -> str:
        """A hash of the shape and quantisation."""
        return hashlib.sha256(self.header).hexdigest()

    @property
    def layer(self) -> int:
        """Bytes of one layer's weights."""
        return self.data // self.layers


def blocks_of(model: ModelFile) -> Blocks:
    """Return enough middle layers of a model to be timed. Raises as `edgellm.engine.cut`, and ModelUnsupported for a
    model of one layer."""
    header = model.header
    n_layer, points, width = check_cuttable(header), cut_points(header), header.number("embedding_length")
    if len(points) < 2:
        raise ModelUnsupported(f"{model.path.name} cannot be cut into two parts.", "There is nothing to share out.")
    if width < 1:
        raise ModelUnsupported(f"{model.path} does not have the width of its rows.", "Use another file of this model.")
    lead = header.number(DENSE_LEAD)  # dense layers before the others
    first = next((point for point in points[1:] if point >= lead), points[-1])
    weights = sum(t.nbytes for t in header.tensors if t.layer == first)
    wanted = first + min(largest_part(header), max(1, math.ceil(ENOUGH / max(1, weights))))
    stop = next(stop for stop in (*points, n_layer) if stop > first and stop >= min(wanted, n_layer))
    portions = cut_bytes(model, first, stop - 1, head=False)
    return Blocks(bytes(next(portions)), sum(map(len, portions)), stop - first, width)


def write_random(blocks: Blocks, dst: Path) -> None:
    """Write the layers with random weights. Raises InvalidOption: the header or the weights are too large, or the
    number of layers is wrong; ModelCorrupt, ModelUnsupported: the header is not the header of a GGUF of this size;
    OSError: the disk is full, or cannot be written."""
    if not (0 < len(blocks.header) <= HEADER_MOST and 0 < blocks.data <= 16 * ENOUGH):
        raise InvalidOption(f"Layers of {blocks.data} bytes are too much to measure.", "Ask for fewer.")
    rng = np.random.default_rng(0)
    try:
        with dst.open("wb") as file:
            file.write(blocks.header)
            file.truncate(len(blocks.header) + blocks.data)
        header = ModelFile.open(dst).header
        if check_cuttable(header) != blocks.layers:
            what = f"The header does not describe {blocks.layers} layers."
            raise InvalidOption(what, "Give the number that it describes.")
        with dst.open("r+b") as file:
            for tensor in header.tensors:
                file.seek(tensor.offset)
                file.writelines(_weights(tensor, rng))
    except BaseException:
        dst.unlink(missing_ok=True)
        raise


def time_passes(
    paths: Sequence[Path], blocks: Blocks, hardware: Hardware = ON_PROCESSOR,
    on_progress: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[int, ...], tuple[float, ...]]:  # fmt: skip
    """Return growing numbers of tokens, and the least seconds of a pass of each through one layer.

    The layers are computed where `hardware` puts them, file by file of `paths`, as by a stage that has them. Larger
    numbers are not tried once that takes a device too long. Raises as `Model.load`.
    """
    rng = np.random.default_rng(1)
    best: dict[int, float] = {}
    with ExitStack() as opened:
        models = [opened.enter_context(Model.load(path, LoadSpec(hardware))) for path in paths]
        chain = [Block(model, ContextSpec(max(ROWS), n_batch=max(ROWS)), head=False) for model in models]
        for block in chain:
            opened.callback(block.close)
        _through(chain, np.zeros((1, blocks.width), dtype=np.float32))  # the weights come from the disk

        def timed(rows: int) -> float:
            on_progress(f"computing {rows} token{'s' * (rows > 1)}")
            return _pass(chain, rng.standard_normal((rows, blocks.width), dtype=np.float32))

        until = time.perf_counter() + _ROUND_MOST
        for rows in ROWS:
            best[rows] = timed(rows)
            if time.perf_counter() > until:
                break
        samples = {rows: [taken] for rows, taken in best.items()}
        best = minimum_times(timed, tuple(best), rounds=_ROUNDS - 1, seconds=_ROUND_MOST, samples=samples)
        seconds = plausible_times(tuple(best), tuple(best.values()))
        return tuple(best), tuple(taken / blocks.layers for taken in seconds)


def _pass(chain: Sequence[Block], rows: Floats) -> float:
    """Return the mean seconds of several passes without a pause: the speed in the long run counts, also of a device
    that grows hot or may use its processor only part of the time."""
    count, taken, began = 0, 0.0, time.perf_counter()
    while count < 2 or taken < _SPELL:
        _through(chain, rows)
        count, taken = count + 1, time.perf_counter() - began
    return taken / count


def _through(chain: Sequence[Block], rows: Floats) -> None:
    for block in chain:
        rows = block.forward(rows, start=0)


def _weights(tensor: TensorInfo, rng: np.random.Generator) -> Iterator[bytes]:
    """Yield random bytes for a tensor, some at a time."""
    if len(tensor.shape) < 2 and tensor.kind == F32:  # norms
        yield np.ones(tensor.n_elements, dtype=np.float32).tobytes()
        return
    _name, block, size = TENSOR_TYPES[tensor.kind]
    count, step = tensor.n_elements // block, max(1, 2**22 // size)
    some = _blocks(tensor.kind, min(count, step), block, size, rng)
    for at in range(0, count, step):
        yield some[: min(step, count - at) * size]


def _blocks(kind: int, count: int, block: int, size: int, rng: np.random.Generator) -> bytes:
    name = TENSOR_TYPES[kind][0]
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(count * block, dtype=np.float32) * np.float32(0.02)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.astype(np.float32 if name == "F32" else np.float16).tobytes()
    # Any two bytes of a type without a known place of its scales make a small 16-bit number.
    least, most = (0, 256) if kind in _SCALES or name == "MXFP4" else (0x20, 0x30)
    found = rng.integers(least, most, (count, size), dtype=np.uint8)
    for at in _SCALES.get(kind, ()):
        found[:, at : at + 2] = _SCALE
    if name == "MXFP4":
        found[:, 0] = 127 - 9  # a block begins with its scale's exponent
    return found.tobytes()
