"""Text to tokens, so that no text kills the process, or keeps it busy for long without a way to stop.

Short texts go straight to llama.cpp. Longer ones are cut where the ids stay the same, and parts that cannot be cut go
to a process of their own. The ids are always llama.cpp's own.

llama.cpp runs most pre-tokenizers through a recursive `std::regex`: a match of some 26,000 characters overflows a stack
of 8 MiB and kills the process. Its search for special tokens takes quadratic time in their number. A short slice has
neither problem, and between slices the tokenising can be stopped.

Two kinds of places are safe. No pre-tokenizer below matches a letter together with the white space after it, or a
Chinese character together with the comma or full stop after it: a match always ends there, and none looks back. And a
special token is found wherever it stands, unless it could overlap another special token.
"""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.engine import native
from edgellm.engine.native import ShouldStop, lib, never
from edgellm.engine.tokenizing.processes import TokenizerProcesses
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EngineFailed, ModelUnsupported, PromptTooLong, Stopped

DEPTH = 1_000
"""Characters between safe places for a recursive pre-tokenizer: each takes 316 bytes of a stack of maybe 512 KiB."""
SLICE = 8_192
"""Least characters of a slice, in any process: shorter slices only add calls of some milliseconds each."""
FLAT = 32_768
"""Characters between safe places for a pre-tokenizer without recursion."""
LONGEST = 256  # characters of a special token: none is longer in any known vocabulary
MOST = 20_000  # special tokens: the largest vocabularies have some 6,000
_SCAN = 65_536  # characters searched at once: a search holds Python's lock

# Pre-tokenizers (`tokenizer.ggml.pre`) whose expressions llama.cpp implements by hand, or whose matches are short.
_LIST = """
    llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe glm4 glm5
    gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum
    modern-bert mpt olmo jais trillion granite-docling exaone4 starcoder refact command-r smollm codeshell exaone
    minerva-7b mellum2 qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 hunyuan solar-open megrez grok-2 kimi-k2
    laguna gemma4 granite-embed-multi-311m sarvam-moe
"""
_FLAT = frozenset(_LIST.split())
# Pre-tokenizers that leave words together: a letter and the space after it may be in one match, or in no match at all.
_JOINING = frozenset(("exaone-moe", "superbpe", "whitespace", "gemma4", "granite-embed-multi-311m", "sarvam-moe"))
_FATAL = frozenset(("whitespace",))  # llama.cpp aborts at the first space

_WORD_END = r"(?<=[A-Za-z])(?=[ \n])|(?<=[\u4e00-\u9fa5])(?=[\uff0c\u3002\u3001])"
_ACROSS = re.compile(r"[A-Za-z][ \n]|[\u4e00-\u9fa5][\uff0c\u3002\u3001]")


@dataclass(frozen=True, slots=True)
class Special:
    """The text of a token that llama.cpp looks for first. `control`: only where control tokens are parsed."""

    text: str
    control: bool


@dataclass(frozen=True, slots=True)
class TextSlice:
    """A part of a text. `bounded`: llama.cpp tokenises it in this process, on any thread, in a few milliseconds."""

    text: str
    bounded: bool


