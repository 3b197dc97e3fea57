"""The tasks of CoordGen's evaluation, and recorded greedy replies to them.

For the home pair they are four families of the little world: `summary` (a day's log), `rag` (questions about notes),
`ui` (device commands) and `reply` (answers to messages); for the code pair its families. Cases of a task come one after
another, as on a device, so that past cases can be drafted from.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.spec.types import Ids
from models.pairs import PAIRS

TASKS = {
    "home": {"summary": "summary", "rag": "qa", "ui": "command", "reply": "reply"},
    "code": {family: family for family in PAIRS["code"].families},
}
"""Families by the paper's names of its tasks, for each pair."""

SEED = 4004


def files_of(pair: str) -> dict[str, Path]:
    """Return the files of a pair's models by the names that tables have, the verifier first."""
    prefix = "edgellm-" if pair == "home" else f"{pair} "
    return {f"{prefix}{name}": PAIRS[pair].file(name) for name in ("verifier", "draft")}


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt in token ids, and its greedy reply, with the token that ends the turn if there is one."""

    prompt: Ids
    reply: tuple[int, ...]


def recorded(model: Model, task: str, cases: int, most: int = 120, seed: int = SEED, pair: str = "home") -> list[Reply]:
    """Return greedy replies of `model` to `cases` of a pair's task."""
    found = []
    with Context(model, ContextSpec(n_ctx=model.n_ctx_train)) as context:
        for case in PAIRS[pair].held_out(TASKS[pair][task], cases, seed):
            prompt = model.chat_prompt([Message(turn.role, turn.text) for turn in case.prompt])
            row = context.decode(prompt[context.sync(prompt) :])[0]
            reply = [int(row.argmax())]
            while not model.is_eog(reply[-1]) and len(reply) < most:
                reply.append(int(context.decode(np.array(reply[-1:], dtype=np.int32))[0].argmax()))
            found.append(Reply(prompt, tuple(reply)))
    return found
