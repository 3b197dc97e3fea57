"""Has SmolLM2 write the conversations from which its draft model learns, and keeps its likeliest tokens at each place.

    python -m models.smollm2.synthesis VERIFIER.gguf FOLDER --tokens 1500000

No foreign text is used: the verifier writes the user's turns from the bare template, or from the first words of one
(`openings.py`), then the replies, and in a quarter of the conversations about a text that it wrote before. This is
self-synthesis (Xu et al., Magpie, arXiv 2406.08464). Many conversations are decoded together, one row of each a pass.
A shard is one .npz: the ids of all conversations, where each begins, the role of each token, and the teacher's `TOP`
likeliest next tokens with their log-probabilities. An interrupted run goes on with the next shard.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from edgellm.engine import Context, ContextSpec, Model, SeqRows
from models.smollm2.openings import FOLLOW_UPS, OPEN_ENDED, OVER_A_TEXT, opening, system

TOP = 24
"""Tokens that are kept of each distribution: they hold 97 % of it in the mean."""
SHARD = 40_000  # tokens
SLOTS = 128
"""Conversations that are written at once: a pass of so many rows takes five times as long as one of eight."""
LONGEST = 1_024  # tokens of a conversation
PROMPT, USER, REPLY = 0, 1, 2
"""Roles of a token: given, written as the user, written as the assistant."""
LENGTHS = {USER: 96, REPLY: 288}
"""Tokens of a turn at most; a reply that is cut there is kept without an end."""
REPLY_TEMPERATURES = (0.0, 0.2, 0.2, 0.5, 0.8)
TEXTS = 400
"""Replies that are kept to ask about."""
TEXT_LENGTHS = (60, 280)
"""Tokens of such a text at least and at most."""


@dataclass(slots=True)
class Conversation:
    """A conversation in progress. `fed` tokens of `ids` have been decoded; `top` has a row for each written token."""

    slot: int
    ids: list[int]
    roles: list[int]
    role: int
    temperature: float
    turns: int
    fed: int = 0
    turn_began: int = 0
    top: list[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float32]]] = field(default_factory=list)


class Writer:
    """Writes conversations with a model, `slots` at a time, and hands out finished ones."""

    def __init__(self, model: Model, slots: int, longest: int, seed: int, threads: int) -> None:
        self.model, self.slots, self.longest = model, slots, longest
        self.chance = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.context = Context(
            model, ContextSpec(n_ctx=longest, n_seq=slots, n_batch=512, threads=threads, unified=False)
        )
        self.texts: list[list[int]] = []
        self.start, self.end = self.ids_of("<|im_start|>")[0], self.ids_of("<|im_end|>")[0]
        self.running = [self.new(slot) for slot in range(slots)]

    def ids_of(self, text: str) -> list[int]:
        return [int(each) for each in self.model.tokenize(text, special=True)]

    def new(self, slot: int) -> Conversation:
        """Return a conversation at its user's turn, in an emptied slot."""
        self.context.clear(slot)
        role = USER
        head = self.ids_of(f"<|im_start|>system\n{system(self.chance)}<|im_end|>\n<|im_start|>user\n")
        if len(self.texts) >= 40 and self.chance.random() < 0.25:
            before, after = self.chance.choice(OVER_A_TEXT).split("{text}")
            ids = [*head, *self.ids_of(before), *self.chance.choice(self.texts), *(self.ids_of(after) if after else [])]
            if not after.endswith(OPEN_ENDED):
                ids += self.reply_head()
                role = REPLY
        else:
            words = opening(self.chance)
            ids = head + (self.ids_of(words) if words else [])
        turns = 2 if self.chance.random() < 0.3 else 1
        return Conversation(slot, ids, [PROMPT] * len(ids), role, self.heat(role), turns, turn_began=len(ids))

    def reply_head(self) -> list[int]:
        return self.ids_of("<|im_end|>\n<|im_start|>assistant\n")

    def heat(self, role: int) -> float:
        """Return the temperature of a turn: the user's are as varied as the model is."""
        return 1.0 if role == USER else self.chance.choice(REPLY_TEMPERATURES)

    def step(self) -> list[Conversation]:
        """Decode what each conversation has not decoded, choose a token of each, and return those that ended."""
        pieces, room = [], 512
        for one in sorted(self.running, key=lambda each: len(each.ids) - each.fed):
            piece = one.ids[one.fed : one.fed + room]
            if not piece:
                break
            pieces.append((one, piece))
            room -= len(piece)
        rows = [SeqRows(one.slot, np.array(piece, dtype=np.int32), 1) for one, piece in pieces]
        decoded = self.context.decode_rows(rows)
        ready = []
        for at, (one, piece) in enumerate(pieces):
            one.fed += len(piece)
            if one.fed == len(one.ids):
                ready.append((one, at))
        logits = torch.from_numpy(np.concatenate([decoded[at] for _, at in ready]))
        values, ids = logits.topk(64, dim=1)
        known = (values - logits.logsumexp(1, keepdim=True)).numpy()
        likeliest = ids.numpy()
        chosen = self.choose([one for one, _ in ready], values, likeliest)
        done = []
        for row, (one, _) in enumerate(ready):
            one.top.append((len(one.ids) - 1, likeliest[row, :TOP].astype(np.int32), known[row, :TOP]))
            if self.append(one, chosen[row]):
                done.append(one)
        for one in done:
            self.running[one.slot] = self.new(one.slot)
        return done

    def choose(self, waiting: list[Conversation], values: torch.Tensor, ids: npt.NDArray[np.int64]) -> list[int]:
        """Return a token for each row, at its conversation's temperature."""
        heats = torch.tensor([max(one.temperature, 0.01) for one in waiting]).unsqueeze(1)
        drawn = torch.multinomial((values / heats).softmax(1), 1, generator=self.numbers)[:, 0].numpy()
        return [int(each) for each in ids[np.arange(len(waiting)), drawn]]

    def append(self, one: Conversation, token: int) -> bool:
        """Add a token; at the end of a turn begin the next one. Return whether the conversation has ended."""
        one.ids.append(token)
        one.roles.append(one.role)
        written = len(one.ids) - one.turn_began
        ends = token in (self.end, 0)
        if not ends and written < LENGTHS[one.role] and len(one.ids) < self.longest - 8:
            return False
        if one.role == REPLY:
            if TEXT_LENGTHS[0] <= written <= TEXT_LENGTHS[1] and one.temperature:
                self.texts.append(one.ids[one.turn_began : -1])
                del self.texts[:-TEXTS]
            one.turns -= 1
            if not ends or not one.turns or len(one.ids) > self.longest - 500:
                return True
            opened = self.chance.choice(FOLLOW_UPS)
            head = self.ids_of(f"\n<|im_start|>user\n{opened}")
            one.role = USER
        else:
            head = self.reply_head()
            if ends:
                head = head[1:]
            one.role = REPLY
        one.ids += head
        one.roles += [PROMPT] * len(head)
        one.turn_began, one.temperature = len(one.ids), self.heat(one.role)
        return False


