"""Drafts of a model with another tokenizer than the verifier's.

Token by token, after "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (TLI): the draft model draws only from tokens whose bytes are also one token of the verifier, by the
verifier's own arrival times (`spec.sampling.arrival_times`). As text (SLEM): the draft model writes with all of its
tokens, and the verifier's tokenizer cuts that text. Draws of different tokens would agree by chance alone, so this is
for greedy replies. Either way the text is the verifier's, at any temperature.

Where no verdict comes, because the verifier is lost or busy, the draft model writes with all of its tokens, also in
sampled replies, and the verifier's tokenizer cuts that text: what stands is the draft model's own.

The draft model reads the conversation in its own chat template, as it does not know the verifier's control tokens, and
then the bytes of the reply in its own tokens. How those are cut does not matter for the verified text, only for the
quality of the drafts.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from edgellm.engine import Context, Model
from edgellm.spec.drafters.model import ChunkBuilder, ModelDrafter
from edgellm.spec.protocols import GenerationState
from edgellm.spec.sampling import top2
from edgellm.spec.types import NO_CHUNK, Chunk, Floats, Ids, Penalties

LEAST_SHARE = 0.5
"""Below this share of common tokens, greedy drafts are translated as text."""
_BACK = 8  # most tokens to cut again when a text differs from the draft
_SPACES = (b" ", b"\n")
_LONE = re.compile("[\udc80-\udcff]+")  # bytes that are not UTF-8


class TextCutter:
    """A tokenizer of bytes from the middle of a text."""

    def __init__(self, model: Model) -> None:
        self._model = model
        # SentencePiece puts a space before each text.
        self._adds_space = model.detokenize(model.tokenize("a")) == b" a"
        written = model.vocabulary.written()
        self._bytes = {byte: token for byte in range(256) if (token := written.get(bytes([byte]))) is not None}

    def cut(self, text: bytes) -> list[int]:
        """Return the ids of `text`, which may begin and end within a word or a character. Bytes that are not UTF-8 are
        left out where the vocabulary has no tokens for them."""
        decoded, ids, at = text.decode("utf-8", "surrogateescape"), [], 0
        for lone in _LONE.finditer(decoded):
            ids += self._cut(decoded[at : lone.start()])
            ids += self._single(lone[0].encode("utf-8", "surrogateescape"))
            at = lone.end()
        return ids + self._cut(decoded[at:])

    def _cut(self, text: str) -> list[int]:
        if not self._adds_space:
            return self._model.tokenize(text).tolist() if text else []
        if text.startswith(" "):
            return self._model.tokenize(text[1:]).tolist() if len(text) > 1 else self._single(b" ")
        ids: list[int] = self._model.tokenize("\n" + text).tolist() if text else []
        held = 0
        for n, token in enumerate(ids, start=1):
            held += len(self._model.piece(token))
            if held >= 2:
                return ids[n:] if held == 2 else self._model.tokenize(text).tolist()
        return []

    def _single(self, text: bytes) -> list[int]:
        return [self._bytes[byte] for byte in text if byte in self._bytes]


class TokenTranslation:
    """The tokens that a draft model and a verifier have in common, and how drafts are translated."""

    def __init__(self, draft: Model, verifier: Model) -> None:
        """Compare the vocabularies: once, in some tenths of a second."""
        ours, theirs = draft.vocabulary.written(), verifier.vocabulary.written()
        common = {theirs[piece]: token for piece, token in ours.items() if piece in theirs}
        self.share = len(common) / max(1, len(ours))
        """The share of the draft model's tokens that are tokens of the verifier, too."""
        self.by_text = self.share < LEAST_SHARE
        """True if greedy drafts are translated as text."""
        self.end = verifier.end_of_turn
        """The verifier's token that ends a turn; the draft model's means the same."""
        if self.end is not None and draft.end_of_turn is not None:
            common[self.end] = draft.end_of_turn
        self.target: Ids = np.array(sorted(common), dtype=np.int32)
        """The verifier's ids of the common tokens, ascending."""
        self.source: Ids = np.array([common[token] for token in self.target.tolist()], dtype=np.int32)
        """The draft model's ids of the same tokens."""
        self.own = common.get
        """The function that returns the draft model's id of a verifier's token; None where they do not share it."""
        self._verifier_tokens = verifier.n_vocab
        self.ours, self.theirs = TextCutter(draft), TextCutter(verifier)
        self.piece = verifier.piece
        """The function that returns the bytes of a verifier's token."""
        self.reason = (
            f"{draft.name} and {verifier.name} have different tokenizers; {100 * self.share:.0f}% of the draft model's"
            " tokens are also tokens of the verifier, so drafts are translated "
            + ("as text in greedy replies, and token by token in sampled ones" if self.by_text else "token by token")
        )

    def widened(self, row: Floats) -> Floats:
        """Return the draft model's logits of the common tokens, in the verifier's ids; -inf for all others."""
        found = np.full(self._verifier_tokens, -np.inf, dtype=np.float32)
        found[self.target] = row[self.source]
        return found

    def own_penalties(self, penalties: Penalties | None, start: int) -> Penalties | None:
        """Return `penalties` for a text in the draft model's tokens whose reply begins at `start`, with the biases of
        common tokens."""
        if penalties is None:
            return None
        bias = tuple(sorted((own, each) for token, each in penalties.bias if (own := self.own(token)) is not None))
        return replace(penalties, bias=bias, start=start)


class _Own(NamedTuple):
    """A token of the draft model, and the bytes that it adds to the reply."""

    id: int
    piece: bytes


