"""Replies by a JSON schema: valid, the verifier's own text with drafts and without, and no draft that is forbidden."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.llm import LLM
from edgellm.spec.drafters.model import ChunkBuilder
from edgellm.spec.protocols import DraftRules, GenerationState, Session
from edgellm.spec.sampling import ReplyGrammar, Top2
from edgellm.spec.types import Constraint, Distribution
from testkit.thinking_templates import CHANNELS, with_template
from tests.llm.test_lossless import SCHEMAS
from tests.spec.real import case, ids


def test_a_continued_text_has_no_channel_to_wait_for(f32_pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = with_template(f32_pair[1], tmp_path / "channels.gguf", CHANNELS)
    with LLM.open("none", path, threads=1, history=False) as opened:
        reply = opened.complete("Sure?", json_schema='{"enum": ["yes", "no"]}')
        list(reply)
        assert json.loads(reply.summary.text) in ("yes", "no")


@pytest.mark.usefixtures("rows_are_cheap")
def test_forced_text_is_drafted_and_changes_nothing(alone: LLM, f32_pair: tuple[Path, Path]) -> None:
    schema = {"type": "object", "properties": {"keyword": {"type": "string"}, "answer": {"type": "string"}}}
    wanted = json.dumps(schema | {"required": ["keyword", "answer"], "additionalProperties": False})
    options: Any = {"json_schema": wanted, "max_tokens": 100}
    with LLM.open("none", f32_pair[1], threads=1, history=False) as fresh:
        reply = fresh.reply(case(2), retrieval="schema", **options)
        assert ids(reply) == ids(alone.reply(case(2), retrieval="off", **options))
        assert dict(reply.summary.retrieved_from)["schema"] > 0


def test_context_lookup_does_not_break_the_grammar(pair: LLM) -> None:
    """With a budget, tokens of the context replace doubtful drafts, which the grammar may forbid."""
    rules = DraftRules(grammar=ReplyGrammar(Listed(1), Constraint("", 0)), lookup_below=1.0)
    drafts = ChunkBuilder(GenerationState(rules=rules), 4, cursor=Offering())
    assert drafts.add(np.array([0.0, 1.0, 2.0], np.float32), Top2(2, 0.6, 0.2)) == 1


@pytest.mark.usefixtures("rows_are_cheap")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_forbidden_draft_is_proposed(
    f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    submit, drafted = Session.submit, 0
    options: Any = {"temperature": temperature, "seed": 1, "max_tokens": 200}
    with LLM.open(*f32_pair, threads=1, history=False) as fresh:  # it has not found drafts too slow here

        def checked(self: Session, prefix: Any, chunk: Any, extra: int = 0) -> Any:
            nonlocal drafted
            constraint = self.state.sampling.constraint
            assert constraint is not None
            grammar = ReplyGrammar(fresh._text.grammar(constraint.schema), constraint)
            assert grammar.follows(prefix, chunk.ids) == len(chunk)
            drafted += len(chunk)
            return submit(self, prefix, chunk, extra)

        monkeypatch.setattr(Session, "submit", checked)
        for schema in SCHEMAS:
            ids(fresh.reply(case(3), json_schema=json.dumps(schema), **options))
    assert drafted > 0


class Offering:
    """A cursor that offers the forbidden token 0 with a long match."""

    def offer(self) -> Any:
        return 0, 99, False

    def advance(self, token: int) -> None: ...


class Listed:
    """A grammar that allows some tokens, whatever the text."""

    def __init__(self, *allowed: int) -> None:
        self._mask = np.isin(np.arange(100_000), allowed)

    def mask(self, _text: Any) -> Any:
        return self._mask

    def forced(self, _text: Any) -> bytes:
        raise NotImplementedError


def test_what_the_grammar_leaves_of_a_distribution() -> None:
    logits = np.arange(100_000, dtype=np.float32)[::-1].copy()
    likely = Distribution(np.array([0, 1, 2], np.int32), np.array([0.5, 0.3, 0.2], np.float32))
    start = Constraint("", 0)
    text = np.array([7], np.int32)
    some = ReplyGrammar(Listed(1, 2), start).limited(likely, logits, text)
    assert (some.ids.tolist(), some.probs.tolist()) == ([1, 2], pytest.approx([0.6, 0.4]))
    grammar = Listed(1000, 5000)
    none = ReplyGrammar(grammar, start).limited(likely, logits, text)
    assert (none.ids.tolist(), none.probs.tolist()) == ([1000], [1.0])
    assert ReplyGrammar(Listed(1), Constraint("", 5)).limited(likely, logits, text).ids.tolist() == [1]
    waits = ReplyGrammar(Listed(1), Constraint("", 0, (8, 9)))
    assert waits.limited(likely, logits, np.array([8, 7, 9], np.int32)) is likely
    assert waits.limited(likely, logits, np.array([7, 8, 9], np.int32)).ids.tolist() == [1]
