"""The text generator: seeded, split without overlap, and marking what has to be looked up."""

from __future__ import annotations

import random

import pytest

from models.case import Turn, assistant, look
from models.home import world
from models.home.corpus import case_at, held_out
from models.home.families import JUDGED, PLAIN, PRACTICE
from models.home.families.facts import UNKNOWN
from models.home.lexicon import LONG, WORDS
from models.home.world import Phrasings, Pool, Split, World

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


def test_a_made_up_word_of_the_training_text_is_no_held_out_entity(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(["kevin", "chess club", "mug"])
    monkeypatch.setattr(world, "any_word", lambda _rng: next(words))
    assert world.strange(random.Random(0), Split.TRAIN) == "mug"


@pytest.mark.parametrize("family", [*JUDGED, *PRACTICE])
@pytest.mark.parametrize("size", [0.0, 1.0, 6.0])
def test_every_family_ends_with_an_answer_whose_look_ups_stand_in_it(family: str, size: float) -> None:
    for seed in range(40):
        case = {**JUDGED, **PRACTICE}[family](World(random.Random(seed), Split.TRAIN), size)
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


@pytest.mark.parametrize("split", Split)
def test_what_was_told_last_is_the_answer_and_what_was_not_told_is_unknown(split: Split) -> None:
    in_vain = 0
    for seed in range(200):
        turns = PLAIN["told"](World(random.Random(seed), split), 1.0).turns
        for at, turn in enumerate(turns):
            said = [each.text.lower() for each in turns[:at] if each.role == "user"]
            for start, end in turn.lookups:
                assert any(turn.text[start:end].lower() in text for text in said)
            if turn.role == "assistant" and turn.text == UNKNOWN:
                in_vain += 1
                assert not {each.text for each in turns[:at]} & answers_to(turns, turns[at - 1].text)
        if turns[-1].text != UNKNOWN:
            told = [each.text for each in turns[:-1] if each.role == "assistant" and turns[-1].text in each.text]
            subject = turns[-1].text[: turns[-1].lookups[0][0]]
            assert (
                told
                == [each.text for each in turns[:-1] if each.role == "assistant" and subject in each.text][-len(told) :]
            )
    assert in_vain > 50


def answers_to(turns: tuple[Turn, ...], question: str) -> set[str]:
    """Return the answers that `question` has anywhere in the conversation."""
    return {turns[at + 1].text for at, turn in enumerate(turns) if turn.text == question} - {UNKNOWN}


def test_marks_become_spans() -> None:
    turn = assistant(f"The mug is {look('on the shelf')}, says {look('Anna')}.")
    assert turn.text == "The mug is on the shelf, says Anna."
    assert [turn.text[a:b] for a, b in turn.lookups] == ["on the shelf", "Anna"]


def test_no_held_out_entity_is_a_training_word() -> None:
    held_out = {word for value in vars(world).values() if isinstance(value, Pool) for word in value.test}
    assert len(WORDS) == len(set(WORDS)) > 1000
    assert not held_out & {*WORDS, *LONG}
    assert len({*WORDS, *LONG}) == len(WORDS) + len(LONG)
