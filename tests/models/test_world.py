"""The text generator: seeded, split without overlap, and marking what has to be looked up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import Model
from models.home import world
from models.home.corpus import SIZE, case_at, held_out
from models.home.families import JUDGED
from models.home.lexicon import LONG, WORDS
from models.home.world import Phrasings, Pool
from models.pairs import PAIRS
from models.rendering import SPECIAL

SHARED = ("facts", "wordings", "plain_wordings")


def test_a_case_is_the_same_whenever_it_is_asked_for() -> None:
    mixture = dict.fromkeys(JUDGED, 1.0)
    assert [case_at(n, 0.7, mixture) for n in range(50)] == [case_at(n, 0.7, mixture) for n in range(50)]
    assert list(held_out("qa", 20)) == list(held_out("qa", 20))


def test_training_and_held_out_share_neither_entities_nor_wordings() -> None:
    pools = [value for value in vars(world).values() if isinstance(value, Pool)]
    modules = [__import__(f"models.home.families.{name}", fromlist=["*"]) for name in (*JUDGED, *SHARED)]
    wordings = [value for module in modules for value in vars(module).values() if isinstance(value, Phrasings)]
    assert len(pools) >= 8
    assert len(wordings) >= 25
    split: list[Pool | Phrasings] = [*pools, *wordings]
    for each in split:
        assert not set(each.train) & set(each.test)


@pytest.mark.parametrize("family", ["qa", "command", "reply"])
def test_what_is_looked_up_stands_in_the_prompt(family: str) -> None:
    for case in held_out(family, 60):
        prompt = case.prompt[-1].text
        for start, end in case.turns[-1].lookups:
            assert case.answer[start:end] in prompt


def test_no_held_out_entity_is_a_training_word() -> None:
    held_out = {word for value in vars(world).values() if isinstance(value, Pool) for word in value.test}
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert not held_out & {*WORDS, *LONG}
    assert len({*WORDS, *LONG}) == len(WORDS) + len(LONG)


# --- its tokenizer ----------------------------------------------------------------------------------------------------


TRAINED_WITH, AS_TEXT = PAIRS["home"].tokenizer(), PAIRS["home"].tokenizer()
AS_TEXT.encode_special_tokens = True  # as in llama.cpp, where nobody can write a control token into a prompt
SPACES = st.sampled_from(list(" \n\t\r\x0b\x0c\x1c\x85\xa0\u1680\u180e\u2003\u200b\u2028\u3000\ufeff"))
TEXT = st.lists(
    st.text(max_size=12) | st.text(SPACES, max_size=4) | st.sampled_from(["don't", " 12:45", "the mug ", *SPECIAL])
)


@settings(max_examples=150)
@given(parts=TEXT)
def test_both_tokenizers_agree_on_arbitrary_text(draft_model: Model, parts: list[str]) -> None:
    text = "".join(parts)
    ids = draft_model.tokenize(text).tolist()
    assert ids == AS_TEXT.encode(text, add_special_tokens=False).ids
    assert draft_model.detokenize(ids) == b"".join(map(draft_model.piece, ids)) == text.encode()


def test_the_vocabulary_is_the_one_trained_with(draft_model: Model, verifier_model: Model) -> None:
    assert draft_model.n_vocab == verifier_model.n_vocab == SIZE == TRAINED_WITH.get_vocab_size() <= 4096
    assert draft_model.vocabulary.fingerprint == verifier_model.vocabulary.fingerprint


def test_the_chat_template_writes_what_was_trained(draft_model: Model) -> None:
    from edgellm.engine import Message

    ids = draft_model.chat_prompt([Message("system", "Be brief."), Message("user", "Where is the mug?")])
    expected = "<|begin|><|system|>Be brief.<|end|><|user|>Where is the mug?<|end|><|assistant|>"
    assert ids.tolist() == TRAINED_WITH.encode(expected, add_special_tokens=False).ids
    assert all(TRAINED_WITH.token_to_id(token) is not None for token in SPECIAL)
