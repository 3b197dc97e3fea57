"""Model files that are valid GGUF with one flaw each that llama.cpp does not expect."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from edgellm.engine.gguf.header import TENSOR_TYPES
from edgellm.engine.gguf.reader import ModelFile, raw_entries
from testkit.gguf.random_model import Shape, write

BASE = Shape("llama", 400, 2, 256, 4, 2, 256, 512, tied=False)
BIASED = replace(BASE, arch="qwen2", bias=True)
EXPERTS = replace(BASE, arch="qwen3moe", n_expert=4)
_KINDS = MappingProxyType({name: kind for kind, (name, _, _) in TENSOR_TYPES.items()})
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_FORMS = MappingProxyType({_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?"})

# The ten that passed the check and ended the process in the first attack.
KNOWN = (
    "tokenizer.ggml.model = rwkv", "rope.scaling.type = fractal", "expert_count = 10000",
    *(f"blk.0.attn_norm.weight in {kind}" for kind in ("I32", "F64", "F16", "Q8_0")),
    "rope_freqs.weight in I32", "token_embd.weight in I32", "blk.0.attn_q.weight in I8",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file; `shape` in GGUF's order (columns first)."""

    shape: tuple[int, ...]
    kind: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Crafted:
    """A model file in pieces: raw metadata entries, and tensors, by name."""

    entries: Mapping[str, bytes]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, path: Path) -> Crafted:
        """Return the pieces of a valid file."""
        file, whole = ModelFile.open(path), path.read_bytes()
        found = file.header.tensors
        tensors = {t.name: Tensor(t.shape, t.kind, whole[t.offset : t.offset + t.nbytes]) for t in found}
        return cls(raw_entries(file), tensors)

    def bytes(self) -> bytes:
        """Return the file."""
        head = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.entries)) + b"".join(self.entries.values())
        body = bytearray()
        for name, tensor in self.tensors.items():
            head += _text(name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            head += struct.pack("<IQ", tensor.kind, len(body))
            body += tensor.data + bytes(-len(tensor.data) % 32)
        return head + bytes(-len(head) % 32) + bytes(body)

    def set(self, key: str, value: object, kind: int | None = None) -> Crafted:
        """Return the file with a metadata value; None removes it."""
        entries = {name: raw for name, raw in self.entries.items() if name != key}
        return replace(self, entries=entries if value is None else entries | {key: entry(key, value, kind)})

    def put(self, name: str, tensor: Tensor | None) -> Crafted:
        """Return the file with a tensor; None removes it."""
        tensors = {other: one for other, one in self.tensors.items() if tensor is not None or other != name}
        return replace(self, tensors=tensors if tensor is None else tensors | {name: tensor})

    def retyped(self, name: str, kind: str, fill: int = 0) -> Crafted:
        """Return the file with a tensor in another type, of bytes `fill`."""
        return self.put(name, made(self.tensors[name].shape, kind, fill))

    def renamed(self, arch: str) -> Crafted:
        """Return the file under another architecture, with its hyperparameters renamed."""
        old = next(key.partition(".")[0] for key in self.entries if key.endswith(".block_count"))
        entries: dict[str, bytes] = {}
        for key, raw in self.entries.items():
            new = key.replace(f"{old}.", f"{arch}.", 1) if key.startswith(f"{old}.") else key
            entries[new] = _text(new) + raw[8 + len(key.encode()) :]
        return replace(self, entries=entries).set("general.architecture", arch)


def made(shape: tuple[int, ...], kind: str, fill: int = 0) -> Tensor:
    _, block, size = TENSOR_TYPES[_KINDS[kind]]
    return Tensor(shape, _KINDS[kind], bytes([fill]) * (int(np.prod(shape)) // block * size))


def entry(key: str, value: object, kind: int | None = None) -> bytes:
    """Return a metadata entry; its type follows from the value unless a `kind` is given."""
    head = _text(key)
    if isinstance(value, bytes):  # raw bytes after the type
        return head + value
    if isinstance(value, str):
        return head + struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, (list, tuple)):
        return head + struct.pack("<I", _ARRAY) + _array(value, kind)
    guess = _BOOL if isinstance(value, bool) else _F32 if isinstance(value, float) else _U32
    code = guess if kind is None else kind
    return head + struct.pack("<I", code) + struct.pack(_FORMS[code], value)


def _array(values: list[object] | tuple[object, ...], kind: int | None) -> bytes:
    if values and isinstance(values[0], (str, bytes)) and kind is None:
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_text, values))
    code = kind or (_F32 if values and isinstance(values[0], float) else _I32)
    return struct.pack("<IQ", code, len(values)) + b"".join(struct.pack(_FORMS[code], value) for value in values)


