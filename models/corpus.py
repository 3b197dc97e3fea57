"""Seeded streams of cases, and their rendering as token ids with a weight for each target."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.case import Case, Turn
from models.families import JUDGED, PRACTICE
from models.world import Split, World

# not <|start|>: llama.cpp knows that one from another family, and parses it in any prompt
START, END = "<|begin|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL = (START, END, *ROLES.values())
TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You help at home. Answer in one sentence.",
    "Answer from the notes.",
    "Be brief and friendly.",
    "You are the assistant of a home.",
)
TRAINING_SEED = 20_000_003
HELD_OUT_SEED = 77
PROMPT_WEIGHT = 0.4
PROMPT_SHARE = 4  # every fourth prompt is trained on: the head over all of them would cost a tenth of the time


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


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids of a conversation, shape (n,), and the loss weight of each id, shape (n,)."""

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


def render(case: Case, tokenizer: Tokenizer, lookup_weight: float = 1.0) -> Rendered:
    """Return the conversation in the form of the chat template.

    Assistant turns weigh 1, every fourth prompt `PROMPT_WEIGHT`; tokens of looked-up values weigh `lookup_weight`.
    """
    special = special_ids(tokenizer)
    ids: list[int] = [special[START]]
    weights: list[float] = [0.0]
    of_prompt = 0.0 if len(case.turns[0].text) % PROMPT_SHARE else PROMPT_WEIGHT
    for turn in case.turns:
        encoded = tokenizer.encode(turn.text, add_special_tokens=False)
        ids += [special[ROLES[turn.role]], *encoded.ids, special[END]]
        if turn.role == "assistant":
            inside = [_looked_up(offset, turn.lookups) for offset in encoded.offsets]
            weights += [0.0, *(lookup_weight if looked else 1.0 for looked in inside), 1.0]
        else:
            weights += [0.0, *([of_prompt] * len(encoded.ids)), of_prompt]
    return Rendered(np.array(ids, dtype=np.int32), np.array(weights, dtype=np.float32))


def _looked_up(offset: tuple[int, int], spans: tuple[tuple[int, int], ...]) -> bool:
    return any(start < offset[1] and offset[0] < end for start, end in spans)


def prompt_ids(case: Case, tokenizer: Tokenizer) -> list[int]:
    """Return the prompt with the assistant's turn opened."""
    special = special_ids(tokenizer)
    ids = [special[START]]
    for turn in case.prompt:
        text = tokenizer.encode(turn.text, add_special_tokens=False).ids
        ids += [special[ROLES[turn.role]], *text, special[END]]
    return [*ids, special[ROLES["assistant"]]]


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the control tokens."""
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[name] for name in SPECIAL}
