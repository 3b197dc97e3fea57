"""llama.cpp and the training code cut text into the same tokens, whatever the text."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edgellm.engine import Model
from models.home.corpus import SIZE
from models.rendering import SPECIAL

TRAINED_WITH = Tokenizer.from_file(str(Path(__file__).parents[2] / "models" / "tokenizer.json"))
AS_TEXT = Tokenizer.from_file(str(Path(__file__).parents[2] / "models" / "tokenizer.json"))
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
    assert draft_model.detokenize(ids) == text.encode()


def test_the_vocabulary_is_the_one_trained_with(draft_model: Model, verifier_model: Model) -> None:
    assert draft_model.n_vocab == verifier_model.n_vocab == SIZE == TRAINED_WITH.get_vocab_size() <= 4096
    assert draft_model.vocabulary.fingerprint == verifier_model.vocabulary.fingerprint


def test_the_chat_template_writes_what_was_trained(draft_model: Model) -> None:
    from edgellm.engine import Message

    ids = draft_model.chat_prompt([Message("system", "Be brief."), Message("user", "Where is the mug?")])
    expected = "<|begin|><|system|>Be brief.<|end|><|user|>Where is the mug?<|end|><|assistant|>"
    assert ids.tolist() == TRAINED_WITH.encode(expected, add_special_tokens=False).ids
    assert all(TRAINED_WITH.token_to_id(token) is not None for token in SPECIAL)
