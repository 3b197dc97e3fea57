"""What is remembered from reply to reply."""

from __future__ import annotations

import pytest

from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.ngram.retriever import DraftIndex, PastConversation
from edgellm.spec.ngram.sources import HistoryIndex
from edgellm.spec.params import SOURCES


def test_what_was_said_is_made_ready_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    known = DraftIndex(DraftPolicy(CostCurve((1, 64), (1.0, 1.1))), lambda _token: False, lambda _token: False)
    indexed: list[int] = []
    monkeypatch.setattr(HistoryIndex, "add", lambda _self, prompt, _reply: indexed.append(len(prompt)))
    known.add(PastConversation([1, 2, 3], [4]))
    assert known.take(SOURCES) is not None
    assert indexed == [3]
    known.add(PastConversation([1, 2], [4]))
    known.index_pending()
    assert indexed == [3], "a reply is reading in it"
    known.give()
    known.index_pending()
    known.index_pending()
    assert indexed == [3, 2]
