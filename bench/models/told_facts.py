"""Count the right answers of the bundled pair to what it was told before, in ten conversations as people type them.

    python -m bench.models.told_facts

Greedy, every token verified. A conversation is right if its last reply is the expected one, and a question before the
telling is answered by the sentence that asks for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import hardware
from bench.harness.report import write
from edgellm.cli.options.hardware import DRAFT
from edgellm.engine import Message
from edgellm.llm import LLM
from models.home.families.facts import UNKNOWN

CONVERSATIONS: tuple[tuple[list[str], str], ...] = (
    (["where is my mug?", "The mug is on the shelf.", "where is my mug?"], "The mug is on the shelf."),
    (["Where did I put my keys?", "in the drawer", "So where are my keys?"], "The keys is in the drawer."),
    (["Anna has the umbrella.", "Thanks!", "Who has the umbrella?"], "For the umbrella ask Anna."),
    (["When is the concert?", "On Friday at 19:30", "When is the concert?"], "The concert is Friday at 19:30."),
    (
        ["My passport is in the desk.", "No, it is in the office now.", "Where is my passport?"],
        "The passport is in the office.",
    ),
    (
        ["who has to feed the cat?", "Ben", "How are you?", "Tell me who has to feed the cat."],
        "The one who has to feed the cat is Ben.",
    ),
    (
        ["The code for the garage is 4711.", "The code for the shed is 1234.", "What is the code for the garage?"],
        "The code for the garage is 4711.",
    ),
    (
        ["Hi", "I put the camera on the shelf in the hall", "The dinner is on Sunday at 18:00.", "where's the camera?"],
        "The camera is on the shelf in the hall.",
    ),
    (
        ["Who has my drill?", "I lent it to Tom.", "And who has the ladder?", "Rosa has it", "Who has my drill?"],
        "For the drill ask Tom.",
    ),
    (
        ["The meeting is on Monday at 9:00.", "Actually, it is on Tuesday at 10:00.", "When is the meeting?"],
        "The meeting is Tuesday at 10:00.",
    ),
)
"""What is said in each, and the last answer."""


def conversation(pair: LLM, said: Sequence[str]) -> list[str]:
    """Return the replies to what is `said`, one after the other."""
    messages: list[Message] = []
    for text in said:
        messages.append(Message("user", text))
        reply = pair.reply(messages, max_tokens=48)
        list(reply)
        messages.append(Message("assistant", reply.summary.text))
    return [message.content for message in messages if message.role == "assistant"]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what was said, the last reply, and whether all is right, of each conversation."""
    rows = []
    own, own_draft = hardware.of(arguments), hardware.of(arguments, DRAFT)
    with LLM.open(history=False, hardware=own, draft_hardware=own_draft) as pair:
        for said, answer in CONVERSATIONS:
            replies = conversation(pair, said)
            asked_first = said[0].endswith("?")
            right = replies[-1] == answer and (not asked_first or replies[0] == UNKNOWN)
            rows.append({"said": said, "replies": replies, "answer": answer, "right": right})
    return rows


def table(figures: Mapping[str, Any]) -> str:
    """Return each conversation's last question and reply, and how many are right."""
    rows = figures["conversations"]
    lines = [f"{'right' if row['right'] else 'wrong':6}{row['said'][-1]:42}{row['replies'][-1]}\n" for row in rows]
    return "".join(lines) + f"{sum(row['right'] for row in rows)} of {len(rows)} are right\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="told_facts", help="of the result file")
    hardware.add_arguments(parser)
    arguments = parser.parse_args()
    figures = {"conversations": measure(arguments)}
    path = write(arguments.name, "bench.models.told_facts", figures)
    sys.stdout.write(f"{table(figures)}written: {path}\n")


if __name__ == "__main__":
    main()
