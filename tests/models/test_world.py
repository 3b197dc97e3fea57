"""The text generator: seeded, split without overlap, and marking what has to be looked up."""

from __future__ import annotations

import random

import pytest

from models import world
from models.case import assistant, look
from models.corpus import case_at, held_out
from models.families import FAMILIES, PRACTICE
from models.world import Phrasings, Pool, Split, World


def test_a_case_is_the_same_whenever_it_is_asked_for() -> None:
    mixture = dict.fromkeys(FAMILIES, 1.0)
    assert [case_at(n, 0.7, mixture) for n in range(50)] == [case_at(n, 0.7, mixture) for n in range(50)]
    assert list(held_out("qa", 20)) == list(held_out("qa", 20))


def test_training_and_held_out_share_neither_entities_nor_wordings() -> None:
    pools = [value for value in vars(world).values() if isinstance(value, Pool)]
    modules = [__import__(f"models.families.{name}", fromlist=["*"]) for name in (*FAMILIES, "facts")]
    wordings = [value for module in modules for value in vars(module).values() if isinstance(value, Phrasings)]
    assert len(pools) >= 8
    assert len(wordings) >= 25
    split: list[Pool | Phrasings] = [*pools, *wordings]
    for each in split:
        assert not set(each.train) & set(each.test)


def test_a_made_up_word_of_the_training_text_is_no_held_out_entity(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(["kevin", "chess club", "mug"])
    monkeypatch.setattr(world, "any_word", lambda _rng: next(words))
    assert world.strange(random.Random(0), Split.TRAIN) == "mug"


@pytest.mark.parametrize("family", [*FAMILIES, *PRACTICE])
@pytest.mark.parametrize("size", [0.0, 1.0, 6.0])
def test_every_family_ends_with_an_answer_whose_look_ups_stand_in_it(family: str, size: float) -> None:
    for seed in range(40):
        case = {**FAMILIES, **PRACTICE}[family](World(random.Random(seed), Split.TRAIN), size)
        assert case.turns[-1].role == "assistant"
        assert case.prompt[-1].role == "user"
        assert case.answer.isascii()
        for start, end in case.turns[-1].lookups:
            assert case.answer[start:end].strip()


@pytest.mark.parametrize("family", ["qa", "command", "reply"])
def test_what_is_looked_up_stands_in_the_prompt(family: str) -> None:
    for case in held_out(family, 60):
        prompt = case.prompt[-1].text
        for start, end in case.turns[-1].lookups:
            assert case.answer[start:end] in prompt


def test_marks_become_spans() -> None:
    turn = assistant(f"The mug is {look('on the shelf')}, says {look('Anna')}.")
    assert turn.text == "The mug is on the shelf, says Anna."
    assert [turn.text[a:b] for a, b in turn.lookups] == ["on the shelf", "Anna"]
