"""A proof that a server's token ids mean the same there: the server is asked for the text of random ids.

A server shows no list of its tokens, so the proof is by samples: of all tokens in a small vocabulary, of thousands in a
large one, and of every token that a conversation needs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgellm.engine import Vocabulary
from edgellm.errors import VocabularyMismatch
from edgellm.upstream.http_client import ServerURL
from edgellm.upstream.rows import Upstream
from edgellm.upstream.text_border import TextBorders

PROBES = 200
RECHECKS = 4
"""Probes of a server that was proved before: another model may have taken its place."""
_TOKENS = 32  # tokens of a probe
_OTHER = (
    "Choose a draft model with the server's tokenizer (-m). With a verifier on this device the tokenizers may differ."
)


@dataclass(frozen=True, slots=True)
class VocabularyProof:
    """A proof of a server's vocabulary: `probes` texts of `tokens` tokens were equal; 0 if the server decodes none."""

    probes: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        if not self.probes:
            return "the server decodes no token ids, so its vocabulary is not proved to be the draft model's"
        return f"{self.tokens:,} tokens in {self.probes} texts mean the same there as here"


async def prove(
    upstream: Upstream, vocabulary: Vocabulary, borders: TextBorders, url: ServerURL, most: int = PROBES
) -> VocabularyProof:
    """Compare up to `most` texts of tokens with a server's; `borders` are those of texts in `vocabulary`.

    Raises:
        VocabularyMismatch: a text differs; names the first such token.
        VerifierLost, VerifierBusy: as `Upstream.rows`.
    """
    probes = tokens = 0
    for ids in texts(vocabulary, most):
        text = _text(vocabulary, ids)
        if upstream.by_text:
            if not await _divides_alike(upstream, borders, url, text):
                return VocabularyProof()
        else:
            if (theirs := await upstream.detokenize(ids)) is None:
                return VocabularyProof()
            if not _same(text, theirs):
                await _differ(upstream, vocabulary, url, ids)
        probes, tokens = probes + 1, tokens + len(ids)
    return VocabularyProof(probes, tokens)


def texts(vocabulary: Vocabulary, most: int) -> Iterator[list[int]]:
    """Yield the ids of up to `most` texts, the tokens that conversations need first: only tokens of whole characters,
    each at most once."""
    whole = [token for token, piece in enumerate(vocabulary.pieces) if piece and _is_text(piece)]
    first = [token for token in whole if token in vocabulary.required]
    if first:
        yield first[: 8 * _TOKENS]
    others = [token for token in whole if token not in vocabulary.required and vocabulary.conflicts(token, None)]
    random.Random(vocabulary.fingerprint).shuffle(others)
    left = most - bool(first)
    for start in range(0, min(len(others), left * _TOKENS), _TOKENS):
        yield others[start : start + _TOKENS]


async def _divides_alike(upstream: Upstream, borders: TextBorders, url: ServerURL, text: str) -> bool:
    """Return whether a server reports a text's tokens. Raise VocabularyMismatch if these differ."""
    if (theirs := await upstream.tokenize(text)) is None:
        return False
    ours = borders.ids(text)
    if list(theirs) != ours:
        at = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise VocabularyMismatch(
            f"The vocabulary here and that of {upstream.name} at {url} differ: {text[:40]!r} has the tokens"
            f" {ours[at : at + 3]} here and {list(theirs)[at : at + 3]} there, from place {at} on.",
            _OTHER,
        )
    return True


async def _differ(upstream: Upstream, vocabulary: Vocabulary, url: ServerURL, ids: Sequence[int]) -> None:
    """Raise VocabularyMismatch for the first token of a text that differs alone, if any."""
    for token in ids:
        ours, theirs = _text(vocabulary, [token]), await upstream.detokenize([token])
        if theirs is not None and not _same(ours, theirs):
            raise VocabularyMismatch(
                f"The vocabulary here and that of {upstream.name} at {url} differ: token {token} is"
                f" {ours[:40]!r} here and {theirs[:40]!r} there.",
                _OTHER,
            )


def _text(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    return b"".join(vocabulary.pieces[token] for token in ids).decode()


def _same(ours: str, theirs: str) -> bool:
    """Return whether two texts are equal. Some tokenizers drop blanks before punctuation and at the beginning."""
    return ours == theirs or ours.replace(" ", "") == theirs.replace(" ", "")


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
