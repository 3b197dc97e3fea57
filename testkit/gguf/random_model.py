"""Write a GGUF of a real model's shape with random weights.

The arithmetic of a forward pass does not depend on the values of the weights, so such a file takes as long as the real
model; its text is noise. Nothing is downloaded. The vocabulary is made here, in the real size: byte-level BPE with a
chain of merges, control tokens and a chat template, so that the file also tokenises, takes a conversation and ends a
turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint8] | npt.NDArray[np.float32] | npt.NDArray[np.float16]

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that determine the arithmetic of a model.

    `bias` is on query, key and value; `tied` means that the LM head is the embedding; `n_expert` is the number of
    feed-forward parts of size `n_ff` in each layer, of which two are used, and 0 in a dense model.
    """

    arch: str
    n_vocab: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_ctx: int
    rope_base: float = 10_000.0
    bias: bool = False
    tied: bool = True
    n_expert: int = 0


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 151_936, 24, 896, 14, 2, 4_864, 32_768, 1e6, bias=True),
    "qwen2.5-1.5b": Shape("qwen2", 151_936, 28, 1_536, 12, 2, 8_960, 32_768, 1e6, bias=True),
    "qwen2.5-3b": Shape("qwen2", 151_936, 36, 2_048, 16, 2, 11_008, 32_768, 1e6, bias=True),
    "qwen2.5-7b": Shape("qwen2", 152_064, 28, 3_584, 28, 4, 18_944, 32_768, 1e6, bias=True, tied=False),
    "llama-3.2-1b": Shape("llama", 128_256, 16, 2_048, 32, 8, 8_192, 131_072, 5e5),
    "tiny-draft": Shape("llama", 4_096, 8, 64, 4, 2, 192, 1_024),
    "tiny-verifier": Shape("llama", 4_096, 12, 192, 6, 2, 512, 1_024),
}
TYPES = {
    "F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16, "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}  # fmt: skip
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7}


