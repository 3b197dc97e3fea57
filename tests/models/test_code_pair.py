"""The code pair's files: one vocabulary, a profile that is theirs, and a corpus of real code."""

import ast
from collections.abc import Iterator

import pytest

from edgellm.engine import Model
from edgellm.llm.pair_stats import read_profile
from edgellm.storage.fingerprint import fingerprint
from models.code import stdlib
from models.code.corpus import SIZE, TASKS, case_at, held_out
from models.code.stdlib import Split, library
from models.pairs import PAIRS
from models.profile import prompts


@pytest.fixture(scope="module")
def short_files_alone() -> Iterator[None]:
    """The whole library takes seconds to parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib, "LARGEST", 20_000)
        library.cache_clear()
        yield
    library.cache_clear()


pytestmark = pytest.mark.usefixtures("short_files_alone")

PAIR = PAIRS["code"]
DRAFT, VERIFIER = PAIR.file("draft"), PAIR.file("verifier")


def test_both_models_have_the_vocabulary_that_they_were_trained_with() -> None:
    trained = PAIR.tokenizer()
    with Model.load(DRAFT) as draft, Model.load(VERIFIER) as verifier:
        assert draft.n_vocab == verifier.n_vocab == SIZE == trained.get_vocab_size()
        assert draft.vocabulary.fingerprint == verifier.vocabulary.fingerprint
        text = "def area(width):\n\treturn {'width': width} # é\n"
        assert draft.tokenize(text).tolist() == trained.encode(text, add_special_tokens=False).ids


def test_the_profile_is_of_these_files_and_of_a_hundred_prompts() -> None:
    profile = read_profile(PAIR.profile, fingerprint(DRAFT), fingerprint(VERIFIER))
    assert profile.terms.prompts == len(prompts(PAIR, 25)) == 100


# --- its corpus -------------------------------------------------------------------------------------------------------


def test_a_case_is_the_same_whenever_it_is_asked_for() -> None:
    mixture = dict.fromkeys(TASKS, 1.0)
    assert [case_at(n, 0.7, mixture) for n in range(20)] == [case_at(n, 0.7, mixture) for n in range(20)]
    assert list(held_out("call", 5)) == list(held_out("call", 5))


def test_training_and_held_out_share_no_file() -> None:
    train, test = library(Split.TRAIN), library(Split.TEST)
    assert len(train.files) > 5 * len(test.files) > 50
    assert not {one.around for one in train.functions} & {one.around for one in test.functions}


def test_the_signature_and_the_call_stand_in_the_library() -> None:
    for case in held_out("signature", 30):
        assert ast.parse(case.answer)
        assert case.answer.split("\n")[0] in case.prompt[0].text
    sources = "\n".join(library(Split.TEST).files)
    assert all(case.answer in sources for case in held_out("call", 30))