class TranslatedDrafter(ModelDrafter):
    """A drafter with a model of another tokenizer."""

    def __init__(self, model: Model, context: Context, translation: TokenTranslation) -> None:
        super().__init__(model, context)
        self._translation = translation
        self._forget()

    def _forget(self) -> None:
        self._text = bytearray()  # the reply so far
        self._read = 0  # the verifier's tokens in `_text`
        self._own: list[_Own] = []  # the reply in own tokens
        self._drafted: list[_Own] = []  # the last draft

    def begin(self, state: GenerationState) -> None:
        self._forget()
        super().begin(state)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk; an empty one without a prompt for the draft model, or without room for it."""
        prefix = self._prefix(state)
        gamma = self._room(prefix, gamma)
        if prefix is None or gamma < 1:
            return NO_CHUNK
        sampling, floors = replace(state.sampling, penalties=None), state.rules.floors()
        if sampling.greedy and self._translation.by_text:
            return self._by_text(ChunkBuilder(state, gamma, sampling=sampling, floors=floors), prefix).part(0, gamma)
        return self._by_token(ChunkBuilder(state, gamma, sampling=sampling, floors=floors), prefix)

    def unverified(self, state: GenerationState, chunk: Chunk, gamma: int) -> Chunk:  # noqa: ARG002
        """Return the draft model's own text; in common tokens under a JSON schema, which is about the verifier's
        tokens."""
        prefix = self._prefix(state)
        gamma = self._room(prefix, gamma)
        if prefix is None or state.rules.prompt is None or gamma < 1:
            return NO_CHUNK
        if state.rules.grammar is not None:
            return self._by_token(ChunkBuilder(state, gamma), prefix)
        sampling = replace(
            state.sampling, penalties=self._translation.own_penalties(state.sampling.penalties, len(state.rules.prompt))
        )
        # A cut to `gamma` within a word would change what the draft model writes next.
        return self._by_text(ChunkBuilder(state, gamma, text=prefix, sampling=sampling), prefix)

    def _prefix(self, state: GenerationState) -> Ids | None:
        """Return prompt and reply in own tokens (n,); None where nothing can be drafted."""
        if state.rules.prompt is None or not len(self._translation.source):
            return None
        self._follow(state)
        return np.concatenate((state.rules.prompt, np.array([own.id for own in self._own], dtype=np.int32)))

    def _room(self, prefix: Ids | None, gamma: int) -> int:
        """Return how many of `gamma` tokens the context has room for behind `prefix`."""
        return 0 if prefix is None else min(gamma, self._context.n_ctx - len(prefix) + 1)

    def _by_token(self, chunk: ChunkBuilder, prefix: Ids) -> Chunk:
        for row in self._rows(prefix):
            common = self._translation.widened(row)
            own = self._translation.own(chunk.add(common, top2(common)))
            if own is None:  # The schema allows no common token.
                return chunk.build().part(0, len(chunk.ids) - 1)
            if not self._take(own) or chunk.full():
                break
        return chunk.build()

    def _by_text(self, chunk: ChunkBuilder, prefix: Ids) -> Chunk:
        ended = False
        for row in self._rows(prefix):
            ended = not self._take(chunk.add(row, top2(row)))
            if ended or chunk.full():
                break
        drafted, theirs = chunk.build(), self._translation.theirs
        ids = theirs.cut(b"".join(own.piece for own in self._drafted))
        written = np.cumsum([len(own.piece) for own in self._drafted], dtype=np.int64)
        ends = np.cumsum([len(self._translation.piece(token)) for token in ids], dtype=np.int64)
        # A token is as sure as the drafted token with its last byte.
        places = np.minimum(np.searchsorted(written, ends), max(0, len(self._drafted) - 1))
        if ended and self._translation.end is not None:
            ids, places = [*ids, self._translation.end], np.append(places, len(drafted) - 1)
        return Chunk(np.array(ids, dtype=np.int32), drafted.confidence[places])

    def _rows(self, prefix: Ids) -> Iterator[Floats]:
        """Yield the logits behind `prefix`, and behind each token that is taken."""
        self._drafted = []
        feed = prefix[self._context.sync(prefix) :]
        while True:
            yield self._context.decode(feed, outputs=1)[0]
            feed = np.array([self._drafted[-1].id], dtype=np.int32)

    def _take(self, token: int) -> bool:
        """Add a drafted token; return False if it ends the turn."""
        if self._model.is_eog(token):
            return False
        self._drafted.append(_Own(token, self._model.piece(token)))
        return True

    def _follow(self, state: GenerationState) -> None:
        """Take over the written reply in own tokens: drafted tokens as far as they were right."""
        text = self._text
        at = sum(len(own.piece) for own in self._own)
        new = state.ids[state.prompt_tokens + self._read :].tolist()
        self._read += len(new)
        text += b"".join(map(self._translation.piece, new))
        for own in self._drafted:
            if not text.startswith(own.piece, at):
                break
            self._own.append(own)
            at += len(own.piece)
        self._drafted = []
        if at == len(text):
            return
        # A word is cut as a whole: its beginning may be other tokens together with its end.
        if not text.startswith(_SPACES, at):
            words = (n for n, own in enumerate(reversed(self._own[-_BACK:]), start=1) if own.piece.startswith(_SPACES))
            for own in [self._own.pop() for _ in range(next(words, 0))]:
                at -= len(own.piece)
        self._own += self._cut(bytes(text[at:]))

    def _cut(self, text: bytes) -> list[_Own]:
        """Return `text` in own tokens, whose pieces together are all of its bytes."""
        found: list[_Own] = []
        for token in (ids := self._translation.ours.cut(text)):
            piece = self._model.piece(token) if len(found) < len(ids) - 1 else text
            found.append(_Own(token, text[: len(piece)]))
            text = text[len(piece) :]
        return found
