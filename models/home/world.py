"""The little world that the bundled models speak about: a home, its people, things, rooms and days.

Every pool is split once: `Split.TRAIN` entities make the training text, `Split.TEST` entities only the held-out cases.
Invented words in both keep the models from learning names by heart: they have to copy what they read.
"""

import random
from dataclasses import dataclass, field
from enum import StrEnum

from models.home.strange import any_word, invented


class Split(StrEnum):
    TRAIN = "train"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Pool:
    """Words of one kind; the two tuples are disjoint."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        return self.train if split is Split.TRAIN else self.test


def pool(train: str, test: str) -> Pool:
    """Return a pool from two comma-separated lists."""
    first, second = (
        tuple(" ".join(word.split()) for word in text.split(",") if word.strip()) for text in (train, test)
    )
    assert not set(first) & set(second), set(first) & set(second)
    return Pool(first, second)


NAMES = pool(
    """
    Anna, Ben, Carla, David, Emma, Felix, Greta, Hugo, Ida, Jonas, Karin, Leo, Mia, Noah, Olga, Paul, Rosa, Simon,
    Tina, Uwe, Vera, Willi, Yara, Zoe, Adam, Bella, Carl, Dora, Erik, Flora, Georg, Helen, Ivan, Julia, Klaus, Lara,
    Max, Nina, Oskar, Petra, Ralf, Sofia, Tom, Ulla, Victor, Wanda, Xaver, Yvonne, Zita, Albert, Brenda, Conrad,
    Diana, Edgar, Frida, Gustav, Hanna, Igor, Jana, Kurt, Lena, Martin, Nora, Otto, Pia, Robert, Sara, Theo, Ursula,
    Vince, Wendy, Alice, Bruno, Clara, Dennis, Eva, Fred, Gina, Henry, Irene, Jack, Kate, Luis, Maria, Nick, Olivia,
    Peter, Rita, Sam, Tara, Umar, Viola, Walter, Amy, Boris, Cora, Dean, Elsa, Frank, Gloria, Harry, Iris, James,
    Kim, Linda, Mark, Nadia
    """,
    """
    Arthur, Bianca, Cyril, Daphne, Elias, Fiona, Gareth, Hilda, Isaac, Jasmin, Kevin, Lotte, Marlon, Nelly, Orlando,
    Pamela, Quentin, Renate, Stefan, Thelma, Valentin, Wilma, Yusuf, Zelda, Agnes, Bernard, Celia, Dmitri, Esther,
    Gordon
    """,
)
THINGS = pool(
    """
    mug, keys, umbrella, laptop, charger, scarf, wallet, passport, torch, hammer, drill, ladder, kettle, pan,
    blanket, pillow, book, notebook, camera, headphones, tablet, helmet, backpack, suitcase, jacket, gloves, hat,
    boots, slippers, towel, bucket, broom, mop, iron, lamp, candle, vase, clock, radio, remote, guitar, violin,
    ball, racket, tent, rope, saw, pliers, screws, tape, glue, brush, paint, scissors, stapler, printer, cable,
    battery, medicine, thermometer, plaster, soap, shampoo, comb, mirror, basket, bottle, jar, bowl, plate, fork,
    knife, spoon, teapot, toaster, mixer, scale, grater, sieve, tray, cushion, rug, curtain, stool, bicycle, pump,
    scooter, sledge, skates, map, puzzle, doll
    """,
    """
    hourglass, compass, telescope, whisk, ladle, corkscrew, tripod, harmonica, trumpet, hammock, wheelbarrow, rake,
    shovel, hairdryer, razor, stamp album, calculator, microphone, lantern, cape, apron, goggles, snorkel, kite,
    chisel
    """,
)
ADJECTIVES = pool(
    """
    red, blue, green, yellow, black, white, grey, brown, old, new, big, small, round, wooden, spare, broken, good,
    long
    """,
    """
    purple, orange, tiny, heavy, shiny, striped, dusty, golden
    """,
)
ROOMS = pool(
    """
    kitchen, hall, bedroom, bathroom, living room, office, garage, cellar, attic, garden, balcony, guest room,
    workshop, nursery, dining room, pantry, laundry room, porch, shed, library
    """,
    """
    studio, conservatory, playroom, corridor, boiler room, music room, cloakroom, terrace
    """,
)
FURNITURE = pool(
    """
    shelf, table, desk, chair, sofa, bed, cupboard, drawer, box, wardrobe, bench, fridge, counter, window, door,
    stove, sink, bookcase, chest, rack, dresser, heater, piano, mat, bin, washing machine, television, fireplace,
    stairs
    """,
    """
    crate, armchair, sideboard, trunk, radiator, cabinet, footstool, mantelpiece, hamper, locker
    """,
)
EVENTS = pool(
    """
    dinner, meeting, party, lesson, exam, concert, match, picnic, film night, haircut, interview, rehearsal,
    checkup, delivery, dentist visit, yoga class, book club, birthday lunch, parents evening, swimming course,
    workshop, call, game night, walk, breakfast, market day, school play, inspection, flight, choir practice
    """,
    """
    barbecue, wedding, auction, chess club, vaccination, photo session, recital, lecture, excursion, brunch
    """,
)
VENUES = pool(
    """
    station, library, harbour, town hall, cinema, cafe, museum, school, bakery, park, stadium, theatre, market,
    pool, church, hospital, airport, bridge, zoo, gym, old mill, bus stop, ice rink, post office, book shop
    """,
    """
    aquarium, castle, lighthouse, fountain, opera, town gate, brewery, campsite, planetarium, ferry
    """,
)
CHORES = pool(
    """
    water the plants, feed the cat, take out the bins, walk the dog, pay the rent, call the bank, buy milk, buy
    bread, clean the oven, wash the car, mow the lawn, book the train, fix the tap, change the sheets, empty the
    dishwasher, renew the passport, return the books, order the filter, charge the bikes, sweep the stairs, pick up
    the parcel, sign the form, fold the laundry, check the smoke alarm, bake the cake, cut the hedge, post the
    letter
    """,
    """
    descale the kettle, polish the shoes, defrost the freezer, prune the roses, wind the clock, air the cellar,
    collect the prescription, insure the bikes, refill the salt, sharpen the knives
    """,
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SIDES = ("on", "under", "behind", "in", "next to", "beside", "near", "on top of", "in front of")

NEEDLESS_SHARE = 0.15
_NEEDLESS = """
    really now again there just also then today perhaps soon well always still maybe here later almost quite indeed
    though anyway simply surely once only even already yesterday often mostly finally actually certainly
