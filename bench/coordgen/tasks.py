"""The tasks of CoordGen's evaluation, and recorded greedy replies to them.

For the home pair they are four families of the little world: `summary` (a day's log), `rag` (questions about notes),
`ui` (device commands) and `reply` (answers to messages); for the code pair its families. Cases of a task come one after
another, as on a device, so that past cases can be drafted from.
"""

from dataclasses import dataclass

import numpy as np

from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.spec.types import Ids
from models.pairs import PAIRS

TASKS = {"summary": "summary", "rag": "qa", "ui": "command", "reply": "reply"}
"""Families of questions by the paper's names of its tasks."""

SEED = 4004
_MOST = 120  # tokens of a reply


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt in token ids, and its greedy reply, with the token that ends the turn if there is one."""

    prompt: Ids
    reply: tuple[int, ...]


def recorded(model: Model, task: str, cases: int) -> list[Reply]:
    """Return greedy replies of `model` to `cases` of a task."""
    found = []
    with Context(model, ContextSpec(n_ctx=model.n_ctx_train)) as context:
        for case in PAIRS["home"].held_out(TASKS[task], cases, SEED):
            prompt = model.chat_prompt([Message(turn.role, turn.text) for turn in case.prompt])
            row = context.decode(prompt[context.sync(prompt) :])[0]
            reply = [int(row.argmax())]
            while not model.is_eog(reply[-1]) and len(reply) < _MOST:
                reply.append(int(context.decode(np.array(reply[-1:], dtype=np.int32))[0].argmax()))
            found.append(Reply(prompt, tuple(reply)))
    return found