def save(done: list[Conversation], path: Path) -> None:
    """Write conversations as one shard."""
    begins = np.cumsum([0, *(len(one.ids) for one in done)]).astype(np.int64)
    ids = np.concatenate([one.ids for one in done]).astype(np.uint16)
    roles = np.concatenate([one.roles for one in done]).astype(np.uint8)
    starts = zip(done, begins[:-1], strict=True)
    places = np.concatenate([[place + start for place, _, _ in one.top] for one, start in starts])
    likeliest = np.stack([each for one in done for _, each, _ in one.top]).astype(np.uint16)
    known = np.stack([each for one in done for _, _, each in one.top]).astype(np.float16)
    part = path.with_suffix(".part.npz")
    np.savez(part, ids=ids, roles=roles, begins=begins, places=places, likeliest=likeliest, known=known)
    part.replace(path)


def synthesise(verifier: Path, folder: Path, tokens: int, threads: int) -> None:
    """Have the verifier write until `folder` has shards of `tokens` tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("shard-????.npz")))
    if number * SHARD >= tokens:
        return
    model = Model.load(verifier)
    writer = Writer(model, SLOTS, LONGEST, 1000 + number, threads)
    done: list[Conversation] = []
    began, total = time.monotonic(), 0
    while number * SHARD < tokens:
        done += writer.step()
        if (written := sum(len(one.top) for one in done)) >= SHARD:
            save(done, folder / f"shard-{number:04d}.npz")
            number += 1
            total += written
            print(f"shard {number}: {total / (time.monotonic() - began):.0f} tokens/s", flush=True)
            done = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    synthesise(arguments.verifier, arguments.folder, arguments.tokens, arguments.threads)


if __name__ == "__main__":
    main()