class Slicer:
    """A cutter of texts for one vocabulary."""

    def __init__(self, model: str, pre: str, specials: Callable[[], Sequence[Special] | None]) -> None:
        """Set up; `model` and `pre` are the file's `tokenizer.ggml.model` and `.pre`. `specials` is called when a text
        is cut; it returns None where a special token takes adjacent white space along."""
        bpe = model == "gpt2"
        self._flat = model in ("llama", "gemma4") or (bpe and pre in _FLAT)
        self._words = bpe and pre not in _JOINING
        self._known = bpe or model in ("llama", "gemma4")
        self._specials = specials
        self._patterns: dict[bool, re.Pattern[str] | None] = {}
        self.whole = 0 if pre in _FATAL or not (self._known or self._flat) else SLICE if self._flat else DEPTH
        """Characters of the longest text that need not be cut."""

    def slices(self, text: str, special: bool) -> Iterator[TextSlice]:
        """Yield the parts of `text`, in order. `special`: control tokens in it are meant as such."""
        pattern = self._pattern(special)
        gap = FLAT if self._flat else self.whole
        start = safe = 0
        while len(text) - safe > gap:
            far = safe + gap
            cut = _find(pattern, text, safe + 1 + gap // 2, far) or _find(pattern, text, safe + 1, far)
            if cut is None:
                if start < safe:
                    yield TextSlice(text[start:safe], bounded=True)
                cut = _find(pattern, text, max(far, safe + SLICE), len(text)) or len(text)
                yield TextSlice(text[safe:cut], bounded=False)
                start = cut
            elif cut - start >= SLICE:  # not shorter, since each call prepares the regular expressions again
                yield TextSlice(text[start:cut], bounded=True)
                start = cut
            safe = cut
        if start < len(text):
            yield TextSlice(text[start:], bounded=True)

    def _pattern(self, special: bool) -> re.Pattern[str] | None:
        """Return an expression of safe places, None if there are none."""
        if special in self._patterns:
            return self._patterns[special]
        found, parts = self._specials() if self._known else None, []
        if found is not None and len(found) <= MOST and all(len(one.text) <= LONGEST for one in found):
            texts = {one.text for one in found if special or not one.control}
            if self._words and not any(_ACROSS.search(text) for text in texts):
                parts.append(_WORD_END)
            if alone := apart(texts):
                parts.append(f"(?={any_of(alone)})")
        self._patterns[special] = re.compile("|".join(parts)) if parts else None
        return self._patterns[special]


def apart(texts: Iterable[str]) -> set[str]:
    """Return the texts whose occurrences cannot overlap an occurrence of any of `texts`."""
    every, found = set(texts), set[str]()
    begins, ends = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)  # texts with this beginning, end
    for text in every:
        for length in range(1, len(text)):
            begins[text[:length]].add(text)
            ends[text[-length:]].add(text)
        for start, end in combinations(range(len(text) + 1), 2):
            if (part := text[start:end]) in every and part != text:
                found |= {part, text}
    for part in begins.keys() & ends.keys():
        found |= begins[part] | ends[part]
    return every - found


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression for any of `texts` that reads each character once: common beginnings are shared."""
    by_first = defaultdict[str, list[str]](list)
    for text in sorted(texts):
        by_first[text[:1]].append(text[1:])
    if "" in by_first:  # one of the texts ends here, and the shortest match is enough
        return ""
    parts = [re.escape(first) + any_of(rests) for first, rests in by_first.items()]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _find(pattern: re.Pattern[str] | None, text: str, start: int, end: int) -> int | None:
    """Return the first safe place from `start` on and before `end`."""
    while pattern is not None and start < end:
        stop = min(start + _SCAN, end)
        match = pattern.search(text, start, stop + LONGEST)
        if match is not None and match.start() < stop:
            return match.start()
        start = stop
    return None


_LIKELY = 4  # characters per token in ordinary text: a text with more per allowed token may be too long
_UNKNOWN = 4  # bytes at most of an unknown character, which is one token
_TAKES_SPACE = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP
CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_SPACE = b" \t\n\v\f\r"
_ESCAPED_SPACE = "\u2581".encode()  # stands for a space in some vocabularies, and may occur in a text itself
_INT, _POINTER, _TEXT, _FLAG = ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
_tokenize = native.bind(lib.llama_tokenize, _INT, _POINTER, _TEXT, _INT, _POINTER, _INT, _FLAG, _FLAG)
attributes = native.bind_nonblocking(lib.llama_vocab_get_attr, ctypes.c_int, ctypes.c_void_p, ctypes.c_int32)
_text = native.bind_nonblocking(lib.llama_vocab_get_text, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32)


class VocabTokenizer:
    """The tokenizer of one loaded vocabulary."""

    def __init__(self, vocab: int, path: Path, name: str, kind: str, pre: str, pieces: Callable[[], Sequence[bytes]]):
        """Set up; `vocab` is llama.cpp's pointer, `path` its file and `name` the model's. `kind` and `pre` are the
        file's `tokenizer.ggml.model` and `tokenizer.ggml.pre`; `pieces` returns the bytes of every token."""
        self._vocab, self._name, self._pieces = vocab, name, pieces
        self._none = lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE
        self._exact = kind in ("gpt2", "llama")  # every byte of a text is in one of its tokens
        self._slicer = Slicer(kind, pre, partial(_specials, vocab))
        self._path = path

    def encode(
        self, text: str, *, special: bool = False, most: int | None = None, should_stop: ShouldStop = never
    ) -> Ids:
        """Return the ids of `text`, shape (n,), without BOS or EOS. `special`: control tokens in it are parsed as such.

        Raises:
            ModelUnsupported: the file contains no tokenizer.
            PromptTooLong: the text has more than `most` tokens; raised as soon as that is certain.
            TextRefused: llama.cpp fails on the text, or takes too long over it.
            Stopped: `should_stop` returned True.
        """
        if self._none:
            raise ModelUnsupported(f"{self._name} contains no tokenizer.", "Use a whole model file.")
        if len(text) <= self._slicer.whole:
            return self._encode_in_process(text.encode("utf-8", "replace"), special)
        self.check_length(text, most)
        found: list[Ids] = []
        count = 0
        for part in self._slicer.slices(text, special):
            if should_stop():
                raise Stopped("Tokenising was cancelled.")
            data = part.text.encode("utf-8", "replace")
            if part.bounded:
                found.append(self._encode_in_process(data, special))
            else:
                found.append(self._processes.tokenize(data, special, should_stop))
            count += len(found[-1])
            if most is not None and count > most:
                raise _too_long(f"more than {most}", most)
        return np.concatenate(found) if len(found) > 1 else found[0]

    def check_length(self, text: str, most: int | None) -> None:
        """Raise PromptTooLong where `text` certainly has more than `most` tokens, without tokenising it."""
        if most is None or not self._exact or len(text) <= max(_LIKELY * most, self._slicer.whole):
            return  # the text may fit, or tokenising takes no time
        data = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
        fewest = int(np.bincount(data, minlength=256) @ self._shares)
        if fewest > most:
            raise _too_long(f"at least {fewest}", most)

    def close(self) -> None:
        """End the processes; not to be called while a text is being tokenised."""
        if "_processes" in vars(self):
            self._processes.close()

    @cached_property
    def _processes(self) -> TokenizerProcesses:
        return TokenizerProcesses(self._path, lib.llama_vocab_n_tokens(self._vocab))

    def _encode_in_process(self, data: bytes, special: bool) -> Ids:
        capacity = len(data) + 16
        while True:
            ids = np.empty(capacity, dtype=np.int32)
            n = _tokenize(self._vocab, data, len(data), ids.ctypes.data, capacity, False, special)
            if n >= 0:
                return ids[:n].copy()
            if -n <= capacity:
                raise EngineFailed(f"llama.cpp cannot tokenise {len(data)} bytes of text.", "Shorten the text.")
            capacity = -n

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        """The least share of a token that each byte value takes up, shape (256,).

        A byte is 1/n of a token where no token that holds it has more than n bytes, so the shares of a token's bytes
        add up to 1 at most. A byte that may vanish counts as 0: no token is that byte alone, or a special token takes
        it along.
        """
        shares, waiting = np.zeros(256), set(range(256))
        pieces = sorted(self._pieces(), key=len, reverse=True)
        for piece in pieces:
            if new := waiting.intersection(piece):
                shares[list(new)] = 1.0 / max(_UNKNOWN, len(piece))
                waiting -= new
        vanishing = set(range(256)) - {piece[0] for piece in pieces if len(piece) == 1} | set(_ESCAPED_SPACE)
        shares[list(vanishing | (set(_SPACE) if _specials(self._vocab) is None else set()))] = 0.0
        return shares


def _specials(vocab: int) -> list[Special] | None:
    """Return the texts that llama.cpp looks for first; None where one of them takes adjacent white space along."""
    size = lib.llama_vocab_n_tokens(vocab)
    found = []
    for token, attribute in enumerate(map(attributes, repeat(vocab, size), range(size))):
        if attribute & _SPECIAL:
            if attribute & _TAKES_SPACE:
                return None
            try:
                found.append(Special(_text(vocab, token).decode(), bool(attribute & CONTROL)))
            except UnicodeDecodeError:
                return None
    return found


def _too_long(count: str, most: int) -> PromptTooLong:
    return PromptTooLong(
        f"The prompt has {count} tokens, and the context holds {most + 1} with the reply.",
        "Shorten the prompt, its context files or the history.",
    )
