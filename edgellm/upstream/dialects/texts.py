"""Servers that take no token ids: the borders at which texts for them are cut, and the ids of what they write.

The server is sent the text so far and writes as many tokens as a chunk has and one more. A border between two tokens
survives if the text before it, tokenised again, gives the ids before it. Only there does a server see the same tokens;
a text that ends elsewhere, such as in the middle of a character, is sent up to the last border that survives, and the
server writes the rest again.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgellm.engine import Model
from edgellm.spec.types import GREEDY, NO_IDS, Ids
from edgellm.upstream.dialects.served import PROBE_SECONDS, UnknownServer, Upstream, seed_at
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier

_FARTHEST = 64  # tokens that a server may have to write again
_TRIES = 3
_MORE = 8  # further tokens to ask for after too short an answer


@dataclass(frozen=True, slots=True)
class Written:
    """A server's continuation of a text. `ended`: the end of the turn was written, which is not in `text`."""

    text: str
    ended: bool


class TextBorders:
    """The ids of texts and the texts of ids in a model's vocabulary."""

    def __init__(self, model: Model) -> None:
        """Encode prompts as servers do: with BOS if the model wants it, and names of control tokens as those tokens."""
        self._encode, self._vocabulary = model.plain_prompt, model.vocabulary
        self._begin = self._encode("").tolist()

    @property
    def has_begin(self) -> bool:
        """Return whether servers put BOS before a text."""
        return bool(self._begin)

    def without_begin(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` without the BOS that servers add."""
        begin = len(self._begin)
        return list(ids[begin:] if begin and list(ids[:begin]) == self._begin else ids)

    def ids(self, text: str) -> list[int]:
        """Return the ids of `text` without BOS."""
        return self.without_begin(self._encode(text).tolist())

    def text(self, ids: Ids) -> str | None:
        """Return the text of `ids` (n,) without the BOS that servers add; None if its last character is incomplete."""
        try:
            return self._bytes(self.without_begin(ids.tolist())).decode()
        except UnicodeDecodeError:
            return None

    def survives(self, ids: Ids) -> bool:
        """Return whether the border behind `ids` (n,) survives."""
        text = self.text(ids)
        return text is not None and self._encode(text).tolist() == ids.tolist()

    def last(self, ids: Ids) -> tuple[int, str]:
        """Return the last border in `ids` (n,) that survives, and the text before it. Raises RowsUnusable: no border
        near the end survives."""
        for border in range(len(ids), max(len(ids) - _FARTHEST, 0), -1):
            if self.survives(ids[:border]):
                return border, self.text(ids[:border]) or ""
        raise RowsUnusable("a text whose tokens are others when it is tokenised again")

    def behind(self, prefix: Ids, border: int, written: Written) -> list[int]:
        """Return the ids that a server wrote behind `prefix` (n,) when asked to continue from `border`, without the end
        of the turn. Raises RowsUnusable: it did not repeat the end of `prefix`, or wrote no text of the vocabulary."""
        again = prefix[border:].tolist()
        text = written.text if written.ended else written.text.rstrip("\N{REPLACEMENT CHARACTER}")
        known, data = self._bytes(again), text.encode()
        if not data.startswith(known):
            if known.startswith(data):
                return []  # The answer is too short.
            raise RowsUnusable("another text than before")
        whole: list[int] = self._encode((self.text(prefix[:border]) or "") + text).tolist()
        if whole[:border] == prefix[:border].tolist():
            for at in range(border, len(whole) + 1):
                if self._bytes(whole[border:at]) == known:
                    return whole[at:]
        rest = data[len(known) :]
        ids = self.ids(rest.decode("utf-8", "replace"))
        if self._bytes(ids) != rest:
            raise RowsUnusable("a text that cannot be divided into tokens")
        return ids

    def safe(self, prefix: Ids, own: Sequence[int]) -> list[int]:
        """Return `own`, tokens behind `prefix` (n,), up to the last border that survives; all if none does."""
        whole = np.concatenate((prefix, np.array(own, dtype=np.int32)))
        for n in range(len(own), 0, -1):
            if self.survives(whole[: len(prefix) + n]):
                return list(own[:n])
        return list(own)

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._vocabulary.pieces[token] for token in ids)


class TextUpstream(Upstream):
    """A server that continues a text."""

    by_text = True

    def __init__(self, server: UnknownServer) -> None:
        super().__init__(server, Tier.CONTINUE, "it takes no token ids, and continues a text")
        self._borders, self._end_of_turn = TextBorders(server.text), server.text.end_of_turn

    @abstractmethod
    async def write(self, prompt: str, tokens: int, request: RowRequest, seed: int) -> tuple[Written, RowReply]:
        """Return the server's continuation of `prompt`, up to `tokens` tokens, and a reply without rows for the costs.
        Raises RowsUnusable: the answer is something else; VerifierLost, VerifierBusy: as `Upstream.rows`."""

    async def probe(self, token: int) -> None:
        """Continue a text of `token`, so that the server loads its model now. Raises RowsUnusable, VerifierLost,
        VerifierBusy: as `write`; TimeoutError: it takes too long."""
        ids = np.array([token], dtype=np.int32)
        async with asyncio.timeout(PROBE_SECONDS):
            await self.write(self._borders.text(ids) or "", 1, RowRequest(ids, NO_IDS, GREEDY), 0)

    async def _rows(self, request: RowRequest) -> RowReply:
        prefix = request.prefix
        border, prompt = await asyncio.to_thread(self._borders.last, prefix)
        tokens = len(prefix) - border + request.places
        for _ in range(_TRIES):
            written, reply = await self.write(prompt, tokens, request, seed_at(request.sampling, border))
            own = await asyncio.to_thread(self._borders.behind, prefix, border, written)
            if not written.ended:
                own = await asyncio.to_thread(self._borders.safe, prefix, own)
            elif self._end_of_turn is not None and own[-1:] != [self._end_of_turn]:  # Servers leave it out of texts.
                own = [*own, self._end_of_turn]
            if own:
                return replace(reply, rows=tuple(map(Row, own)))
            tokens += _MORE
        raise RowsUnusable("no text")
