"""Rules of cutting a model into layers: which models, where, and what llama.cpp has to be told of a part.

A part's layers are counted from 0 again, and some of llama.cpp's graphs ask which number a layer has, or how many there
are. Each architecture that can be cut has a line in `RULES` with what its graph asks for (read from the source of
llama.cpp in llama-cpp-python 0.3.36), and a test that a chain of parts computes the logits of the whole model
(`tests/engine/test_cuttable.py`). Values that llama.cpp reads from the file are written for the part: the pattern of
windows, the number of dense layers in front, values per layer. Its own counts restrict where a part may begin.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from edgellm.engine.gguf.reader import GgufArray, GgufHeader
from edgellm.errors import ModelCorrupt, ModelUnsupported

PATTERN, _WINDOW = "attention.sliding_window_pattern", "attention.sliding_window"
DENSE_LEAD, NEXTN, DEEPSTACK = "leading_dense_block_count", "nextn_predict_layers", "n_deepstack_layers"
PER_LAYER = frozenset({
    "attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length",
    "expert_used_count", "swiglu_clamp_exp", "swiglu_clamp_shexp",
})  # fmt: skip
"""Keys under which a file may have one value per layer."""
SECTIONS = "rope.dimension_sections"
_AGAIN = "Fetch it again."
_BESIDE_LAYERS = frozenset({
    "token_embd.weight", "output_norm.weight", "output_norm.bias", "output.weight", "output.bias", "rope_freqs.weight",
    "rope_factors_long.weight", "rope_factors_short.weight",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class CutRule:
    """The dependence of llama.cpp's graph of an architecture on a layer's number and on the number of layers.

    `window`: some layers attend to a window only; without a pattern in the file, all but every `window`-th. With
    `optional` that is so only where the file has a window. `least`: the fewest layers with which llama.cpp opens a
    cache. `period`: whether a layer has positions depends on its number modulo this. `scaled`: rows in place of tokens
    are scaled like embeddings: by the root of the width ("width"), or by the value under this key. `counts`: numbers of
    layers with which llama.cpp computes otherwise; `normed`: only the scale of attention, for which the norm of queries
    in a part can make up. `needs`: keys whose default depends on the number of layers. `refused`: keys whose value, if
    not 0, makes layers depend on others. `head`: llama.cpp wants the head in every file. `by_window`: only layers with
    a window have positions, and llama.cpp ends the process for a part without such a layer. `planes`: llama.cpp ends
    the process for rows whose positions do not lie in several planes, of images and text.
    """

    window: int = 0
    optional: bool = False
    least: int = 1
    period: int = 1
    scaled: str = ""
    counts: Collection[int] = ()
    needs: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    head: bool = False
    by_window: bool = False
    planes: bool = False
    normed: bool = False


_PLAIN = CutRule()
RULES: Mapping[str, CutRule] = MappingProxyType({
    "afmoe": CutRule(window=4, optional=True, period=4, scaled="width"),  # every fourth layer is without positions
    "arcee": _PLAIN,
    "bailingmoe": CutRule(head=True),
    "bailingmoe2": CutRule(head=True),
    "cohere2": CutRule(window=4, by_window=True),
    "command-r": CutRule(counts=range(64, 513)),  # norms of queries and keys
    "deepseek": _PLAIN,
    "deepseek2": CutRule(counts=(26, 27, 48), needs=("expert_gating_func",)),  # counts: taken for a Lite
    "dots1": CutRule(head=True),
    "ernie4_5": _PLAIN,
    "ernie4_5-moe": _PLAIN,
    "exaone": _PLAIN,
    "exaone4": CutRule(counts=(64,)),  # a window in some layers, of the 32B only
    "exaone-moe": CutRule(window=4, head=True, by_window=True),
    "falcon": _PLAIN,
    "gemma": CutRule(scaled="width"),
    "gemma2": CutRule(window=2, scaled="width", counts=(46,)),  # the 27B scales attention by its width
    "gemma3": CutRule(window=6, optional=True, counts=(62,), normed=True),  # the 27B, as of gemma2
    "gemma4": CutRule(window=6, least=2, refused={
        "embedding_length_per_layer_input": "each layer has embeddings of its own, computed before the first one",
        "attention.shared_kv_layers": "its last layers share keys and values of earlier ones",
    }),
    "glm4moe": CutRule(planes=True),
    "gpt-oss": CutRule(window=2, head=True),
    "gptneox": CutRule(head=True),
    "granite": CutRule(scaled="embedding_scale"),
    "granitemoe": CutRule(scaled="embedding_scale"),
    "hunyuan-dense": _PLAIN,
    "hunyuan-moe": _PLAIN,
    "internlm2": CutRule(head=True),
    "llama": _PLAIN,
    "minicpm": CutRule(scaled="embedding_scale", needs=("residual_scale", "embedding_scale")),
    "minimax-m2": CutRule(head=True),
    "mistral3": _PLAIN,
    "nemotron": CutRule(head=True),
    "olmo": _PLAIN,
    "olmo2": CutRule(window=4, optional=True, head=True),
    "olmoe": CutRule(head=True),
    "phi2": CutRule(head=True),
    "phi3": _PLAIN,
    "phimoe": CutRule(head=True),
    "qwen2": _PLAIN,
    "qwen2moe": CutRule(head=True),
    "qwen2vl": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3moe": _PLAIN,
    "qwen3vl": _PLAIN,
    "qwen3vlmoe": _PLAIN,
    "seed_oss": _PLAIN,
    "smollm3": CutRule(period=4),  # every fourth layer is without positions
    "stablelm": CutRule(head=True),
    "starcoder2": _PLAIN,
})  # fmt: skip

_RECURRENT = "its recurrent state cannot be rolled back where rows of other layers come in"
_BEFORE = "positions or a norm are added to the rows before its first layer"
_REFUSED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "jamba", "falcon-h1", "granitehybrid", "lfm2",
         "lfm2moe", "nemotron_h", "nemotron_h_moe", "plamo2", "qwen3next", "qwen35", "qwen35moe", "qwen4exp",
         "kimi-linear", "minimax-01", "deepseek4"),
        _RECURRENT,
    )
    | dict.fromkeys(("bloom", "gpt2", "mpt", "starcoder"), _BEFORE)
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

    Raises:
        ModelUnsupported: the architecture is not known to be safe to cut, or this model of it is not.
        ModelCorrupt: the number of layers is missing.
    """
    arch = header.architecture
    rule = RULES.get(arch)
    if rule is None:
        why = _REFUSED.get(arch, "edgellm does not know what its layers depend on")
        raise _refused(arch, why)
    count = header.metadata.get(f"{arch}.block_count")
    layers = count - header.number(NEXTN) if isinstance(count, int) else 0
    if layers < 1:
        raise ModelCorrupt("The file does not say how many layers it has.", _AGAIN)
    for key in (f"{arch}.{name}" for name in PER_LAYER):
        value = header.metadata.get(key)
        if isinstance(value, (tuple, GgufArray)) and not (isinstance(value, tuple) and len(value) == count):
            raise ModelCorrupt(f"The file does not have a value of {key} for each of its {count} layers.", _AGAIN)
    for why in _obstacles(header, rule, layers):
        raise _refused(arch, why)
    return layers


