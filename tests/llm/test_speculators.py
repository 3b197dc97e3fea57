"""A speculator beside copies and a draft model: the text is the verifier's, and each choice has its reason."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM
from edgellm.engine import Model, ModelFile
from edgellm.engine.model import LoadSpec
from edgellm.errors import ModelUnsupported
from edgellm.llm.abilities import abilities, context_memory
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.drafting.bandit import Bandit
from edgellm.spec.types import Explanation, Source, Token
from tests.conftest import Architectures, Heads

NOTES = "The mug is on the shelf. The key is in the drawer."
QUESTION = f"{NOTES}\n\nWhere is the mug, and where is the key?"
TOKENS = 32


def written(llm: LLM, **options: Any) -> tuple[list[int], list[str]]:
    reasons: list[str] = []
    reply = llm.reply(QUESTION, max_tokens=TOKENS, **options)
    reply.listen(on_explain=lambda said: reasons.append(said.text) if isinstance(said, Explanation) else None)
    return [token.id for token in reply], [reason for reason in reasons if "MTP" in reason or "EAGLE-3 head" in reason]


OPTIONS: list[dict[str, Any]] = [{}, {"retrieval": "off"}, {"temperature": 0.8, "seed": 7}]


@pytest.mark.parametrize("name", ["qwen35", "glm4moe"])
@pytest.mark.parametrize("alone", [True, False])
def test_replies_are_those_of_the_same_model_without_the_layer(
    architectures: Architectures, name: str, alone: bool, rows_are_cheap: None
) -> None:
    """`-m MODEL` alone, and as a verifier without a draft model."""
    names = (architectures(name, mtp="useful"), None) if alone else (None, architectures(name, mtp="useful"))
    plain = (architectures(name), None) if alone else (None, architectures(name))
    with (
        LLM.open(*names, threads=1, n_ctx=512, history=False) as llm,
        LLM.open(*plain, threads=1, n_ctx=512, history=False) as before,
    ):
        for options in OPTIONS:
            found, reasons = written(llm, **options)
            assert found == written(before, **options)[0]
            assert reasons == ["the model's MTP layer drafts where that is faster"]


@pytest.mark.parametrize("name", ["qwen35", "glm4moe"])
def test_a_pair_writes_the_same_with_either_drafter(
    architectures: Architectures, name: str, rows_are_cheap: None
) -> None:
    draft, verifier = architectures(name, 0.12), architectures(name, mtp="useful")
    with (
        LLM.open(draft, verifier, threads=1, n_ctx=512, history=False) as pair,
        LLM.open(None, architectures(name), threads=1, n_ctx=512, history=False) as alone,
    ):
        expected, _ = written(alone)
        replies = [written(pair) for _ in range(5)]
        assert all(ids == expected for ids, _ in replies)
        said = {reason for _, reasons in replies for reason in reasons}
        assert said == {
            "the model's MTP layer drafts in this reply, in place of the draft model",
            "the model's MTP layer drafts nothing: the draft model drafts in this reply",
        }


@pytest.mark.parametrize(("name", "own"), [("llama", True), ("qwen35", False)])
def test_replies_with_a_head_are_those_of_the_verifier_alone(
    architectures: Architectures, heads: Heads, name: str, own: bool, rows_are_cheap: None
) -> None:
    """`--draft HEAD --verifier MODEL`."""
    head = heads(name, own=own)
    with (
        LLM.open(head, architectures(name), threads=1, n_ctx=512, history=False) as llm,
        LLM.open(None, architectures(name), threads=1, n_ctx=512, history=False) as alone,
    ):
        assert llm.draft_name is None
        for options in OPTIONS:
            found, reasons = written(llm, **options)
            assert found == written(alone, **options)[0]
            assert reasons[0] == f"the EAGLE-3 head {head.name} drafts where that is faster"
            assert f"the EAGLE-3 head {head.name} drafts from its states" in reasons[1]


def test_a_head_is_refused_without_the_verifier_that_it_reads(
    architectures: Architectures, heads: Heads, verifier_path: Path
) -> None:
    head = heads("llama")
    for verifier, why, instead in (
        (None, "there is no verifier", "--verifier"),
        ("localhost:50151", "localhost:50151 is in another", "serve --role verifier"),
        (verifier_path, "does not fit the verifier verifier.gguf", "that it was trained for"),
        (architectures("qwen2"), "hands over no states of qwen2", "that it was trained for"),
    ):
        with pytest.raises(ModelUnsupported, match=why) as refused:
            LLM.open(head, verifier)
        assert instead in refused.value.next_step
    with pytest.raises(ModelUnsupported, match="is an EAGLE-3 head") as refused:
        LLM.open(architectures("llama"), head)
    assert "as the draft model" in refused.value.next_step


@pytest.fixture
def served(architectures: Architectures) -> Iterator[VerifierServer]:
    with (
        Model.load(architectures("qwen35", mtp="useful"), LoadSpec(speculates=True)) as model,
        VerifierServer(model, Address("127.0.0.1", 0), context=512, sessions=2, threads=1) as server,
    ):
        yield server


def most_alone(tokens: list[Token]) -> int:
    """Return the most tokens of a verdict that the verifier wrote alone; without drafts it writes one."""
    rounds = Counter(token.round for token in tokens if token.source is Source.VERIFIER)
    return max(rounds.values(), default=0)


@pytest.mark.parametrize("tail", [True, False])
def test_across_a_link_extra_tokens_fill_the_tail_of_a_chunk(
    architectures: Architectures, served: VerifierServer, tail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_bandit: dict[int, list[tuple[bool, int]]] = {}
    monkeypatch.setattr(Bandit, "second", lambda _self, _cost=0.0: tail)
    here = threading.current_thread()

    def record(self: Bandit, second: bool, tokens: int, _seconds: float) -> None:
        if threading.current_thread() is here:  # the server's own is in another
            by_bandit.setdefault(id(self), []).append((second, tokens))

    monkeypatch.setattr(Bandit, "record", record)
    with (
        LLM.open(architectures("qwen35", 0.12), str(served.address), threads=1, history=False) as pair,
        LLM.open(None, architectures("qwen35"), threads=1, n_ctx=512, history=False) as alone,
    ):
        expected, _ = written(alone)
        reply = pair.reply(QUESTION, max_tokens=TOKENS, gamma=2)
        tokens = list(reply)
        assert [token.id for token in tokens] == expected
        assert (most_alone(tokens) > 1) == tail
        assert (reply.summary.rounds <= TOKENS // 8 + 1) == tail  # eight tokens in each
        recorded = max(by_bandit.values(), key=len)  # the others compare stretches and replies
        assert len(recorded) == reply.summary.rounds - 1  # without the first, for which the prompt was read
        assert {way for way, _ in recorded} == {tail}
        assert sum(tokens for _, tokens in recorded) <= TOKENS + 1
        sampled: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.7, "seed": 3}
        tokens = list(pair.reply(QUESTION, gamma=2, **sampled))
        assert [token.id for token in tokens] == [token.id for token in alone.reply(QUESTION, **sampled)]
        assert (most_alone(tokens) > 1) == tail
        reply = pair.reply(QUESTION, max_tokens=TOKENS, gamma=2, seed=3, budget=0.5)  # it would be verified text
        assert most_alone(list(reply)) <= 1


def test_a_verifier_without_the_layer_is_asked_for_no_tail(architectures: Architectures) -> None:
    with (
        Model.load(architectures("qwen35")) as model,
        VerifierServer(model, Address("127.0.0.1", 0), context=512, sessions=2, threads=1) as server,
        LLM.open(architectures("qwen35", 0.12), str(server.address), threads=1, history=False) as pair,
    ):
        tokens = list(pair.reply(QUESTION, max_tokens=TOKENS, gamma=2))
        assert tokens
        # where nothing is drafted, because that is slower on a busy machine, several tokens are asked for at once
        chunks = {token.round for token in tokens if token.source in (Source.BONUS, Source.CORRECTED)}
        assert not [token for token in tokens if token.round in chunks and token.source is Source.VERIFIER]


def test_where_it_cannot_draft_the_reason_is_told(architectures: Architectures) -> None:
    draft, verifier = architectures("qwen35", 0.12), architectures("qwen35", mtp="useful")
    with LLM.open(draft, verifier, threads=1, n_ctx=512, history=False) as pair:
        for options, reason in (
            ({"budget": 0.3}, "not everything is verified"),
            ({"logprobs": 0}, "log-probabilities are requested"),
        ):
            assert [said.endswith(reason) for said in written(pair, **options)[1]] == [True]


def test_a_speculator_that_llama_cpp_computes_wrongly_is_not_loaded(
    architectures: Architectures, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellm.engine import model
    from edgellm.engine.gguf.speculation import EAGLE3, MTP
    from edgellm.engine.trial.probe import LoadTrial

    monkeypatch.setattr(model, "require_loadable", lambda *_: LoadTrial(faults=(MTP, EAGLE3)))
    with LLM.open(None, architectures("qwen35", mtp="useful"), threads=1, n_ctx=512, history=False) as llm:
        assert written(llm)[1] == []
        assert [notice for notice in llm.notices if "MTP drafts" in notice]
    with LLM.open(heads("llama"), architectures("llama"), threads=1, n_ctx=512, history=False) as llm:
        assert not [reason for reason in written(llm)[1] if "where that is faster" in reason]
        assert [notice for notice in llm.notices if "EAGLE-3 drafts" in notice]


def test_show_tells_it(architectures: Architectures) -> None:
    for mtp, able in (("none", False), ("useless", True)):
        told = {ability.name: ability for ability in abilities(ModelFile.open(architectures("qwen35", mtp=mtp)))}
        assert told["MTP drafts"].able == able
        assert "predicts further tokens (MTP)" in told["MTP drafts"].reason


def test_show_tells_what_a_head_is_and_for_whom(architectures: Architectures, heads: Heads) -> None:
    others = {name: ModelFile.open(architectures(name)) for name in ("llama", "qwen2")}
    head = ModelFile.open(heads("llama"))
    chat, drafts = abilities(head, others)
    assert (chat.able, chat.reason) == (False, "it is an EAGLE-3 head: it drafts from another model's states")
    assert (drafts.able, drafts.reason) == (True, "as the draft model of llama, from the inputs of layers 1, 2, 3")
    assert not abilities(head)[1].able
    assert context_memory(head.header) == []
    pair = next(ability for ability in abilities(others["llama"], {"mine": head}) if ability.name == "pair")
    assert (pair.able, pair.reason) == (True, "with the EAGLE-3 head mine")
    pair = next(ability for ability in abilities(others["qwen2"], {"mine": head}) if ability.name == "pair")
    assert not pair.able
