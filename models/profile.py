"""Makes the profile of a pair, on held-out cases that nothing else uses.

    python -m models.profile [--pair home] [--cases N]

The times in it are this machine's. It is found by the hashes of both models, so make it again with them.
"""

import argparse
import sys

from edgellm.engine import Message
from edgellm.llm import LLM
from models.pairs import PAIRS, Pair

SEED = 1001  # differs from that of the cases that measure quality
CASES = 300  # for each family
FEW = 25  # for each family of the code pair: 100 prompts are what people will have


def prompts(pair: Pair, cases: int) -> list[list[Message]]:
    """Return `cases` prompts of each family of a pair."""
    drawn = [case for family in pair.families for case in pair.held_out(family, cases, SEED)]
    return [[Message(turn.role, turn.text) for turn in case.prompt] for case in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="home")
    parser.add_argument("--cases", type=int, help="a family")
    arguments = parser.parse_args()
    pair = PAIRS[arguments.pair]
    with LLM.open(pair.file("draft"), pair.file("verifier")) as llm:
        profile = llm.profile(prompts(pair, arguments.cases or (FEW if arguments.pair == "code" else CASES)))
        profile.save(pair.profile)
    sys.stdout.write(
        f"{pair.profile.name}: {profile.terms.chunks} chunks of {profile.terms.prompts} prompts, attention of layer"
        f" {profile.terms.layers[0]}\n"
    )


if __name__ == "__main__":
    main()
