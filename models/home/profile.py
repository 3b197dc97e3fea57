"""Makes the bundled pair's profile, on cases of the little world that nothing else uses.

    python -m models.home.profile [--cases 300]

The times in it are this machine's. It is found by the hashes of both models, so make it again with them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgellm.engine import Message
from edgellm.llm import LLM
from models.home.corpus import held_out
from models.home.families import JUDGED

SEED = 1001  # differs from that of the cases that measure quality
CASES = 300  # for each family
OUTPUT = Path(__file__).parents[1] / "profile.json"


def prompts(cases: int) -> list[list[Message]]:
    """Return `cases` prompts of each family."""
    drawn = [case for family in JUDGED for case in held_out(family, cases, SEED)]
    return [[Message(turn.role, turn.text) for turn in case.prompt] for case in drawn]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES, help="a family")
    questions = prompts(parser.parse_args().cases)
    with LLM.open() as pair:
        profile = pair.profile(questions, early_exit=True)
        profile.save(OUTPUT)
    sys.stdout.write(
        f"{OUTPUT.name}: {profile.chunks} chunks of {profile.prompts} prompts, attention of layer"
        f" {profile.layers[0]}, {profile.best_exit()[1]}\n"
    )


if __name__ == "__main__":
    main()
