"""With everything verified the text is the verifier's own, whatever drafts it, by every rule of choice."""

import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from edgellm.llm import LLM
from edgellm.spec.protocols import Session
from edgellm.spec.sampling import ReplyGrammar
from testkit.thinking_templates import CHANNELS, with_template
from tests.llm.conftest import verifying
from tests.spec.real import case, ids

NUMBERS = (2, 5)
MOST = 24
SEEDED: dict[str, Any] = {"temperature": 1.2, "top_k": 0, "top_p": 1.0, "seed": 4}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 24}, "sure": {"type": "boolean"}},
     "required": ["answer", "sure"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["Monday", "Friday", "mug", 3]}, "minItems": 2, "maxItems": 3},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "object", "properties": {
        "place": {"type": "string", "minLength": 3, "maxLength": 12}}, "required": ["place"]}]},
)  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED,
    "repeat": {"repeat_penalty": 1.4},
    "presence": {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    "seeded repeat": SEEDED | {"repeat_penalty": 1.3, "min_p": 0.02},
    "likely": {"temperature": 0.7, "top_k": 20, "seed": 9, "presence_penalty": 2.0, "min_p": 0.1},
    **{f"schema {number}": {"json_schema": json.dumps(schema)} for number, schema in enumerate(SCHEMAS)},
    "seeded schema": SEEDED | {"json_schema": json.dumps(SCHEMAS[0])},
    "schema and penalty": {"json_schema": json.dumps(SCHEMAS[1]), "presence_penalty": 0.5},
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "copies": ("alone", {"retrieval": "context,history"}),
    "all sources": ("alone", {"retrieval": "context,history,reuse,calibration"}),
    "both models": ("pair", {}),
    "drafts": ("pair", {"retrieval": "off", "gate": "always", "gamma": 4}),
    "long drafts": ("pair", {"retrieval": "off", "gate": "always", "gamma": 7}),
    "early exit": ("profiled", {"early_exit": True, "retrieval": "off"}),
    "whole budget": ("profiled", {"budget": 1.0, "gate": "synera"}),
    "link": ("served", {}),
    "link, drafts": ("served", {"retrieval": "off", "gate": "always", "gamma": 4}),
    "link, no guesses": ("served", {"retrieval": "off", "parallel": False}),
    "in the server": ("inside", {"retrieval": "off"}),
}


@pytest.mark.usefixtures("rows_are_cheap")
@pytest.mark.parametrize("rule", RULES)
def test_the_text_is_the_verifiers_own(
    alone: LLM, pair: LLM, profiled: LLM, served: LLM, inside: LLM, rule: str
) -> None:
    pairs = {"alone": alone, "pair": pair, "profiled": profiled, "served": served, "inside": inside}
    most = 200 if "json_schema" in RULES[rule] else MOST
    for number in NUMBERS:
        reference = alone.reply(case(number), max_tokens=most, retrieval="off", **RULES[rule])
        wanted = ids(reference)
        if "json_schema" in RULES[rule]:
            assert reference.summary.finish_reason == "stop"
            assert jsonschema_rs.is_valid(json.loads(RULES[rule]["json_schema"]), json.loads(reference.summary.text))
        for way, (who, options) in WAYS.items():
            reply = pairs[who].reply(case(number), max_tokens=most, **RULES[rule], **options)
            assert ids(reply) == wanted, way
            assert reply.summary.share_verified in (None, 1.0)


@pytest.mark.parametrize("rule", ["greedy", "seeded"])
def test_replies_that_push_each_other_out_of_the_verifier(f32_pair: tuple[Path, Path], alone: LLM, rule: str) -> None:
    numbers, options = (2, 5, 6), RULES[rule]
    with verifying(f32_pair[1]) as server, LLM.open(f32_pair[0], str(server.address), threads=1) as pair:
        replies = [pair.reply(case(number), max_tokens=MOST, budget=1.0, **options) for number in numbers]
        rows = list(zip_longest(*replies))
        for at, number in enumerate(numbers):
            wanted = ids(alone.reply(case(number), max_tokens=MOST, retrieval="off", **options))
            assert [row[at].id for row in rows if row[at] is not None] == wanted
        assert sum(reply.summary.guesses_tried for reply in replies) > 0
        assert server.counters.evictions > 0


def test_a_penalty_and_a_bias_change_greedy_text(alone: LLM) -> None:
    plain = ids(alone.reply(case(2), max_tokens=MOST))
    assert len(set(plain)) < len(plain)
    penalised = ids(alone.reply(case(2), max_tokens=MOST, presence_penalty=100.0))
    assert len(set(penalised)) == len(penalised)
    banned = ids(alone.reply(case(2), max_tokens=MOST, logit_bias={plain[0]: -100.0}))
    assert plain[0] not in banned
    forced = ids(alone.reply(case(2), max_tokens=4, logit_bias={plain[1]: 100.0}))
    assert forced == [plain[1]] * 4


def test_the_draft_model_follows_the_penalties(pair: LLM) -> None:
    """Otherwise it would draft the very tokens that the verifier avoids."""
    options: dict[str, Any] = {"max_tokens": MOST, "retrieval": "off", "gate": "always", "gamma": 4}
    replies = [pair.reply(case(2), presence_penalty=amount, **options) for amount in (0.0, 4.0)]
    rates = []
    for reply in replies:
        ids(reply)
        rates.append(reply.summary.acceptance_rate or 0.0)
    assert rates[1] > 0.5 * rates[0]


# --- JSON schemas ----------------------------------------------------------------------------------------------------


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
            grammar = ReplyGrammar(fresh._text_model.grammar(constraint.schema), constraint)
            assert grammar.follows(prefix, chunk.ids) == len(chunk)
            drafted += len(chunk)
            return submit(self, prefix, chunk, extra)

        monkeypatch.setattr(Session, "submit", checked)
        for schema in SCHEMAS:
            ids(fresh.reply(case(3), json_schema=json.dumps(schema), **options))
    assert drafted > 0
