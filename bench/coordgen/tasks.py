"""The tasks of CoordGen's evaluation, and recorded greedy replies to them.

The tasks are four families of the little world: `summary` (a day's log), `rag` (questions about notes), `ui` (device
commands) and `reply` (answers to messages). The code pair has four of its own. Cases of a task come one after another,
as on a device, so that past cases can be drafted from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgellm.engine import Context, Message, Model
from edgellm.spec.types import Ids
from models.pairs import PAIRS

TASKS = {"summary": "summary", "rag": "qa", "ui": "command", "reply": "reply"}
"""Families of the little world by the paper's names of its tasks."""

TASKS_OF: Mapping[str, Mapping[str, str]] = {"home": TASKS, "code": {name: name for name in PAIRS["code"].families}}
"""The families of the tasks for each pair."""

SEED = 4004


@dataclass(frozen=True, slots=True)
class Reply:
    """A prompt in token ids, and its greedy reply, with the token that ends the turn if there is one."""

    prompt: Ids
    reply: tuple[int, ...]


def recorded(model: Model, task: str, cases: int, most: int = 120, seed: int = SEED, pair: str = "home") -> list[Reply]:
    """Return greedy replies of `model`, a verifier of `pair`, to `cases` of a task."""
    found = []
    with Context(model, n_ctx=model.n_ctx_train) as context:
        for case in PAIRS[pair].held_out(TASKS_OF[pair][task], cases, seed):
            prompt = model.chat_prompt([Message(turn.role, turn.text) for turn in case.prompt])
            row = context.decode(prompt[context.sync(prompt) :])[0]
            reply = [int(row.argmax())]
            while not model.is_eog(reply[-1]) and len(reply) < most:
                reply.append(int(context.decode(np.array(reply[-1:], dtype=np.int32))[0].argmax()))
            found.append(Reply(prompt, tuple(reply)))
    return found
