"""The code pair's tasks: seeded, split by files, and each answered by what stands in the library."""

from __future__ import annotations

import ast
import keyword
import random

import pytest

from models.code.corpus import TASKS, case_at, held_out, new_name
from models.code.stdlib import Split, library, renamed, variables

pytestmark = pytest.mark.usefixtures("short_files_alone")

FUNCTION = '''def area(width, height=2):
    """Return width times height."""
    size = width * height
    print(size, end="")
    return size'''


def test_a_case_is_the_same_whenever_it_is_asked_for() -> None:
    mixture = dict.fromkeys(TASKS, 1.0)
    assert [case_at(n, 0.7, mixture) for n in range(20)] == [case_at(n, 0.7, mixture) for n in range(20)]
    assert list(held_out("call", 5)) == list(held_out("call", 5))


def test_training_and_held_out_share_no_file() -> None:
    train, test = library(Split.TRAIN), library(Split.TEST)
    assert len(train.files) > 5 * len(test.files) > 50
    assert not {one.around for one in train.functions} & {one.around for one in test.functions}


def test_a_variable_that_stands_in_text_or_as_a_keyword_is_not_renamed() -> None:
    assert variables(FUNCTION) == ["size"]  # the docstring names the others
    assert variables("def f(end, x):\n    print(x, end=x)\n    return end, x") == ["x"]
    assert renamed(FUNCTION, "size", "big").count("big") == 3


def test_a_new_name_is_never_a_keyword() -> None:
    names = {new_name(random.Random(seed), library(Split.TRAIN)) for seed in range(20_000)}
    assert len(names) > 3_000
    assert not [name for name in names if keyword.iskeyword(name) or not name.isidentifier()]


def test_a_renamed_function_is_the_same_but_for_the_name() -> None:
    for case in held_out("rename", 30):
        source, _, question = case.prompt[0].text.rpartition("\n\n")
        _, old, _, new = question.rstrip(".").split(" ")
        assert case.answer != source
        assert ast.dump(ast.parse(renamed(case.answer, new, old))) == ast.dump(ast.parse(source))


@pytest.mark.parametrize("family", TASKS)
def test_every_task_ends_with_its_answer(family: str) -> None:
    for case in held_out(family, 30):
        assert [turn.role for turn in case.turns] == ["user", "assistant"]
        assert case.answer.strip()
        assert case.answer.isascii()


def test_the_signature_and_the_call_stand_in_the_library() -> None:
    for case in held_out("signature", 30):
        assert ast.parse(case.answer)
        assert case.answer.split("\n")[0] in case.prompt[0].text
    sources = "\n".join(library(Split.TEST).files)
    assert all(case.answer in sources for case in held_out("call", 30))
