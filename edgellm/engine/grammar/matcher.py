"""The grammar of one reply: which tokens may come next, by llguidance.

llguidance meets a hostile schema with an error instead of an exception: a matcher that reaches one of its limits is in
error from then on. The limits keep a mask below some milliseconds, and a grammar below some tens of megabytes.
"""

import json
import re
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from edgellm.engine.grammar.json_schema import prepared, refused
from edgellm.engine.vocabulary import Ids, Vocabulary, common_prefix
from edgellm.errors import EngineFailed, InvalidOption

Mask: TypeAlias = npt.NDArray[np.bool_]
"""True for each token that may come next, (n_vocab,)."""

_LIMITS = LLParserLimits(
    max_items_in_row=4000,  # parses of the text so far: an optional property has four
    initial_lexer_fuel=500_000,  # 10 ms
    step_lexer_fuel=50_000,  # 4 ms a mask
    step_max_items=20_000,
    max_lexer_states=10_000,  # each takes 1 to 2 kB
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,  # a message would hold the schema
)
_GRAMMAR = '%llguidance {{"no_forcing": true}}\nstart: %json {}'
"""A grammar without forcing: a mask restricts the text, and not its division into tokens."""
_COMPACT = {"x-guidance": {"whitespace_flexible": False, "json_allowed_escapes": 'bfnrt"\\'}}
"""Options against blanks, and against escapes by number, which could be half a character."""
_MOST_MASKS = 257  # masks kept of a text, a bit a token: a chunk's and the next token's


class Grammar:
    """The grammar of one reply, with its state behind the text that was asked about last. For one thread at a time."""

    def __init__(self, vocabulary: Vocabulary, ends: tuple[int, ...], schema: str) -> None:
        """Compile a JSON `schema` for the tokens of `vocabulary`, of which `ends` end a reply. Raises InvalidOption: it
        is no JSON schema, too large or ambiguous, or has a keyword that is not kept."""
        self._end = np.zeros(vocabulary.size, dtype=np.bool_)
        self._end[list(ends)] = True
        grammar = _GRAMMAR.format(json.dumps(prepared(schema) | _COMPACT))
        self._matcher = LLMatcher(_tokenizer(vocabulary, ends), grammar, log_level=0, limits=_LIMITS)
        if self._matcher.is_error():
            raise refused(_said(self._matcher.get_error()), "Leave that out, or say it in another way.")
        self._ids = np.empty(0, dtype=np.int32)  # the text whose masks are known
        self._masks: dict[int, bytes] = {}  # keys: the number of tokens before the mask
        self._at = 0  # tokens of the text that the matcher has taken
        try:
            self.mask(self._ids)
        except InvalidOption as error:
            raise refused(f"no value is valid by it, or it is too ambiguous ({error.what})", "Simplify it.") from None

    def mask(self, text: Ids) -> Mask:
        """Return which tokens may follow the reply's `text` (n,), which follows the grammar itself. Raises
        EngineFailed: the text breaks the grammar; InvalidOption: the grammar is too ambiguous there."""
        if len(text) and self._end[text[-1]]:  # the matcher is not told of these
            if not self.mask(text[:-1])[text[-1]]:
                raise _broken(int(text[-1]))
            return self._end
        if (bits := self._known(text)) is None:
            self._advance(text)
            bits = self._matcher.compute_bitmask()
            self._check()
            if len(self._masks) >= _MOST_MASKS:
                del self._masks[next(iter(self._masks))]
            self._masks[len(text)] = bits
        return np.unpackbits(np.frombuffer(bits, np.uint8), count=len(self._end), bitorder="little").view(np.bool_)

    def forced(self, text: Ids) -> bytes:
        """Return the only bytes that may follow the reply's `text` (n,); none where there is a choice. Raises as
        `mask`."""
        if len(text) and self._end[text[-1]]:
            return b""
        self.mask(text)
        self._advance(text)
        found: bytes = self._matcher.compute_ff_bytes()
        self._check()
        return found

    def _known(self, text: Ids) -> bytes | None:
        """Return the mask behind `text` if it is known; otherwise forget the masks of another text."""
        self._check()
        same = common_prefix(text, self._ids)
        if same < len(text):
            self._ids = text
            self._masks = {place: bits for place, bits in self._masks.items() if place <= same}
            self._back_to(same)
        return self._masks.get(len(text))

    def _advance(self, text: Ids) -> None:
        """Move the matcher to the end of `text`, which begins with the text that the matcher has taken."""
        self._back_to(len(text))
        self._at += self._matcher.try_consume_tokens(text[self._at :].tolist())
        self._check()
        if self._at < len(text):
            self._ids = text[: self._at]
            raise _broken(int(text[self._at]))

    def _back_to(self, place: int) -> None:
        if self._at > place:
            self._matcher.rollback(self._at - place)
            self._at = place

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidOption(
                f"The JSON schema is too ambiguous to follow: {_said(self._matcher.get_error())}.", "Simplify it."
            )


def _broken(token: int) -> EngineFailed:
    return EngineFailed(f"Token {token} of a reply breaks its grammar.", "Report this.")


def _said(message: str) -> str:
    """Return llguidance's message without its state, in words for the author of the schema."""
    text = message.rsplit("failed to compile JSON schema: ", maxsplit=1)[-1]
    if found := re.search(r"regex parse error:.*\nerror: ([^\n]*)", text, re.DOTALL):
        return f"a pattern cannot be read, as {found[1]}"
    if text.startswith("oneOf constraints"):
        return "what is valid by one schema of a oneOf may be valid by another one of them, too"
    if found := re.match(r"Unimplemented keys: \[(.*?)\]", text):
        return f"the keyword {found[1]} is not supported"
    return text.split("\n")[0][:200].rstrip(". :")


@lru_cache(maxsize=2)  # a pair's vocabularies, mostly one: 7 MB for 49,000 tokens, 50 MB for 152,000
def _tokenizer(vocabulary: Vocabulary, ends: tuple[int, ...]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary, ends[0])), eos_token=list(ends), slices=[])


class _Tokens:
    """A vocabulary as llguidance reads it. Texts are never split into tokens, as nothing is forced."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, end: int) -> None:
        self.eos_token_id = end
        self.tokens = vocabulary.pieces
        self.special_token_ids = vocabulary.markup()

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError
