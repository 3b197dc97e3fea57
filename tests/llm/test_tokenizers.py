"""Pairs whose vocabularies differ: in unused tokens, or altogether. Either way the text is the verifier's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.engine.model import TEXT_ONLY
from edgellm.llm import LLM
from edgellm.spec.drafters.parallel import BranchingDrafter
from edgellm.spec.drafters.translation import TextCutter, TokenTranslation
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Notice, Sampling
from testkit.gguf.architectures import write as random_model
from testkit.retokenized import ONE_TOKENIZER, PAIRS, permuted, sentencepiece, write
from tests.llm.conftest import Retokenized
from tests.spec.real import case, ids

AS_TEXT = "few common tokens"


@pytest.mark.parametrize("name", PAIRS)
def test_greedy_replies_are_the_verifiers_own(name: str, retokenized: Retokenized) -> None:
    draft, verifier = retokenized(name)
    accepted = 0
    with LLM.open("none", verifier, threads=1) as alone, LLM.open(draft, verifier, threads=1) as pair:
        translated = any("different tokenizers" in notice for notice in pair.notices)
        assert translated is (list(PAIRS).index(name) >= ONE_TOKENIZER)
        for number in range(2):
            wanted = ids(alone.reply(case(number), max_tokens=24, retrieval="off"))
            assert ids(pair.reply(case(number), max_tokens=24)) == wanted
            reply = pair.reply(case(number), max_tokens=24, retrieval="off", gate="always", gamma=4)
            assert ids(reply) == wanted
            accepted += reply.summary.accepted
            assert reply.summary.share_verified == 1.0
    assert accepted > 5


@pytest.mark.parametrize("name", ["other ids", "other merges", AS_TEXT, "a SentencePiece draft"])
def test_other_characters_and_broken_ones_do_no_harm(
    name: str, retokenized: Callable[[str], tuple[Path, Path]]
) -> None:
    draft, verifier = retokenized(name)
    text = "Grüße 你好 🦙\n\n  <|im_end|> [/begin|>\tend "
    with LLM.open("none", verifier, threads=1) as alone, LLM.open(draft, verifier, threads=1) as pair:
        for prompt in (text, text.encode()[:-9].decode(errors="ignore")):
            assert ids(pair.reply(prompt, max_tokens=16)) == ids(alone.reply(prompt, max_tokens=16))
            assert ids(pair.complete(prompt, max_tokens=16)) == ids(alone.complete(prompt, max_tokens=16))
        some = pair.prompt_ids(text)[:-2].tolist()
        assert ids(pair.complete(some, max_tokens=16)) == ids(alone.complete(some, max_tokens=16))


def test_a_model_that_cannot_help_is_no_error(tmp_path: Path, retokenized: Retokenized) -> None:
    random_model("gemma3", tmp_path / "random.gguf")
    write(tmp_path / "random.gguf", tmp_path / "other.gguf", lambda tokens: sentencepiece(permuted(tokens)))
    _, verifier = retokenized("other ids")
    with LLM.open("none", verifier, threads=1) as alone, LLM.open(tmp_path / "other.gguf", verifier, threads=1) as pair:
        for temperature in (0.0, 0.7):
            asked: dict[str, Any] = {"max_tokens": 16, "temperature": temperature, "seed": 3, "retrieval": "off"}
            reply = pair.reply(case(1), **asked)
            assert ids(reply) == ids(alone.reply(case(1), **asked))
            assert reply.summary.acceptance_rate is None or reply.summary.acceptance_rate < 0.5


def test_what_does_not_work_between_tokenizers_is_off_with_its_reason(retokenized: Retokenized) -> None:
    with LLM.open(*retokenized("other ids"), threads=1) as pair:
        assert "100% of the draft model's tokens" in pair.notices[0]
        wanted = ids(pair.reply(case(2), max_tokens=16))
        options: tuple[tuple[dict[str, Any], str], ...] = (
            ({"budget": 0.3}, "the budget of 0.3"), ({"gate": "importance", "budget": 0.3}, "the gate importance"),
            ({"gate": "never"}, "the gate never"), ({"early_exit": True}, "the early exit"),
            ({"budget": 0.0}, "the budget of 0.0"),
        )  # fmt: skip
        for changes, said in options:
            reply = pair.reply(case(2), ReplyOptions(max_tokens=16, **changes))
            heard: list[Notice] = []
            reply.listen(heard.append)
            list(reply)
            assert any(said in notice.text for notice in heard), changes
            assert reply.summary.share_verified == 1.0
        assert ids(pair.reply(case(2), max_tokens=16, logprobs=2)) == wanted


@pytest.mark.parametrize("name", ["other merges", AS_TEXT])
def test_sampled_replies_are_the_verifiers_own_for_a_seed(retokenized: Retokenized, name: str) -> None:
    draft, verifier = retokenized(name)
    tested = accepted = 0
    with LLM.open("none", verifier, threads=1) as alone, LLM.open(draft, verifier, threads=1) as pair:
        for seed in range(8):
            asked: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "seed": seed, "retrieval": "off"}
            reply = pair.reply(case(3), gate="always", gamma=4, **asked)
            assert ids(reply) == ids(alone.reply(case(3), **asked))
            tested += reply.summary.tested
            accepted += reply.summary.accepted
    assert accepted > tested // 4 > 5


@pytest.mark.parametrize("name", ["other ids", "other merges", "a SentencePiece draft"])
def test_the_middle_of_a_text_is_cut_without_losing_bytes(
    name: str, retokenized: Callable[[str], tuple[Path, Path]]
) -> None:
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


def test_naming_one_model_leaves_the_default_of_the_other_out(
    retokenized: Retokenized, f32_pair: tuple[Path, Path]
) -> None:
    own = retokenized("other ids")[0]
    with LLM.open(verifier=own) as one, LLM.open("none", own) as wanted:
        assert (one.draft_name, one.verifier_name is not None) == (None, True)
        assert "-m" in one.notices[0]
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
