"""A range of a model's layers as a model of its own, which stock llama.cpp loads: which models, where, and what
llama.cpp has to be told of a part.

A part that begins at layer 0 takes token ids. Every other part takes the output rows of the layer before it
(`Context.decode_embeddings`) and carries no vocabulary. A part with a head ends in logits, whatever its last layer; a
part without one is read with `Capture(stop_after=...)`. A chain of all parts computes the same as the
whole model.

A part's layers are counted from 0 again, and some of llama.cpp's graphs ask which number a layer has, or how many there
are. Each architecture that can be cut has an entry in `RULES` with what its graph asks for (read from the source of
llama.cpp in llama-cpp-python 0.3.36), and a test that a chain of parts computes the logits of the whole model
(`tests/engine/test_cuttable.py`).
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType

from edgellm.engine.gguf.header import TENSOR_TYPES, GgufArray, GgufHeader, TensorInfo
from edgellm.engine.gguf.reader import ModelFile, raw_entries
from edgellm.engine.gguf.writer import NewTensor, copied, entry, multiplied, picked, portions, write, zeros
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported

EMBEDDING, HEAD, _HEAD_BIAS = "token_embd.weight", "output.weight", "output.bias"
BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
SLIVER = 32
"""Rows in the place of an embedding that is never read."""
_BLANK = -1  # offset of a tensor of zeros
PATTERN, DENSE_LEAD, SECTIONS = (
    "attention.sliding_window_pattern", "leading_dense_block_count", "rope.dimension_sections",
)  # fmt: skip
_NEXTN, _DEEPSTACK = "nextn_predict_layers", "n_deepstack_layers"
PER_LAYER = frozenset({
    "attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length",
    "expert_used_count", "swiglu_clamp_exp", "swiglu_clamp_shexp",
})  # fmt: skip
"""Keys under which a file may have one value per layer."""
_AGAIN = "Fetch it again."
_BESIDE_LAYERS = frozenset({
    "token_embd.weight", "output_norm.weight", "output_norm.bias", "output.weight", "output.bias", "rope_freqs.weight",
    "rope_factors_long.weight", "rope_factors_short.weight",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class CutRule:
    """The dependence of llama.cpp's graph of an architecture on a layer's number and on the number of layers."""

    window: int = 0  # all but every so-manyth layer attend to a window only, if the file has no pattern
    optional: bool = False  # the file may have no window
    by_window: bool = False  # only layers with a window have positions; a part without one ends the process
    least: int = 1  # fewest layers with which llama.cpp opens a cache
    period: int = 1  # whether a layer has positions depends on its number modulo this
    scaled: str = ""  # rows are scaled like embeddings: by the root of the "width", or by the value of this key
    counts: Collection[int] = ()  # numbers of layers with which llama.cpp computes otherwise
    normed: bool = False  # these change only the scale of attention, for which the norm of queries can make up
    needs: tuple[str, ...] = ()  # keys whose default depends on the number of layers
    refused: Mapping[str, str] = field(default_factory=dict)  # keys that make layers depend on others, if not 0
    head: bool = False  # llama.cpp wants the head in every file
    planes: bool = False  # rows whose positions lie in one plane, not in those of images and text, end the process


_PLAIN = CutRule()
RULES: Mapping[str, CutRule] = MappingProxyType({
    **dict.fromkeys(
        ("arcee", "deepseek", "ernie4_5", "ernie4_5-moe", "exaone", "falcon", "hunyuan-dense", "hunyuan-moe", "llama",
         "mistral3", "olmo", "phi3", "qwen2", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "seed_oss",
         "starcoder2"), _PLAIN),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "dots1", "gptneox", "internlm2", "minimax-m2", "nemotron", "olmoe", "phi2",
         "phimoe", "qwen2moe", "stablelm"), CutRule(head=True)),
    "afmoe": CutRule(window=4, optional=True, period=4, scaled="width"),  # every fourth layer is without positions
    "cohere2": CutRule(window=4, by_window=True),
    "command-r": CutRule(counts=range(64, 513)),  # norms of queries and keys
    "deepseek2": CutRule(counts=(26, 27, 48), needs=("expert_gating_func",)),  # counts: taken for a Lite
    "exaone4": CutRule(counts=(64,)),  # a window in some layers, of the 32B only
    "exaone-moe": CutRule(window=4, head=True, by_window=True),
    "gemma": CutRule(scaled="width"),
    "gemma2": CutRule(window=2, scaled="width", counts=(46,)),  # the 27B scales attention by its width
    "gemma3": CutRule(window=6, optional=True, counts=(62,), normed=True),  # the 27B, as of gemma2
    "gemma4": CutRule(window=6, least=2, refused={
        "embedding_length_per_layer_input": "each layer has embeddings of its own, computed before the first one",
        "attention.shared_kv_layers": "its last layers share keys and values of earlier ones",
    }),
    "glm4moe": CutRule(planes=True),
    "gpt-oss": CutRule(window=2, head=True),
    "granite": CutRule(scaled="embedding_scale"),
    "granitemoe": CutRule(scaled="embedding_scale"),
    "minicpm": CutRule(scaled="embedding_scale", needs=("residual_scale", "embedding_scale")),
    "olmo2": CutRule(window=4, optional=True, head=True),
    "smollm3": CutRule(period=4),  # every fourth layer is without positions
})  # fmt: skip

_REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("bloom", "gpt2", "mpt", "starcoder"), "positions or a norm are added to the rows before its first layer"
    )
    | {
        "baichuan": "llama.cpp tells its 7B from its 13B by the number of layers",
        "glm4": "llama.cpp ends the process where rows take the place of its tokens",
        "gemma3n": "its layers share keys, values and embeddings per layer",
        "mimo2": "llama.cpp 0.6 gives the output of its last layer another name",
        "step35": "llama.cpp gives the output of its last layer another name",
        "llama4": "its attention, experts and positions depend on a layer's number in three ways",
    }
)  # fmt: skip
"""Why layers of some architectures that people run cannot be cut. Others were not checked."""


def check_cuttable(header: GgufHeader) -> int:
    """Check that `cut` can cut a model, and return its number of layers, without those that predict further tokens.
    Raises ModelUnsupported: the architecture is not known to be safe to cut, or this model of it is not; ModelCorrupt:
    the number of layers is missing."""
    arch = header.architecture
    count, layers = header.number("block_count"), header.text_layers
    if arch in RULES and layers < 1:
        raise ModelCorrupt("The file does not say how many layers it has.", _AGAIN)
    for key in (f"{arch}.{name}" for name in PER_LAYER if arch in RULES):
        value = header.metadata.get(key)
        if isinstance(value, GgufArray) or (isinstance(value, tuple) and len(value) != count):
            raise ModelCorrupt(f"The file does not have a value of {key} for each of its {count} layers.", _AGAIN)
    for why in _obstacles(header, layers):
        raise ModelUnsupported(f"The layers of this {arch or 'unnamed'} model cannot be cut: {why}.", "Run it whole.")
    return layers


def _obstacles(header: GgufHeader, layers: int) -> Iterator[str]:
    """Yield why a model cannot be cut."""
    arch = header.architecture
    rule = RULES.get(arch)
    if rule is None:
        recurrent = "its recurrent state cannot be rolled back where rows of other layers come in"
        unknown = "edgellm does not know what its layers depend on"
        yield _REFUSED.get(arch, recurrent if header.recurrent_state_bytes else unknown)
        return
    if layers in rule.counts and not rule.normed:
        yield f"llama.cpp computes one of {layers} layers otherwise, and knows it by their number"
    for key in rule.needs:
        if f"{arch}.{key}" not in header.metadata:
            yield f"the file has no {arch}.{key}, and its default depends on the number of layers"
    for key, why in rule.refused.items():
        if header.number(key):
            yield why
    known = {f"{arch}.{key}" for key in (*PER_LAYER, PATTERN, SECTIONS)}
    for key, value in header.metadata.items():
        if key.startswith(f"{arch}.") and isinstance(value, (tuple, GgufArray)) and key not in known:
            yield f"the file has the array {key}, which may be one value per layer"
    for tensor in header.tensors:
        if not tensor.name.startswith("blk.") and tensor.name not in _BESIDE_LAYERS:
            yield f"the file has the tensor {tensor.name} beside its layers"


def cut_points(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers with which a part of a model may begin, from 0; a part may end before such a layer, or with the
    last layer."""
    layers, windows = check_cuttable(header), window_pattern(header)
    rule = RULES[header.architecture]
    if not rule.by_window or windows is None:
        return tuple(range(0, layers, rule.period))
    return tuple(at for at in range(layers) if at == 0 or (windows[at] and any(windows[:at])))