def byte_alphabet() -> list[str]:
    """Return the stand-in of each byte in byte-level BPE: itself if printable, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(stand_in)) for b in range(256)]


def words(alphabet: list[str]) -> Iterator[tuple[str, str]]:
    """Return merges (left, right), shorter tokens first, so that every left part is a token already."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    level = [alphabet[ord(" ")], *letters]
    while True:
        following = []
        for left in level:
            for right in letters:
                yield left, right
                following.append(left + right)
        level = following


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Return tokens, their kinds and the merges: 256 bytes, merged words, the control tokens last."""
    alphabet = byte_alphabet()
    n_words = size - len(alphabet) - len(CONTROL)
    if n_words < 0:
        raise SystemExit(f"A vocabulary of {size} is too small; {len(alphabet) + len(CONTROL)} is the least.")
    merges = [pair for pair, _ in zip(words(alphabet), range(n_words), strict=False)]
    tokens = [*alphabet, *(left + right for left, right in merges), *CONTROL]
    kinds = [int(gguf.TokenType.NORMAL)] * (size - len(CONTROL)) + [int(gguf.TokenType.CONTROL)] * len(CONTROL)
    return tokens, kinds, [f"{left} {right}" for left, right in merges]


def random_matrix(rng: np.random.Generator, rows: int, cols: int, kind: str, sigma: float) -> Array:
    """Return (rows, cols) weights of standard deviation `sigma` as in the file: quantised rows are bytes."""
    if kind in ("F32", "F16"):
        weights = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(sigma)
        return weights if kind == "F32" else weights.astype(np.float16)
    payload, spread = {"Q8_0": (32, 73.9), "Q4_0": (16, 4.32)}[kind]  # standard deviation of the uniform levels
    blocks = rng.integers(0, 256, (rows, cols // 32, 2 + payload), dtype=np.uint8)
    if kind == "Q4_0":  # levels of -8 would give all weights a mean, and every text one token
        blocks |= ((blocks & 0x0F) == 0) * np.uint8(0x08) | ((blocks & 0xF0) == 0) * np.uint8(0x80)
    blocks[:, :, :2] = np.frombuffer(np.float16(sigma / spread).tobytes(), dtype=np.uint8)
    return blocks.reshape(rows, -1)


def tensors(shape: Shape, kind: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Return name, shape (rows first) and type of every tensor."""
    d, kv = shape.n_embd, shape.n_embd // shape.n_head * shape.n_head_kv
    # a tied head is kept at 8 bits in a 4-bit file, as llama.cpp's own quantiser does for rows of 896
    yield "token_embd.weight", (shape.n_vocab, d), "Q8_0" if kind == "Q4_0" else kind
    for i in range(shape.n_layer):
        yield f"blk.{i}.attn_norm.weight", (d,), "F32"
        for part, rows in (("q", d), ("k", kv), ("v", kv)):
            yield f"blk.{i}.attn_{part}.weight", (rows, d), kind
            if shape.bias:
                yield f"blk.{i}.attn_{part}.bias", (rows,), "F32"
        if shape.arch.startswith("qwen3"):
            for part in ("q", "k"):
                yield f"blk.{i}.attn_{part}_norm.weight", (d // shape.n_head,), "F32"
        yield f"blk.{i}.attn_output.weight", (d, d), kind
        yield f"blk.{i}.ffn_norm.weight", (d,), "F32"
        several, name = ((shape.n_expert,), "_exps") if shape.n_expert else ((), "")
        if shape.n_expert:
            yield f"blk.{i}.ffn_gate_inp.weight", (shape.n_expert, d), "F32"
        yield f"blk.{i}.ffn_gate{name}.weight", (*several, shape.n_ff, d), kind
        yield f"blk.{i}.ffn_up{name}.weight", (*several, shape.n_ff, d), kind
        yield f"blk.{i}.ffn_down{name}.weight", (*several, d, shape.n_ff), kind
    yield "output_norm.weight", (d,), "F32"
    if not shape.tied:
        yield "output.weight", (shape.n_vocab, d), "Q8_0" if kind == "Q4_0" else kind


def write(
    path: Path,
    shape: Shape,
    kind: str = "Q8_0",
    seed: int = 0,
    chat_template: str = CHAT_TEMPLATE,
    pre_tokenizer: str = "qwen2",
    sharpness: float = 1.0,
) -> None:
    """Write the file tensor by tensor, so that memory holds one at a time. `pre_tokenizer` is a name of llama.cpp's.

    Greedy text runs into a loop; at a `sharpness` of 3, a factor of the queries and keys, it hardly repeats anything.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"random {path.stem}")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_float32("general.sampling.temp", 0.0)  # the same text every time
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.n_vocab)
    tokens, kinds, merges = vocabulary(shape.n_vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(CONTROL[0]))
    writer.add_eos_token_id(tokens.index(CONTROL[2]))
    writer.add_add_bos_token(False)
    if chat_template:
        writer.add_chat_template(chat_template)
    plan = list(tensors(shape, kind))
    for name, dims, t in plan:
        block, size = gguf.GGML_QUANT_SIZES[TYPES[t]]
        nbytes = int(np.prod(dims)) // block * size
        dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(t, np.uint8))
        stored = dims if t in ("F32", "F16") else (*dims[:-1], dims[-1] // block * size)
        writer.add_tensor_info(name, stored, dtype, nbytes, raw_dtype=TYPES[t])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, dims, t in plan:
        if len(dims) > 1:
            factor = sharpness if name.endswith(("attn_q.weight", "attn_k.weight")) else 1.0
            if name == "token_embd.weight" and sharpness > 1.0:  # else a tied head repeats the token that it reads
                factor = 0.02
            data = random_matrix(rng, int(np.prod(dims[:-1])), dims[-1], t, sigma=factor * dims[-1] ** -0.5)
        elif name.endswith(".bias"):
            data = rng.standard_normal(dims, dtype=np.float32) * np.float32(0.1)
        else:
            data = np.ones(dims, dtype=np.float32)
        writer.write_tensor_data(data)
    writer.close()
