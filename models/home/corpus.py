"""Seeded streams of cases of the little world."""

import random
from collections.abc import Iterator

from models.case import Case, Turn
from models.home.families import FAMILIES, JUDGED, PRACTICE
from models.home.lexicon import WORDS
from models.home.world import Split, World

SYSTEMS = (
    "You are a helpful assistant.",
    "You help at home. Answer in one sentence.",
    "Answer from the notes.",
    "Be brief and friendly.",
    "You are the assistant of a home.",
)
SIZE = 2560
"""Tokens of the vocabulary."""
TRAINING_SEED = 20_000_003
HELD_OUT_SEED = 77


def case_at(index: int, size: float, mixture: dict[str, float], seed: int = TRAINING_SEED) -> Case:
    """Return case number `index` of the training stream, always the same for one index."""
    rng = random.Random(f"{seed}/{index}")
    family = rng.choices(list(mixture), list(mixture.values()))[0]
    case = {**JUDGED, **PRACTICE}[family](World(rng, Split.TRAIN, strange_share=0.5), rng.random() ** 0.5 * size)
    if rng.random() < 0.12:
        case = Case(case.family, (Turn("system", rng.choice(SYSTEMS)), *case.turns), case.metric)
    return case


def held_out(family: str, count: int, seed: int = HELD_OUT_SEED) -> Iterator[Case]:
    """Return `count` cases of entities and wordings that training never shows, at every size."""
    for index in range(count):
        rng = random.Random(f"{seed}/{family}/{index}")
        yield JUDGED[family](World(rng, Split.TEST), rng.random())


def texts(count: int = 4000) -> Iterator[str]:
    """Return the texts from which the tokenizer learns: all words, and `count` cases a family."""
    yield from SYSTEMS
    for word in WORDS:
        yield f"{word}" + f" {word}" * 6
    for index in range(count):
        for number, make in enumerate(FAMILIES.values()):
            rng = random.Random(f"{TRAINING_SEED}/tokenizer/{number}/{index}")
            for turn in make(World(rng, Split.TRAIN, strange_share=0.02), 1.0).turns:
                yield turn.text