"""
NEEDLESS = tuple(_NEEDLESS.split())


HELD_OUT = frozenset(
    entity.lower()
    for words in (NAMES, THINGS, ADJECTIVES, ROOMS, FURNITURE, EVENTS, VENUES, CHORES)
    for entity in words.test
)


def strange(rng: random.Random, split: Split) -> str:
    """Return a word in place of an entity; held-out ones are always invented, and training never draws them."""
    if split is Split.TEST:
        return invented(rng)
    while (word := any_word(rng)) in HELD_OUT:
        pass
    return word


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Wordings of one meaning; held-out cases use only wordings that training never saw."""

    train: tuple[str, ...]
    test: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        return self.train if split is Split.TRAIN else self.test


def phrasings(train: str, test: str) -> Phrasings:
    """Return phrasings from two lists, one wording a line."""
    first, second = (
        tuple(line.strip() for line in text.strip().splitlines() if line.strip()) for text in (train, test)
    )
    assert first
    assert second
    assert not set(first) & set(second)
    return Phrasings(first, second)


@dataclass(slots=True)
class World:
    """Draws entities for one case. Within a case no entity of a kind is drawn twice."""

    rng: random.Random
    split: Split
    strange_share: float = 0.12
    _used: set[str] = field(default_factory=set)

    def pick(self, words: Pool) -> str:
        """Return a word that this case has not used yet; an invented one if the pool is used up."""
        for _ in range(64):
            word = self.rng.choice(words.of(self.split))
            if self.rng.random() < self.strange_share:
                word = strange(self.rng, self.split)
            if word not in self._used:
                self._used.add(word)
                return word
        return strange(self.rng, self.split)

    def questions(self, most: int) -> int:
        """Return the number of questions about a context: one in held-out cases, several in training."""
        return 1 if self.split is Split.TEST else min(most, self.rng.randint(2, 6))

    def name(self) -> str:
        name = self.pick(NAMES)
        return name[0].upper() + name[1:]

    def thing(self) -> str:
        """Return a thing such as `mug` or `blue mug`."""
        thing = self.pick(THINGS)
        return f"{self.adjective()} {thing}" if self.rng.random() < 0.4 else thing

    def adjective(self) -> str:
        """Return a known adjective, in training also any other word, so that any word may stand before a thing."""
        if self.split is Split.TRAIN and self.rng.random() < self.strange_share:
            return strange(self.rng, self.split)
        return self.rng.choice(ADJECTIVES.of(self.split))

    def room(self) -> str:
        return self.pick(ROOMS)

    def place(self) -> str:
        """Return a place such as `on the shelf in the kitchen`, with or without the room."""
        spot = f"{self.rng.choice(SIDES)} the {self.pick(FURNITURE)}"
        return f"{spot} in the {self.room()}" if self.rng.random() < 0.5 else spot

    def event(self) -> str:
        return self.pick(EVENTS)

    def venue(self) -> str:
        return self.pick(VENUES)

    def chore(self) -> str:
        for _ in range(64):
            chore = self.rng.choice(CHORES.of(self.split))
            if self.rng.random() < self.strange_share:
                verb = self.rng.choice(("clean", "fix", "buy", "return", "order", "check", "wash", "paint"))
                rest = f"the {strange(self.rng, self.split)}"
                if self.split is Split.TRAIN:  # the verb is as unknown as its object
                    verb = verb if self.rng.random() < 0.3 else strange(self.rng, self.split)
                    rest = rest if self.rng.random() < 0.6 else chore.split(" ", 1)[1]
                chore = f"{verb} {rest}"
            if chore not in self._used:
                self._used.add(chore)
                return chore
        return f"clean the {strange(self.rng, self.split)}"

    def verb(self) -> str:
        """Return a word in the place of a verb, known or not, so that facts are found beside unknown verbs, too."""
        return strange(self.rng, self.split)

    def day(self) -> str:
        return self.rng.choice(DAYS)

    def clock(self) -> str:
        """Return a time such as `7:30`."""
        minute = self.rng.choice((0, 0, 15, 30, 45, self.rng.randrange(60)))
        return f"{self.rng.randrange(1, 24)}:{minute:02d}"

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def code(self) -> str:
        return "".join(str(self.rng.randrange(10)) for _ in range(4))

    def say(self, phrasings: Phrasings) -> str:
        """Return a wording of this split; in training sometimes with a needless word, as unknown wordings have."""
        wording = self.rng.choice(phrasings.of(self.split))
        if self.split is Split.TRAIN and self.rng.random() < NEEDLESS_SHARE:
            return self._with_a_needless_word(wording)
        return wording

    def _with_a_needless_word(self, wording: str) -> str:
        """Insert a word between two others, not beside a slot, where it would seem a part of the entity."""
        words = wording.split(" ")
        places = [at for at in range(1, len(words)) if _fixed(words[at - 1]) and _fixed(words[at])]
        if not places:
            return wording
        extra = self.rng.choice(NEEDLESS) if self.rng.random() < 0.8 else invented(self.rng)
        words.insert(self.rng.choice(places), extra)
        return " ".join(words)


def _fixed(word: str) -> bool:
    """Return whether a word of a wording is no slot, or one for a name: names begin with a capital."""
    return "{" not in word or word.startswith(("{n}", "{me}", "{s}"))
