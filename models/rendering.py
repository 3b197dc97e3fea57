"""Cases as token ids in the form of the chat template, with a weight for each target."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.case import Case

# not <|start|>: llama.cpp knows that one from another family, and parses it in any prompt
START, END = "<|begin|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL = (START, END, *ROLES.values())
TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids of a conversation, shape (n,), and the loss weight of each id, shape (n,)."""

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


def render(case: Case, tokenizer: Tokenizer, lookup_weight: float = 1.0, prompt_weight: float = 0.0) -> Rendered:
    """Return the conversation in the form of the chat template.

    Assistant turns weigh 1, prompts `prompt_weight`; tokens of looked-up values weigh `lookup_weight`.
    """
    special = special_ids(tokenizer)
    ids: list[int] = [special[START]]
    weights: list[float] = [0.0]
    for turn in case.turns:
        encoded = tokenizer.encode(turn.text, add_special_tokens=False)
        ids += [special[ROLES[turn.role]], *encoded.ids, special[END]]
        if turn.role == "assistant":
            inside = [_looked_up(offset, turn.lookups) for offset in encoded.offsets]
            weights += [0.0, *(lookup_weight if looked else 1.0 for looked in inside), 1.0]
        else:
            weights += [0.0, *([prompt_weight] * len(encoded.ids)), prompt_weight]
    return Rendered(np.array(ids, dtype=np.int32), np.array(weights, dtype=np.float32))


def _looked_up(offset: tuple[int, int], spans: tuple[tuple[int, int], ...]) -> bool:
    return any(start < offset[1] and offset[0] < end for start, end in spans)


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the control tokens."""
    vocabulary = tokenizer.get_vocab()
    return {name: vocabulary[name] for name in SPECIAL}
