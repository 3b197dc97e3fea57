"""A draft model for a verifier on another device that has another tokenizer: the text is the verifier's own."""

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.engine.gguf.writer import tokenizer_file
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import InvalidOption, ProtocolError, VocabularyMismatch
from edgellm.llm import AUTO, LLM
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.trust import Trust
from edgellm.spec.drafters.parallel import BranchingDrafter
from edgellm.spec.drafters.translation import TextCutter, TokenTranslation
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import GenerationState
from edgellm.spec.stream import Reply
from edgellm.spec.types import Sampling
from testkit.retokenized import ONE_TOKENIZER, PAIRS, padded, write
from tests.http.conftest import serving
from tests.llm.conftest import Retokenized, verifying
from tests.rpc.strangers import befriend, device
from tests.services.scripted import gone, scripted
from tests.spec.real import case, ids, told

OTHERS = list(PAIRS)[ONE_TOKENIZER:]


def test_the_default_draft_model_is_left_out(home: Path, retokenized: Retokenized) -> None:
    draft, _ = retokenized("other ids")  # which has another tokenizer than the bundled models
    with (
        verifying(draft) as running,
        LLM.open("none", draft, threads=1) as alone,
        LLM.open(verifier=str(running.address), threads=1) as one,
        LLM.open("none", str(running.address), threads=1) as other,
    ):
        wanted = ids(alone.reply(case(1), max_tokens=12))
        assert one.draft_name is None
        assert "writes alone. Name a draft model for it with --draft (draft=)" in one.notices[0]
        assert ids(one.reply(case(1), max_tokens=12)) == wanted
        assert other.notices == ()
        assert ids(other.reply(case(1), max_tokens=12)) == wanted


def test_the_tokenizer_of_another_model_is_refused_and_not_kept(retokenized: Retokenized, home: Path) -> None:
    draft, verifier = retokenized("other ids")
    with Model.load(verifier, TEXT_ONLY) as text, Model.load(retokenized("other merges")[0], TEXT_ONLY) as other:
        data = tokenizer_file(other.file)
        told = {"tokenizer": hashlib.sha256(data).digest()}
        part = pb.TokenizerPart(data=data, size=len(data))
        with (
            scripted(text.vocabulary, lambda _rounds, _context: (), told, tokenizer=lambda _: part) as address,
            pytest.raises(ProtocolError, match="not that of its model"),
        ):
            LLM.open(draft, str(address), threads=1)
    assert list((home / "cache" / "tokenizers").iterdir()) == []


def test_auto_takes_the_same_tokenizer_before_another_one(
    retokenized: Retokenized, f32_pair: tuple[Path, Path], tmp_path: Path, home: Path
) -> None:
    """Though the other model is as large, and only where there is one; unused tokens make no tokenizer another one."""
    draft, verifier = retokenized("other ids")
    write(draft, longer := tmp_path / "longer.gguf", partial(padded, n=130))
    here, same, other = Trust.load(), device(tmp_path / "same"), device(tmp_path / "other")
    for there, name in ((same, "lounge"), (other, "desk")):
        befriend(there, here, name=name)
    with verifying(verifier, trust=other) as desk, verifying(longer, trust=same) as lounge:
        here.peers.record_seen(other.identity.id, desk.address)
        here.peers.record_seen(same.identity.id, lounge.address)
        with LLM.open(draft, AUTO, peers=["desk", "lounge"], threads=1) as pair:
            assert pair.verifier_reason.startswith("lounge")
            assert "Not taken: desk" in pair.verifier_reason
            assert "with another tokenizer" in pair.verifier_reason
            assert pair.notices == ()
            assert len(ids(pair.reply(case(2), max_tokens=12, budget=0.5))) == 12
        with LLM.open(draft, AUTO, peers=["desk"], threads=1) as pair, LLM.open("none", verifier, threads=1) as alone:
            assert "with another tokenizer" in pair.verifier_reason
            assert "translated" in pair.notices[0]
            assert ids(pair.reply(case(2), max_tokens=12)) == ids(alone.reply(case(2), max_tokens=12))


def test_who_names_edgellms_http_server_is_told_of_its_verifier(retokenized: Retokenized, home: Path) -> None:
    with (
        LLM.open("none", retokenized("few common tokens")[1], threads=1, history=False) as alone,
        serving(alone, "served") as server,
        pytest.raises(VocabularyMismatch) as refused,
    ):
        LLM.open(verifier=server.url, threads=1)
    assert "serve --role verifier" in refused.value.next_step