def _text(value: object) -> bytes:
    data = value if isinstance(value, bytes) else str(value).encode()
    return struct.pack("<Q", len(data)) + data


def crafted(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the flaw of a file, and the file; those of `KNOWN` first."""
    pieces = []
    for shape in (BASE, BIASED, EXPERTS):
        path = folder / f"{shape.arch}.gguf"
        write(path, shape, "F32")
        pieces.append(Crafted.of(path))
    base, biased, experts = pieces
    every = {name: make for group in (_types, _values, _tokenizers, _tensors, _families) for name, make in
             group(base, biased, experts)}  # fmt: skip
    for name in sorted(every, key=lambda name: name not in KNOWN):
        yield name, every[name]().bytes()


_Makers = Iterator[tuple[str, Callable[[], Crafted]]]


def _types(base: Crafted, biased: Crafted, experts: Crafted) -> _Makers:
    """Yield every tensor role in wrong types, and matrices in all types, with all bits set or none."""
    freqs = base.put("rope_freqs.weight", made((32,), "F32", 63))
    odd = ("I8", "I16", "I32", "I64", "F64", "F16", "BF16", "Q8_0", "Q8_1", "Q8_K")
    roles = (
        (base, "token_embd.weight"), (base, "output_norm.weight"), (base, "output.weight"),
        (base, "blk.0.attn_norm.weight"), (base, "blk.0.attn_q.weight"), (base, "blk.1.ffn_down.weight"),
        (biased, "blk.0.attn_k.bias"), (experts, "blk.0.attn_q_norm.weight"), (experts, "blk.0.ffn_gate_inp.weight"),
        (experts, "blk.1.ffn_up_exps.weight"), (freqs, "rope_freqs.weight"),
    )  # fmt: skip
    for whole, name in roles:
        for kind in odd:
            if whole.tensors[name].shape[0] % TENSOR_TYPES[_KINDS[kind]][1] == 0:
                yield f"{name} in {kind}", partial(whole.retyped, name, kind)
    for kind in ("F16", "I32"):
        yield f"blk.0.attn_q.scale in {kind}", partial(base.put, "blk.0.attn_q.scale", made((1,), kind, 60))
    for kind in _KINDS:
        for name in ("blk.0.attn_v.weight", "token_embd.weight"):
            yield f"{name} in {kind}, all bits set", partial(base.retyped, name, kind, 255)


def _values(base: Crafted, _biased: Crafted, experts: Crafted) -> _Makers:
    """Yield hyperparameters that are zero, huge, of another type, or contradict each other."""
    keys = (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "vocab_size", "rope.dimension_count", "attention.key_length",
        "attention.value_length", "expert_count", "expert_used_count", "expert_group_count",
        "attention.sliding_window", "nextn_predict_layers", "pooling_type", "embedding_length_out",
    )  # fmt: skip
    for key in keys:
        for value in (0, 1, 3, 10_000, 2**31, 2**32 - 1):
            yield f"{key} = {value}", partial(base.set, f"llama.{key}", value)
        yield f"{key} = 'x'", partial(base.set, f"llama.{key}", "x")
        yield f"{key} = [7, 0]", partial(base.set, f"llama.{key}", [7, 0])
    numbers = ("rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor", "logit_scale")
    for key in numbers:
        for real in (0.0, -1.0, 1e38, float("nan"), float("inf")):
            yield f"{key} = {real}", partial(base.set, f"llama.{key}", real)
    for scaling in ("fractal", "", "yarn", "longrope"):
        yield f"rope.scaling.type = {scaling}", partial(base.set, "llama.rope.scaling.type", scaling)
    for key, value in (
        ("expert_used_count", 5), ("expert_used_count", 0), ("expert_count", 0), ("expert_group_count", 3),
        ("expert_group_count", 4), ("expert_group_used_count", 9), ("expert_feed_forward_length", 0),
        ("expert_gating_func", 99), ("expert_weights_scale", 0), ("leading_dense_block_count", 9),
    ):  # fmt: skip
        yield f"experts: {key} = {value}", partial(experts.set, f"qwen3moe.{key}", value)
    yield "alignment = 3", partial(base.set, "general.alignment", 3)
    yield "split.count = 9", partial(base.set, "split.count", 9)
    yield "split.count = 2, its own part", partial(base.set("split.count", 2).set, "split.no", 0)
    yield "no architecture", partial(base.set, "general.architecture", None)
    yield "an architecture of control characters", partial(base.renamed, "\x1b[2J")


def _tokenizers(base: Crafted, _biased: Crafted, _experts: Crafted) -> _Makers:
    """Yield vocabularies with missing, repeated or contradicting entries."""
    for model in ("rwkv", "llama", "bert", "t5", "plamo2", "gemma4", "none", "test", "hybriddna", "whitespace", "?"):
        name = f"tokenizer.ggml.model = {model}"
        yield name, partial(base.set, "tokenizer.ggml.model", model)
    for pre in ("", "nothing", "llama-bpe", "tekken", "kimi-k2", "gpt-4o"):
        yield f"tokenizer.ggml.pre = {pre!r}", partial(base.set, "tokenizer.ggml.pre", pre)
    for key in ("bos", "eos", "eot", "unknown", "padding", "mask"):
        for number in (-1, -2, 400, 2**31 - 1):
            full = f"tokenizer.ggml.{key}_token_id"
            yield f"{full} = {number}", partial(base.set, full, number, _I32)
    arrays: tuple[tuple[str, object, int | None], ...] = (
        ("tokens", [], None), ("tokens", ["a"], None), ("tokens", ["a"] * 400, None), ("tokens", [""] * 400, None),
        ("tokens", [1] * 400, _I32), ("tokens", 7, None), ("tokens", [b"a\0%d" % i for i in range(400)], None),
        ("tokens", [b"\xff\xfe" * 9 + b"%d" % i for i in range(400)], None),
        ("tokens", ["x" * 9_999 + str(i) for i in range(400)], None),
        ("token_type", [], _I32), ("token_type", [1], _I32), ("token_type", [99] * 400, _I32),
        ("token_type", [6] * 400, _I32), ("token_type", ["x"] * 400, None), ("token_type", True, None),
        ("token_type", [True] * 400, _BOOL), ("scores", [1.0], _F32), ("scores", ["x"] * 400, None),
        ("scores", [float("nan")] * 400, _F32), ("scores", [True] * 400, _BOOL), ("merges", [], None),
        ("merges", [""] * 9, None), ("merges", ["no-space"] * 9, None), ("merges", [" ", "  ", "a "], None),
        ("merges", [1, 2], _I32), ("merges", "x", None), ("merges", [b"\xff \xfe"], None), ("merges", None, None),
        ("merges", ["a" * 70_000 + " b"], None),
    )  # fmt: skip
    for at, (key, value, kind) in enumerate(arrays):
        full = f"tokenizer.ggml.{key}"
        yield f"{full}, {at}", partial(base.set, full, value, kind)
    charsmap = b"\x09\0\0\0" + struct.pack("<IQ", 0, 64)
    for fill in (0, 1, 255):
        data = charsmap + struct.pack("<I", 40) + bytes([fill]) * 60
        yield (
            f"precompiled_charsmap of {fill}",
            partial(base.set("tokenizer.ggml.model", "t5").set, "tokenizer.ggml.precompiled_charsmap", data),
        )
    for name, template in (
        ("endless", "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"),
        ("nested", "{{ " + "(" * 3_000 + ")" * 3_000 + " }}"), ("attributes", "{{ ''.__class__.__mro__ }}"),
        ("empty", ""), ("no text", "{{ 1/0 }}"), ("control", "\x1b]0;x\x07{{ messages }}"),
    ):  # fmt: skip
        key = "tokenizer.chat_template"
        yield f"chat template, {name}", partial(base.set, key, template)
    yield "chat template, a number", partial(base.set, "tokenizer.chat_template", 7)


def _tensors(base: Crafted, _biased: Crafted, experts: Crafted) -> _Makers:
    """Yield tensors that are missing, too many, or of another shape."""
    for name in list(base.tensors)[:12]:
        yield f"no {name}", partial(base.put, name, None)
        yield f"{name} of one row", partial(base.put, name, made((256,), "F32"))
        yield (
            f"{name} transposed",
            partial(base.put, name, replace(base.tensors[name], shape=base.tensors[name].shape[::-1])),
        )
        yield (
            f"{name} of four dimensions",
            partial(base.put, name, replace(base.tensors[name], shape=(*base.tensors[name].shape, 1, 1, 1)[:4])),
        )
    yield "no tensors", partial(replace, base, tensors={})
    yield "a layer too many", partial(base.set, "llama.block_count", 3)
    yield "an unknown tensor", partial(base.put, "x.y.z", made((7, 3), "F32"))
    yield "a layer of number 2^32", partial(base.put, f"blk.{2**32}.attn_q.weight", made((256, 256), "F32"))
    yield "a negative layer", partial(base.put, "blk.-1.attn_q.weight", made((256, 256), "F32"))
    yield "a router for three of four", partial(experts.put, "blk.0.ffn_gate_inp.weight", made((256, 3), "F32"))
    for fill in (0x7F, 0xFF, 0x80):
        filled = {name: replace(t, data=bytes([fill]) * len(t.data)) for name, t in base.tensors.items()}
        yield f"weights of bytes {fill:x}", partial(replace, base, tensors=filled)
    yield "rope factors of zero", partial(base.put, "rope_freqs.weight", made((32,), "F32"))
    yield "too few rope factors", partial(base.put, "rope_freqs.weight", made((3,), "F32", 63))


def _families(base: Crafted, _biased: Crafted, experts: Crafted) -> _Makers:
    """Yield the same layers under the name of another family, whose graph needs other tensors."""
    families = (
        "llama4", "gemma", "gemma2", "gemma3", "gemma3n", "phi2", "phi3", "qwen", "qwen2vl", "qwen3", "qwen3next",
        "qwen35", "mamba", "mamba2", "rwkv6", "rwkv7", "falcon", "falcon-h1", "bloom", "mpt", "starcoder2", "gptneox",
        "deepseek2", "command-r", "cohere2", "olmo2", "granite", "granitehybrid", "nemotron_h", "jamba", "lfm2",
        "smollm3", "minicpm3", "glm4", "exaone4", "openelm", "chatglm", "bitnet", "t5", "bert", "clip", "dream",
        "mistral3", "grok", "dbrx", "arctic", "plamo2", "hunyuan-dense", "ernie4_5", "gpt-oss", "wavtokenizer-dec",
    )  # fmt: skip
    for arch in families:
        yield f"the family {arch}", partial(base.renamed, arch)
    for arch, key in (
        ("llama4", "interleave_moe_layer_step"), ("qwen3next", "full_attention_interval"), ("jamba", "ssm.state_size"),
        ("qwen35", "full_attention_interval"), ("cohere2", "attention.sliding_window"),
        ("gemma3", "attention.sliding_window"),
    ):  # fmt: skip
        yield f"the family {arch}, {key} = 0", partial(base.renamed(arch).set, f"{arch}.{key}", 0)
    for arch in ("llama", "qwen2moe", "mixtral", "deepseek2", "llama4", "granitemoe", "olmoe", "glm4moe", "dots1"):
        yield f"experts in the family {arch}", partial(experts.renamed, arch)
