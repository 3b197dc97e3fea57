"""One-time codes such as 7-lamp-otter: a number that says which device shows it, and two words that are the secret."""

from __future__ import annotations

import difflib
import secrets
from dataclasses import dataclass
from typing import Self

from edgellm.errors import InvalidOption

NUMBERS = 99

# 256 words, 8 bits each. No two begin with the same three letters, and to make one of another takes three changes.
_LIST = """
    acorn album alpaca amber anchor apple arrow aspen atlas attic autumn badge bamboo banjo barrel basket beach
    beetle berry bicycle bison blossom boat bonfire border bread broom bubble buffalo button cabin cactus camel
    candle carpet cedar cello chalk cheese chimney circus clover cobbler coconut copper coral cousin coyote crayon
    cricket crown crystal curtain cushion cymbal daisy dancer dawn deer denim diamond dolphin domino donkey drum
    duck eagle echo eclipse elbow elm engine evening fabric falcon feather fennel fern fiddle field finger flag
    fleece flute forest fossil fox galaxy garden giraffe glacier goblet gondola goose grape guitar gull harbor
    helmet hippo hobby hoof hotel husky hydrant ice igloo insect iris island ivory jaguar jasmine jewel jigsaw
    journal juggler kayak kimono kingdom kiosk kitten kiwi knight koala ladder lagoon lamp lantern leaf lemon
    leopard lilac linen lizard lobster locket lotus lunch lynx magnet marble meadow mermaid mirror mole mosaic
    muffin museum napkin nectar nest nickel noodle nutmeg oasis oatmeal oboe ocean olive onion orange orbit orchid
    ostrich otter owl pajama panda paper pearl pelican piano pigeon pillow pirate planet polar poncho poppy potato
    pretzel pumpkin puzzle pyramid quail queen quiver rabbit radish raft rainbow raven rhubarb ribbon ring ruby
    saffron sailor sapling sauna scarf school scooter sequoia shell ship silver skate sledge slipper snow sofa
    spider spoon spruce squash stable stork sugar summer sunset syrup taxi teapot teddy temple tennis thimble
    thunder topaz torch tractor trout trumpet tulip tundra turtle tuxedo twig valley vase vessel viking violin
    waffle walnut weaver wheat window wombat yacht yogurt zebra zenith zigzag
"""
WORDS = tuple(_LIST.split())


@dataclass(frozen=True, slots=True)
class Code:
    """A code shown on one screen and typed at the other device. The words hold 16 bits, and one guess is allowed."""

    number: int
    words: tuple[str, str]

    def __str__(self) -> str:
        return "-".join((str(self.number), *self.words))

    @property
    def password(self) -> bytes:
        """The password for SPAKE2."""
        return str(self).encode()

    @classmethod
    def new(cls, number: int) -> Self:
        """Return a random code with this number."""
        return cls(number, (secrets.choice(WORDS), secrets.choice(WORDS)))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a code as people type it: any case, spaces for dashes, three letters or more of each word.

        A wrong word is found here, before it costs the only guess.

        Raises:
            InvalidOption: the text is not a code; may suggest the word that was meant.
        """
        number, *words = text.lower().replace("-", " ").replace("_", " ").split() or [""]
        counts = number.isascii() and number.isdigit() and len(number) <= 3 and 1 <= int(number) <= NUMBERS
        if not counts or len(words) != 2:
            raise InvalidOption(f"{text!r} is not a pairing code.", "A code is a number and two words: 7-lamp-otter.")
        return cls(int(number), (_word(words[0]), _word(words[1])))


def _word(typed: str) -> str:
    found = [word for word in WORDS if word == typed] or [
        word for word in WORDS if len(typed) >= 3 and word.startswith(typed)
    ]
    if found:
        return found[0]
    near = difflib.get_close_matches(typed, WORDS, n=1, cutoff=0.5)
    hint = f" Is it {near[0]!r}?" if near else ""
    raise InvalidOption(f"{typed!r} is not a word of any code.{hint}", "Look at the other screen again.")