@pytest.fixture(params=OTHERS)
def translated(request: pytest.FixtureRequest, retokenized: Retokenized) -> Iterator[tuple[LLM, LLM]]:
    """The draft model of a verifier that is lost, in the verifier's tokens, and the draft model alone."""
    draft, verifier = retokenized(request.param)
    with Model.load(verifier, TEXT_ONLY) as text:
        data = tokenizer_file(text.file)
        hello = {"tokenizer": hashlib.sha256(data).digest(), "penalties": True, "grammars": True}
        part = pb.TokenizerPart(data=data, size=len(data))
        with (
            scripted(text.vocabulary, gone, hello, tokenizer=lambda _: part) as address,
            LLM.open(draft, str(address), threads=1, history=False) as pair,
            LLM.open(draft, "none", threads=1) as alone,
        ):
            yield pair, alone


def both(translated: tuple[LLM, LLM], number: int, **options: Any) -> tuple[Reply, str]:
    """Return a reply without verdicts, and the text of the draft model's own."""
    own, reply = (
        pair.reply(case(number), max_tokens=most, retrieval="off", **options)
        for pair, most in zip(translated[::-1], (200, 48), strict=True)
    )
    list(own), list(reply)
    return reply, own.summary.text


def test_what_stands_without_a_verdict_is_the_draft_models_own_text(translated: tuple[LLM, LLM]) -> None:
    for number in range(3):
        for temperature in (0.0, 1.2):
            reply, own = both(translated, number, temperature=temperature, top_k=0, top_p=1.0, seed=3)
            assert own.startswith(reply.summary.text)
            assert reply.summary.finish_reason == ("stop" if reply.summary.text == own else "length")


def test_penalties_count_without_a_verdict(translated: tuple[LLM, LLM]) -> None:
    reply, own = both(translated, 1, temperature=0.0, repeat_penalty=1.5, presence_penalty=0.8)
    assert own.startswith(reply.summary.text)
    end = translated[0]._text_model.end_of_turn
    assert end is not None
    endless = translated[0].reply(case(1), max_tokens=48, retrieval="off", logit_bias={end: -100.0})
    assert len(list(endless)) == 48


def test_a_schema_is_followed_without_a_verdict(translated: tuple[LLM, LLM]) -> None:
    schema = json.dumps({"type": "object", "properties": {"there": {"type": "boolean"}}, "required": ["there"]})
    for temperature in (0.0, 1.5):
        reply, _ = both(translated, 1, temperature=temperature, json_schema=schema)
        assert isinstance(json.loads(reply.summary.text)["there"], bool)
        assert reply.summary.finish_reason == "stop"


# --- both models here -------------------------------------------------------------------------------------------------


AS_TEXT = "few common tokens"


@pytest.mark.parametrize("name", PAIRS)
def test_replies_are_the_verifiers_own_greedy_and_sampled(name: str, retokenized: Retokenized) -> None:
    draft, verifier = retokenized(name)
    accepted = 0
    with LLM.open("none", verifier, threads=1) as alone, LLM.open(draft, verifier, threads=1) as pair:
        translated = any("different tokenizers" in notice for notice in pair.notices)
        assert translated is (list(PAIRS).index(name) >= ONE_TOKENIZER)
        for number, temperature in ((0, 0.0), (1, 0.0), (1, 1.2)):
            asked: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": number}
            wanted = ids(alone.reply(case(number), retrieval="off", **asked))
            assert ids(pair.reply(case(number), **asked)) == wanted
            reply = pair.reply(case(number), retrieval="off", gate="always", gamma=4, **asked)
            assert ids(reply) == wanted
            accepted += reply.summary.accepted
            assert reply.summary.share_verified == 1.0
    assert accepted > 5


@pytest.mark.parametrize("name", ["other ids", "other merges", AS_TEXT, "a SentencePiece draft"])
def test_other_and_broken_characters_do_no_harm(name: str, retokenized: Retokenized) -> None:
    draft, verifier = retokenized(name)
    text = "Grüße 你好 🦙\n\n  <|im_end|> [/begin|>\tend "
    with LLM.open("none", verifier, threads=1) as alone, LLM.open(draft, verifier, threads=1) as pair:
        for prompt in (text, text.encode()[:-9].decode(errors="ignore")):
            assert ids(pair.reply(prompt, max_tokens=16)) == ids(alone.reply(prompt, max_tokens=16))
            assert ids(pair.complete(prompt, max_tokens=16)) == ids(alone.complete(prompt, max_tokens=16))
        some = pair.prompt_writer.ids(text)[:-2].tolist()
        assert ids(pair.complete(some, max_tokens=16)) == ids(alone.complete(some, max_tokens=16))