def _obstacles(header: GgufHeader, rule: CutRule, layers: int) -> Iterator[str]:
    """Yield why a model of an architecture that can be cut cannot be."""
    arch = header.architecture
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
    if not RULES[header.architecture].by_window or windows is None:
        return tuple(range(0, layers, RULES[header.architecture].period))
    return tuple(at for at in range(layers) if at == 0 or (windows[at] and any(windows[:at])))


def exit_cuts(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers behind which a model can be cut in two parts with a head each, for an early exit.

    There may be fewer than for stages: a stage may lie in several files of a few layers, while either part of an exit
    is a single file, with a number of layers that llama.cpp may take for another model's.
    """
    layers = check_cuttable(header)
    return tuple(
        point - 1 for point in cut_points(header) if point and count_is_safe(header, point, layers - point)
    )  # fmt: skip


def count_is_safe(header: GgufHeader, *counts: int) -> bool:
    """Return whether llama.cpp computes parts of these numbers of layers as it computes the whole model."""
    return not set(counts) & (set(RULES[header.architecture].counts) - {check_cuttable(header)})


def largest_part(header: GgufHeader) -> int:
    """Return a number of layers up to which llama.cpp computes all parts as it computes the whole model."""
    return min(RULES[header.architecture].counts, default=1 + check_cuttable(header)) - 1


def wants_head(header: GgufHeader) -> bool:
    """Return whether llama.cpp loads a model of this architecture only with a head beside the embedding."""
    return RULES[header.architecture].head


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
    rule = RULES.get(arch, _PLAIN)
    if not rule.scaled:
        return 1.0
    key = "embedding_length" if rule.scaled == "width" else rule.scaled
    value = header.metadata.get(f"{arch}.{key}")
    scale = float(value) if isinstance(value, (int, float)) else 0.0
    scale = math.sqrt(max(0.0, scale)) if rule.scaled == "width" else scale
    return 1.0 / scale if scale else 1.0


@dataclass(frozen=True, slots=True)
class PartMetadata:
    """Hyperparameters of a part: `numbers` by key, and whether each layer's attention has a window (None: no key says).

    `sections` of the rotated dimensions are those of each plane of positions.

    `layers`: the layers whose values it has; where llama.cpp wants one more, the last layer again, which stands for a
    layer that predicts further tokens, and which llama.cpp neither loads nor computes.
    """

    layers: tuple[int, ...]
    numbers: Mapping[str, int]
    windows: tuple[bool, ...] | None
    sections: tuple[int, ...] | None


def part_metadata(header: GgufHeader, first: int, last: int) -> PartMetadata:
    """Return the hyperparameters that the part from layer `first` to `last`, both included, has of its own.

    llama.cpp ends the process for a model with a window if no layer has one. So such a part claims one more layer,
    with a window.
    """
    rule, layers = RULES[header.architecture], tuple(range(first, last + 1))
    windows = window_pattern(header)
    more = windows is not None and (not any(windows[first : last + 1]) or len(layers) < rule.least)
    numbers = {"block_count": len(layers) + more}
    if more or header.number(NEXTN):
        numbers[NEXTN] = int(more)
    if lead := header.number(DENSE_LEAD):
        numbers[DENSE_LEAD] = max(0, lead - first)
    if header.number(DEEPSTACK):  # rows would be wider, with an image's rows
        numbers[DEEPSTACK] = 0
    return PartMetadata(
        (*layers, last) if more else layers, numbers,
        None if windows is None else (*windows[first : last + 1], *[True] * more), _sections(header) if first else None,
    )  # fmt: skip


def _sections(header: GgufHeader) -> tuple[int, ...] | None:
    """Return how many pairs of rotated dimensions take their position from each plane. A row's positions are the same
    in all planes, so any division is right."""
    arch, given = header.architecture, header.metadata.get(f"{header.architecture}.{SECTIONS}")
    if not RULES[arch].planes or (isinstance(given, tuple) and all(size > 0 for size in given[:2])):
        return None
    width = header.number("embedding_length") // max(1, header.number("attention.head_count"))
    width = header.number("attention.key_length") or width
    pairs = (header.number("rope.dimension_count") or width) // 2
    return pairs - 1, 1, 0, 0


def window_pattern(header: GgufHeader) -> tuple[bool, ...] | None:
    """Return which layers attend to a window only; None if llama.cpp reads of no window for this architecture."""
    arch = header.architecture
    rule = RULES.get(arch, _PLAIN)
    if not rule.window or (rule.optional and not header.number(_WINDOW)):
        return None
    layers = header.number("block_count") - header.number(NEXTN)
    found = header.metadata.get(f"{arch}.{PATTERN}", rule.window)
    if isinstance(found, tuple):
        return (*map(bool, found[:layers]), *[False] * (layers - len(found)))
    period = int(found) if isinstance(found, int) else rule.window
    return tuple(period == 0 or layer % period < period - 1 for layer in range(layers))


def _refused(arch: str, why: str) -> ModelUnsupported:
    return ModelUnsupported(f"The layers of this {arch or 'unnamed'} model cannot be cut: {why}.", "Run it whole.")
