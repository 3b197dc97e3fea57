"""A proof that a server's token ids mean the same there: the server is asked for the text of random ids.

A server shows no list of its tokens, so the proof is by samples: of all tokens in a small vocabulary, of thousands in a
large one, and of every token that a conversation needs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgellm.engine import Model, Vocabulary
from edgellm.errors import VocabularyMismatch
from edgellm.upstream.dialects.served import Upstream
from edgellm.upstream.dialects.texts import TextBorders

PROBES = 200
RECHECKS = 4
"""Probes of a server that was proved before: another model may have taken its place."""
_TOKENS = 32  # tokens of a probe


@dataclass(frozen=True, slots=True)
class VocabularyProof:
    """A proof of a server's vocabulary: `probes` texts of `tokens` tokens were equal; 0 if the server decodes none.
    `sent`: it is the server's own tokenizer."""

    probes: int = 0
    tokens: int = 0
    sent: bool = False

    def __str__(self) -> str:
        if self.sent:
            return f"it sends its tokenizer of {self.tokens:,} tokens"
        if not self.probes:
            return "the server decodes no token ids, so its vocabulary is not proved to be the draft model's"
        return f"{self.tokens:,} tokens in {self.probes} texts mean the same there as here"


async def prove(upstream: Upstream, model: Model, most: int = PROBES) -> VocabularyProof:
    """Compare up to `most` texts of tokens in the vocabulary of `model` with a server's. Raises VocabularyMismatch: a
    text differs; names the first such token; VerifierLost, VerifierBusy: as `Upstream.rows`."""
    vocabulary, borders = model.vocabulary, TextBorders(model)
    probes = tokens = 0
    for ids in texts(vocabulary, most):
        text = _text(vocabulary, ids)
        if upstream.by_text:
            if (divided := await upstream.tokenize(text)) is None:
                return VocabularyProof()
            ours, theirs = borders.ids(text), list(divided)
            if ours != theirs:
                pairs = enumerate(zip(ours, theirs, strict=False))
                at = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
                here, there = ours[at : at + 3], theirs[at : at + 3]
                raise _mismatch(
                    upstream, f"{text[:40]!r} has the tokens {here} here and {there} there, from place {at} on"
                )
        else:
            if (written := await upstream.detokenize(ids)) is None:
                return VocabularyProof()
            if not _same(text, written):
                await _differ(upstream, vocabulary, ids)
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


async def _differ(upstream: Upstream, vocabulary: Vocabulary, ids: Sequence[int]) -> None:
    """Raise VocabularyMismatch for the first token of a text that differs alone, if any."""
    for token in ids:
        ours, theirs = _text(vocabulary, [token]), await upstream.detokenize([token])
        if theirs is not None and not _same(ours, theirs):
            raise _mismatch(upstream, f"token {token} is {ours[:40]!r} here and {theirs[:40]!r} there")


def _mismatch(upstream: Upstream, how: str) -> VocabularyMismatch:
    return VocabularyMismatch(
        f"The vocabulary here and that of {upstream.name} at {upstream.client.url} differ: {how}.",
        "Choose a draft model with the server's tokenizer (-m). With a verifier on this device the tokenizers may"
        " differ.",
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