def exit_cuts(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers behind which a model can be cut in two parts with a head each, for an early exit.

    There may be fewer than for stages: a stage may lie in several files of a few layers, while either part of an exit
    is a single file, with a number of layers that llama.cpp may take for another model's.
    """
    layers = check_cuttable(header)
    return tuple(at - 1 for at in cut_points(header) if at and count_is_safe(header, at, layers - at))


def count_is_safe(header: GgufHeader, *counts: int) -> bool:
    """Return whether llama.cpp computes parts of these numbers of layers as it computes the whole model."""
    return not set(counts) & (set(RULES[header.architecture].counts) - {check_cuttable(header)})


def largest_part(header: GgufHeader) -> int:
    """Return a number of layers up to which llama.cpp computes all parts as it computes the whole model."""
    return min(RULES[header.architecture].counts, default=1 + check_cuttable(header)) - 1


def query_factor(header: GgufHeader, count: int) -> float:
    """Return the factor for the norm of queries in a part of `count` layers."""
    rule, layers = RULES[header.architecture], check_cuttable(header)
    heads, length = header.number("attention.head_count"), header.number("attention.key_length")
    width = header.number("embedding_length") // max(1, heads)
    if not (rule.normed and layers in rule.counts and count != layers and length > 0 and width > 0):
        return 1.0
    # llama.cpp divides by the root of the width per head in the whole model, and of a key's length in a part.
    return math.sqrt(length / width)


def row_factor(header: GgufHeader) -> float:
    """Return the factor for rows that enter a part's first layer: it undoes llama.cpp's scaling of embeddings."""
    arch = header.architecture
    scaled = RULES.get(arch, _PLAIN).scaled
    if scaled == "width":
        scale = math.sqrt(max(0, header.number("embedding_length")))
    else:
        value = header.metadata.get(f"{arch}.{scaled}")
        scale = float(value) if isinstance(value, (int, float)) else 0.0
    return 1.0 / scale if scale else 1.0


def _sections(header: GgufHeader) -> tuple[int, ...] | None:
    """Return how many pairs of rotated dimensions take their position from each plane. A row's positions are the same
    in all planes, so any division is right."""
    arch, given = header.architecture, header.metadata.get(f"{header.architecture}.{SECTIONS}")
    if not RULES[arch].planes or (isinstance(given, tuple) and all(size > 0 for size in given[:2])):
        return None
    width = header.number("embedding_length") // max(1, header.number("attention.head_count"))
    width = header.number("attention.key_length") or width
    return (header.number("rope.dimension_count") or width) // 2 - 1, 1, 0, 0


def window_pattern(header: GgufHeader) -> tuple[bool, ...] | None:
    """Return which layers attend to a window only; None if llama.cpp reads of no window for this architecture."""
    arch = header.architecture
    rule = RULES.get(arch, _PLAIN)
    if not rule.window or (rule.optional and not header.number("attention.sliding_window")):
        return None
    layers = header.text_layers
    found = header.metadata.get(f"{arch}.{PATTERN}", rule.window)
    if isinstance(found, tuple):
        return (*map(bool, found[:layers]), *[False] * (layers - len(found)))
    period = int(found) if isinstance(found, int) else rule.window
    return tuple(period == 0 or layer % period < period - 1 for layer in range(layers))


def cut(src: Path, dst: Path, first: int, last: int, *, head: bool) -> None:
    """Write the layers `first` to `last` of `src`, both included and counted from 0, as a model of its own.

    With `head` the final norm and the head follow layer `last`, even if it is not the model's last layer (an early exit
    needs that). `dst` appears whole or not at all. A split model gives the same bytes as the file that it was split
    from. Raises InvalidOption: the model has no such layers; ModelNotFound, ModelCorrupt: as for `ModelFile.open`;
    ModelUnsupported: the architecture is not known to be safe to cut.
    """
    write(dst, cut_bytes(ModelFile.open(src), first, last, head=head))


def cut_bytes(src: ModelFile, first: int, last: int, *, head: bool) -> Iterator[bytes | memoryview]:
    """Yield the bytes that `cut` writes, in portions of a mebibyte at most, each valid until the next is asked for.

    Errors are raised at the first portion.
    """
    header = src.header
    n_layer, starts = check_cuttable(header), cut_points(header)
    what = f"{src.path.name} cannot be cut from layer {first} to {last}"
    if not 0 <= first <= last < n_layer:
        raise InvalidOption(f"{what}.", f"Its layers run from 0 to {n_layer - 1}.")
    if first not in starts or last + 1 not in (*starts, n_layer):
        raise InvalidOption(
            f"{what}: its layers differ by their number.",
            f"Begin with one of the layers {', '.join(map(str, starts))}, and end before one of them.",
        )
    if not count_is_safe(header, last + 1 - first):
        why = f"llama.cpp takes {last + 1 - first} layers for another model"
        raise InvalidOption(f"{what}: {why}.", "Cut fewer layers.")
    with ExitStack() as opened:
        sources = [opened.enter_context(path.open("rb")) for path in src.paths]
        tensors = list(_tensors(sources, header, first, last, head))
        yield from portions(header, _entries(src, first, last, tensors), tensors)


def _entries(src: ModelFile, first: int, last: int, tensors: Sequence[NewTensor]) -> list[bytes]:
    """Return the metadata of the part from layer `first` to `last`.

    llama.cpp ends the process for a model with a window if no layer has one. So such a part claims one more layer, with
    a window, and with the other values of the last layer: it stands for a layer that predicts further tokens, which
    llama.cpp neither loads nor computes.
    """
    header, layers = src.header, list(range(first, last + 1))
    arch, windows = header.architecture, window_pattern(header)
    pattern = [] if windows is None else [windows[layer] for layer in layers]
    if more := windows is not None and (not any(pattern) or len(layers) < RULES[arch].least):
        layers, pattern = [*layers, last], [*pattern, True]
    entries = raw_entries(src)
    for key in (f"{arch}.{name}" for name in sorted(PER_LAYER)):
        if isinstance(header.metadata.get(key), tuple):
            entries[key] = picked(key, entries[key], layers)
    changed: dict[str, str | int | Sequence[int]] = {f"{arch}.block_count": len(layers)}
    if more or header.mtp_layers:
        changed[f"{arch}.{_NEXTN}"] = int(more)
    if lead := header.number(DENSE_LEAD):
        changed[f"{arch}.{DENSE_LEAD}"] = max(0, lead - first)
    if header.number(_DEEPSTACK):  # rows would be wider, with an image's rows
        changed[f"{arch}.{_DEEPSTACK}"] = 0
    if windows is not None:
        changed[f"{arch}.{PATTERN}"] = pattern
    if first > 0:
        if (sections := _sections(header)) is not None:
            changed[f"{arch}.{SECTIONS}"] = sections
        entries = {key: raw for key, raw in entries.items() if not key.startswith("tokenizer.")}
        changed[f"{arch}.vocab_size"] = next(t.shape[1] for t, _ in tensors if t.name == EMBEDDING)
        changed["tokenizer.ggml.model"] = "no_vocab"
    return list((entries | {key: entry(key, value) for key, value in changed.items()}).values())


def _tensors(
    sources: Sequence[BufferedReader], header: GgufHeader, first: int, last: int, head: bool
) -> Iterator[NewTensor]:
    """Yield each tensor of the shard under its new name, in the file's order.

    llama.cpp wants an embedding in every file, and mostly takes it as the head where there is no head. So a shard that
    is fed rows holds the head under the embedding's name, or, without a head, only a sliver of the embedding. Where
    llama.cpp wants both, the unused tensor is a sliver, too, or blank if it must have a row for each token.
    """
    found = {t.name: t for t in header.tensors}
    if EMBEDDING not in found or len(found[EMBEDDING].shape) != 2:
        raise ModelCorrupt(f"The file has no matrix {EMBEDDING}.", "Fetch it again.")
    windows, both = window_pattern(header), RULES[header.architecture].head and HEAD in found
    factor = query_factor(header, last + 1 - first)
    for t in header.tensors:
        new = t
        if block := BLOCK.fullmatch(t.name):
            new = replace(t, name=f"blk.{int(block[1]) - first}.{block[2]}")
        elif t.name in (HEAD, _HEAD_BIAS) and not head:
            new = _sliver(t) if first > 0 else _blank(t)
        elif t.name == EMBEDDING and first > 0 and head:
            new = _blank(t) if both else replace(found.get(HEAD, t), name=EMBEDDING)
        elif t.name == EMBEDDING and first > 0:
            new = _sliver(t)
        unread = t.name == "rope_freqs.weight" and windows is not None and all(windows[first : last + 1])
        absent = (t.name == HEAD and first > 0) or (t.name in (HEAD, _HEAD_BIAS) and not head)
        if (block and not first <= int(block[1]) <= last) or unread or (absent and not both):
            continue  # rope_freqs: only layers without a window use it, and llama.cpp refuses unused tensors
        scaled = block is not None and block[2] == "attn_q_norm.weight"
        yield _written(new, sources[new.part], factor if scaled else 1.0)


def _written(t: TensorInfo, source: BufferedReader, factor: float) -> NewTensor:
    data: Callable[[], Iterable[bytes | memoryview]] = partial(copied, source, t)
    if t.offset == _BLANK:
        data = partial(zeros, t.nbytes)
    elif factor != 1.0:
        data = partial(multiplied, source, t, factor)
    return t, data


def _sliver(t: TensorInfo) -> TensorInfo:
    """Return the first rows of a matrix, or numbers of a vector."""
    return replace(t, shape=(*t.shape[:-1], min(SLIVER, t.shape[-1])))


def _blank(t: TensorInfo) -> TensorInfo:
    """Return zeros for an unused tensor, in the smallest fitting type; float32 stays, as a model counts as float32
    only if all its tensors are."""
    kind = t.kind
    if len(t.shape) > 1 and TENSOR_TYPES[kind][0] != "F32":
        fitting = [one for one, (_name, block, _size) in TENSOR_TYPES.items() if t.shape[0] % block == 0]
        kind = min(fitting, key=lambda one: TENSOR_TYPES[one][2] / TENSOR_TYPES[one][1])
    return replace(t, kind=kind, offset=_BLANK)
