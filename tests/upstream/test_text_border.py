"""Borders of texts in the bundled vocabulary, and what a server wrote behind them."""

from contextlib import ExitStack

import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.spec.types import GREEDY, Ids
from edgellm.upstream.dialects.served import UnknownServer
from edgellm.upstream.dialects.texts import TextBorders, TextUpstream, Written
from edgellm.upstream.http_client import HttpClient, ServerURL
from edgellm.upstream.rows import RowReply, RowRequest, RowsUnusable, Tier
from tests.engine.logits import ids

SNOWMAN = "Here is \N{SNOWMAN} again"


@pytest.fixture(scope="module")
def borders(served: Model) -> TextBorders:
    return TextBorders(served)


def split(served: Model, text: str) -> Ids:
    """A text by single bytes where it is not ASCII: no text ends between them."""
    single = {piece: token for token, piece in enumerate(served.vocabulary.pieces) if len(piece) == 1}
    whole = served.plain_prompt(text).tolist()
    return ids(
        *(one for token in whole for one in ([token] if served.control_text(token).isascii() else
          [single[bytes([code])] for code in served.control_text(token)]))
    )  # fmt: skip


def divided(served: Model, text: str) -> tuple[Ids, int]:
    """A text whose first token of several letters is divided into two, and the place behind these."""
    whole = served.plain_prompt(text).tolist()
    known = served.vocabulary.written()
    for at, token in enumerate(whole):
        piece = served.control_text(token)
        for cut in range(1, len(piece)):
            if piece[:cut] in known and piece[cut:] in known:
                return ids(*whole[:at], known[piece[:cut]], known[piece[cut:]], *whole[at + 1 :]), at + 2
    raise AssertionError("no token can be divided")


def test_a_text_never_ends_within_a_character(served: Model, borders: TextBorders) -> None:
    whole = served.plain_prompt("Here is")
    snow = split(served, SNOWMAN)[: len(whole) + 2]
    while borders.text(snow) is not None:
        snow = snow[:-1]
    border, text = borders.last(snow)
    assert border < len(snow)
    assert "\N{REPLACEMENT CHARACTER}" not in text


def test_the_last_border_that_survives_is_before_other_tokens(served: Model, borders: TextBorders) -> None:
    text, behind = divided(served, "the kitchen table")
    assert not borders.survives(text)
    border, before = borders.last(text)
    assert border <= behind - 1
    assert borders.survives(text[:border])
    assert before == borders.text(text[:border])


def test_a_text_without_a_border_is_refused(served: Model, borders: TextBorders) -> None:
    """What a user typed would be taken for a control token."""
    plain = served.tokenize("<|end|>", special=False)
    assert len(plain) > 1
    with pytest.raises(RowsUnusable, match="tokenised again"):
        borders.last(np.concatenate((plain, np.repeat(served.plain_prompt(" mug"), 80))))


def test_what_is_behind_a_border(served: Model, borders: TextBorders) -> None:
    prefix, more = served.plain_prompt("The mug is"), served.plain_prompt(" in the kitchen.").tolist()
    said = " in the kitchen."
    for written in (Written(said, False), Written(said + "\N{REPLACEMENT CHARACTER}", False)):
        assert borders.behind(prefix, len(prefix), written) == more


def test_what_a_server_writes_again_is_left_out(served: Model, borders: TextBorders) -> None:
    text, _ = divided(served, "the kitchen table")
    border, before = borders.last(text)
    more = served.plain_prompt(" mug").tolist()
    said = "the kitchen table mug"[len(before) :]
    assert borders.behind(text, border, Written(said, False)) == more
    assert borders.behind(text, border, Written(said[:1], False)) == []
    with pytest.raises(RowsUnusable, match="another text"):
        borders.behind(text, border, Written("?" + said, False))


def test_rows_end_at_a_border_that_survives(served: Model, borders: TextBorders) -> None:
    prefix = served.plain_prompt("Here is")
    own = split(served, SNOWMAN)[len(prefix) :].tolist()
    for n in range(1, len(own) + 1):
        kept = borders.safe(prefix, own[:n])
        whole = borders.text(np.concatenate((prefix, ids(*own[:n])))) is not None
        assert kept == own[: n if whole else 1]
    assert borders.safe(prefix, served.plain_prompt(" the mug").tolist()) == served.plain_prompt(" the mug").tolist()


class Scripted(TextUpstream):
    """A server that writes one text, whatever it is asked."""

    dialect = "scripted"

    def __init__(self, client: HttpClient, model: Model, prompt: str, text: str) -> None:
        super().__init__(UnknownServer(client, model))
        self.prompt, self.said = prompt, text
        self.asked: list[tuple[str, int]] = []

    async def write(self, prompt: str, tokens: int, request: RowRequest, seed: int) -> tuple[Written, RowReply]:
        self.asked.append((prompt, tokens))
        ids = self._borders.ids(self.prompt + self.said)[len(self._borders.ids(prompt)) :]
        text = self._borders.text(np.array(ids[:tokens], dtype=np.int32)) or ""
        return Written(text, False), RowReply(Tier.CONTINUE, ())


def test_a_chunk_in_the_middle_of_a_character(served: Model, borders: TextBorders, closing: ExitStack) -> None:
    """It is asked for from the last whole character on, and the chunk's rows are those behind the prefix."""
    client = HttpClient(ServerURL.parse("http://127.0.0.1:9"))
    closing.callback(client.close)
    text = split(served, SNOWMAN)
    begin = served.plain_prompt("Here is")
    server = Scripted(client, served, "Here is", SNOWMAN.removeprefix("Here is"))
    cut = next(n for n in range(len(begin) + 1, len(text)) if borders.text(text[:n]) is None)
    found = client.wait(server.rows(RowRequest(text[:cut], text[cut : cut + 2], GREEDY)))
    assert [row.token for row in found.rows] == text[cut : cut + len(found.rows)].tolist()
    assert len(found.rows) >= 2
    (prompt, asked) = server.asked[-1]
    assert borders.survives(served.plain_prompt(prompt))
    assert asked > 3