def test_what_does_not_work_between_tokenizers_is_off_with_its_reason(retokenized: Retokenized) -> None:
    with LLM.open(*retokenized("other ids"), threads=1) as pair:
        assert "100% of the draft model's tokens" in pair.notices[0]
        with pytest.raises(InvalidOption, match="different tokenizers"):
            pair.profile([case(1)])
        wanted = ids(pair.reply(case(2), max_tokens=16))
        options: tuple[tuple[dict[str, Any], str], ...] = (
            ({"budget": 0.3}, "the budget of 0.3"), ({"gate": "importance", "budget": 0.3}, "the gate importance"),
            ({"gate": "never"}, "the gate never"), ({"early_exit": True}, "the early exit"),
            ({"budget": 0.0}, "the budget of 0.0"),
        )  # fmt: skip
        for changes, said in options:
            reply = pair.reply(case(2), ReplyOptions(max_tokens=16, **changes))
            assert any(said in one for one in told(reply)), changes
            assert reply.summary.share_verified == 1.0
        assert ids(pair.reply(case(2), max_tokens=16, logprobs=2)) == wanted


@pytest.mark.parametrize("name", ["other ids", "other merges", "a SentencePiece draft"])
def test_a_texts_middle_is_cut_without_losing_bytes(name: str, retokenized: Retokenized) -> None:
    with Model.load(retokenized(name)[0], TEXT_ONLY) as model:
        cutter = TextCutter(model)
        text = "so, Grüße an 你好 🦙\n\n  twice  ".encode()
        for start in range(len(text)):
            for end in (start, start + 1, start + 5, len(text)):
                assert model.detokenize(cutter.cut(text[start:end])) == text[start:end]


def test_common_tokens_are_the_same_bytes(retokenized: Retokenized) -> None:
    draft, verifier = retokenized(AS_TEXT)
    with Model.load(draft, TEXT_ONLY) as one, Model.load(verifier, TEXT_ONLY) as two:
        translation = TokenTranslation(one, two)
        assert translation.by_text
        assert 0.3 < translation.share < 0.5
        assert (np.diff(translation.target) > 0).all()
        assert len(set(translation.source.tolist())) == len(translation.source)
        for ours, theirs in zip(translation.source.tolist(), translation.target.tolist(), strict=True):
            assert one.piece(ours) == two.piece(theirs)
            assert one.is_eog(ours) == two.is_eog(theirs)


def test_naming_one_model_leaves_out_the_others_default(retokenized: Retokenized, f32_pair: tuple[Path, Path]) -> None:
    own = retokenized("other ids")[0]
    with LLM.open(verifier=own) as one, LLM.open("none", own) as wanted:
        assert (one.draft_name, one.verifier_name is not None) == (None, True)
        assert "--draft" in one.notices[0]
        assert ids(one.reply(case(1), max_tokens=8)) == ids(wanted.reply(case(1), max_tokens=8))
    with LLM.open(own) as one:
        assert (one.draft_name is not None, one.verifier_name) == (True, None)
        assert "--verifier" in one.notices[0]
        assert ids(one.reply([Message("user", "hello")], max_tokens=8))
    with LLM.open(verifier=f32_pair[1]) as pair:  # the bundled vocabulary: the default fits
        assert pair.draft_name is not None
        assert not pair.notices


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_beyond_the_shorter_vocabulary_is_drafted_or_read(draft_model: Model, temperature: float) -> None:
    prompt = draft_model.chat_prompt([Message("user", "hello")])
    prompt = np.append(prompt, draft_model.n_vocab + 5).astype(np.int32)  # a token that only the verifier has
    for shared in (100, draft_model.n_vocab):
        drafter = BranchingDrafter(
            draft_model, Context(draft_model, ContextSpec(n_ctx=256, n_seq=3, spare=64)), shared=shared
        )
        try:
            state = GenerationState(prompt, Sampling(temperature=temperature, seed=1))
            chunk = drafter.propose(state, 8)
            assert len(chunk)
            assert int(chunk.ids.max()) < shared
            for prefix, branch in drafter.draft_many(state, [prompt], 4, lambda: False, whole=prompt, tail=1):
                assert prefix[: len(prompt)].tolist() == prompt.tolist()
                assert int(branch.ids.max()) < shared
        finally:
            drafter.close()
