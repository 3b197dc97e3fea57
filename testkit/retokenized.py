"""Copies of a model's file with another tokenizer, and the same weights in another order, as far as tokens remain."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np

from testkit.gguf.architectures import finish
from testkit.gguf.reader import read_gguf

UNUSED, NORMAL, CONTROL, BYTE = 5, 1, 3, 6
_MATRICES = ("token_embd.weight", "output.weight")
_IDS = re.compile(r"tokenizer\.ggml\.\w+_token_id")


@dataclass(frozen=True)
class Tokens:
    """A tokenizer as a GGUF file has it. `rows` are those of the original's matrices, -1 for a row of zeros."""

    texts: list[str]
    kinds: list[int]
    merges: list[str]
    rows: list[int]
    model: str = "gpt2"
    renamed: tuple[str, str] = ("", "")

    @property
    def size(self) -> int:
        return len(self.texts)

    def chosen(self, rows: Sequence[int]) -> "Tokens":
        """Return the tokens `rows`, in this order, with the merges that are still possible."""
        texts = [self.texts[row] for row in rows]
        known = set(texts)
        merges = [merge for merge in self.merges if {*merge.split(" "), merge.replace(" ", "")} <= known]
        return replace(self, texts=texts, kinds=[self.kinds[row] for row in rows], merges=merges, rows=list(rows))


def padded(tokens: Tokens, n: int, kind: int = UNUSED) -> Tokens:
    """Return `tokens` and `n` unused ones behind them."""
    texts = [*tokens.texts, *(f"[PAD{tokens.size + i}]" for i in range(n))]
    return replace(tokens, texts=texts, kinds=[*tokens.kinds, *[kind] * n], rows=[*tokens.rows, *[-1] * n])


def permuted(tokens: Tokens) -> Tokens:
    """Return the same tokens in another order, with other names of the control tokens."""
    made = tokens.chosen(np.random.default_rng(0).permutation(tokens.size).tolist())
    texts = [
        text.replace("<|", "[/") if kind == CONTROL else text for text, kind in zip(made.texts, made.kinds, strict=True)
    ]
    return replace(made, texts=texts, renamed=("<|", "[/"))


def shortened(tokens: Tokens, n: int) -> Tokens:
    """Return the first `n` tokens."""
    return tokens.chosen(range(n))


def other_merges(tokens: Tokens, every: int = 3) -> Tokens:
    """Return the tokens without one in `every` of those that come from a merge."""
    merged = {merge.replace(" ", "") for merge in tokens.merges[::every]}
    return tokens.chosen([i for i, text in enumerate(tokens.texts) if text not in merged])


def sentencepiece(tokens: Tokens) -> Tokens:
    """Return the tokens in the manner of SentencePiece: spaces are marked, and single bytes are tokens of their own."""
    decode = {char: byte for byte, char in gguf_bytes().items()}
    texts, kinds = [], []
    for text, kind in zip(tokens.texts, tokens.kinds, strict=True):
        data = b"" if kind == CONTROL else bytes(decode[char] for char in text)
        if kind == CONTROL or (len(data) == 1 and data != b" "):
            texts.append(text if kind == CONTROL else f"<0x{data[0]:02X}>")
            kinds.append(kind if kind == CONTROL else BYTE)
        else:
            texts.append(data.decode().replace(" ", "\u2581"))
            kinds.append(NORMAL)
    # every single byte must have a token of its own, and the space already has one
    rows = [*tokens.rows, -1]
    return replace(tokens, texts=[*texts, "<0x20>"], kinds=[*kinds, BYTE], merges=[], rows=rows, model="llama")


def _sentencepiece_permuted(tokens: Tokens) -> Tokens:
    return sentencepiece(permuted(tokens))


Change: TypeAlias = Callable[[Tokens], Tokens]
PAIRS: dict[str, tuple[Change | None, Change | None]] = {
    "a longer draft": (partial(padded, n=130), None),
    "a longer verifier": (None, partial(padded, n=130)),
    "other kinds of padding": (partial(padded, n=130, kind=4), partial(padded, n=3)),
    "other ids": (permuted, None),
    "other merges": (other_merges, None),
    "a SentencePiece draft": (_sentencepiece_permuted, None),
    "a SentencePiece verifier": (None, _sentencepiece_permuted),
    "few common tokens": (None, partial(shortened, n=1000)),
}
"""What becomes of the tokenizers of draft model and verifier; None leaves one as it is."""
ONE_TOKENIZER = 3
"""In so many of `PAIRS`, the first ones, both still have the same tokenizer."""


def gguf_bytes() -> dict[int, str]:
    """Return the character that byte-level BPE writes for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def write(source: Path, path: Path, change: Change) -> None:
    """Write a copy of `source` whose tokenizer is what `change` makes of its own."""
    reader = read_gguf(source)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    texts = fields["tokenizer.ggml.tokens"]
    tokens = change(
        Tokens(texts, fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.merges"], list(range(len(texts))))
    )
    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    for name, value in fields.items():
        _copy(writer, name, value, reader.fields[name], tokens)
    if tokens.model == "llama":
        writer.add_token_scores([-float(i) for i in range(tokens.size)])
    rows = np.array(tokens.rows)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in _MATRICES:
            data = np.where((rows >= 0)[:, None], data[np.maximum(rows, 0)], np.zeros(1, data.dtype))
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)


def _copy(writer: gguf.GGUFWriter, name: str, value: Any, field: gguf.ReaderField, tokens: Tokens) -> None:
    if name == "general.architecture":
        return
    if name == "tokenizer.ggml.tokens":
        writer.add_token_list(tokens.texts)
    elif name == "tokenizer.ggml.token_type":
        writer.add_token_types(tokens.kinds)
    elif name == "tokenizer.ggml.merges":
        if tokens.model == "gpt2":
            writer.add_token_merges(tokens.merges)
    elif name == "tokenizer.ggml.model":
        writer.add_tokenizer_model(tokens.model)
    elif name == "tokenizer.ggml.pre" and tokens.model == "llama":
        writer.add_tokenizer_pre("default")
    elif _IDS.fullmatch(name):
        writer.add_uint32(name, tokens.rows.index(value))
    elif name == "tokenizer.chat_template":
        writer.add_chat_template(value.replace(*tokens.renamed) if tokens.renamed[0] else value)
    elif name.endswith(".vocab_size"):
        writer.add_uint32(name, tokens.size)
    else:
        sub = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, value, field.types[0], sub)
