"""Words that are no entities of the little world: ordinary ones, compounds, or invented."""

import random

from models.home.lexicon import LONG, WORDS

_ONSETS = (
    "b",
    "d",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "z",
    "br",
    "dr",
    "gl",
    "kr",
    "pl",
    "st",
    "tr",
)
_NUCLEI = ("a", "e", "i", "o", "u", "ai", "ea", "ou", "ie")
_CODAS = ("", "", "n", "r", "l", "s", "m", "x", "nd", "rt", "ck", "th")
_SMALL_WORDS = """
    the i we to you no in is it at be my he of on or and for do so as ask
"""
_SMALL = tuple(_SMALL_WORDS.split())


def any_word(rng: random.Random) -> str:
    """Return a word that is ordinary, made of two (whole, halves, or one that begins like a small word, as Isaac and
    Thelma do), or invented, so that every piece of a word is copied before and after every other.
    """
    roll = rng.random()
    if roll < 0.4:
        return rng.choice(WORDS if roll < 0.15 else LONG)
    if roll < 0.5:
        return rng.choice(WORDS) + rng.choice(WORDS)
    if roll < 0.6:
        first, second = rng.choice(LONG), rng.choice(LONG)
        return first[: rng.randint(2, len(first) - 1)] + second[rng.randint(1, len(second) - 2) :]
    if roll < 0.68:
        return rng.choice(_SMALL) + rng.choice((rng.choice(LONG)[2:], invented(rng)))
    return invented(rng)


def invented(rng: random.Random) -> str:
    """Return an invented word of one to three syllables, in lower case."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_NUCLEI) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 2, 3)))
    )
