"""Check that a reply with every chunk verified is the verifier's own, token by token.

Greedy, on f32 copies of the pair, which are made first, and held-out cases of every family in turn. At the first
difference the verifier's logits after the common text are computed again, in one pass. If the two tokens are nearly
equal there, the difference is a numerical tie, because a batch of five adds up in another order than a batch of one;
else it is a bug. On a device `rpc` or `card`, draft model and verifier are on a device whose
memory is not the host's; the verifier that they are compared with stays on the host.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.engine.hardware import Hardware, offload_devices
from edgellm.llm import LLM
from edgellm.spec.types import Ids
from edgellm.storage import resolve
from models.case import Case
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit.gguf.changed import to_f32
from testkit.processes.rpc_device import require_device

ON_HOST = Hardware(gpu_layers=0)
TIE = 1e-3
"""Logits closer than this may swap ranks with the shape of the batch. In f32 they vary by some 1e-5."""
CARD_TIE = 0.05
"""The same on a card: llama.cpp's Vulkan backend rounds keys and values to 16 bits where it decodes several rows, which
moves these models' logits by 0.011 against a single row."""


def prompts(n: int) -> list[Case]:
    """Return `n` held-out cases, the families in turn."""
    streams = [held_out(family, -(-n // len(FAMILIES))) for family in FAMILIES]
    return list(islice((case for group in zip(*streams, strict=True) for case in group), n))


def gap(model: Model, prompt: Ids, common: list[int], one: int | None, other: int | None) -> float:
    """Return the difference of the verifier's logits of two tokens after prompt and common text; None ends the turn."""
    text = np.concatenate((prompt, np.array(common, dtype=np.int32)))
    context = Context(model, ContextSpec(n_ctx=model.n_ctx_train))
    try:
        row = context.decode(text)[0]
        ends = [token for token in range(model.n_vocab) if model.is_eog(token)]
        end = max(ends, key=lambda token: row[token])
        return float(abs(row[end if one is None else one] - row[end if other is None else other]))
    finally:
        context.close()


def difference(
    model: Model, prompt: Ids, ours: list[int], theirs: list[int], tie: float = TIE
) -> tuple[str, float, int]:
    """Return of two replies that differ: `tie` or `bug`, the difference of the logits, and the place of the token."""
    at = next(i for i in range(1 + max(len(ours), len(theirs))) if ours[i : i + 1] != theirs[i : i + 1])
    one, other = next(iter(ours[at : at + 1]), None), next(iter(theirs[at : at + 1]), None)
    apart = gap(model, prompt, ours[:at], one, other)
    return "tie" if apart < tie else "bug", apart, at


def measure(
    count: Annotated[int, "of prompts"] = 304,
    max_tokens: int = 64,
    threads: Annotated[int | None, "1 if the machine does other work, too"] = None,
    retrieval: Annotated[str, "as for `edgellm chat`"] = "auto",
    device: Annotated[Literal["host", "rpc", "card"], "on which the models are"] = "host",
) -> Figures:
    """Return how many replies are equal, and what the others differ by."""
    require_device(device)
    tie = CARD_TIE if device == "card" else TIE
    counts: Counter[str] = Counter()
    lengths: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        draft, verifier = Path(folder) / "draft.gguf", Path(folder) / "verifier.gguf"
        to_f32(resolve("edgellm-draft"), draft)
        to_f32(resolve("edgellm-verifier"), verifier)
        with (
            LLM.open(draft, verifier, threads=threads) as pair,
            LLM.open("none", verifier, threads=threads, hardware=ON_HOST) as alone,
            Model.load(verifier) as model,
        ):
            for case in track(prompts(count), "prompts"):
                messages = [Message(turn.role, turn.text) for turn in case.prompt]
                reply = pair.reply(messages, max_tokens=max_tokens, retrieval=retrieval)
                ours = [token.id for token in reply]
                theirs = [token.id for token in alone.reply(messages, max_tokens=max_tokens, retrieval="off")]
                lengths.append(reply.summary.mean_acceptance_length or 0.0)
                counts["tokens"] += len(ours)
                kind = "equal" if ours == theirs else difference(model, pair.prompt_ids(messages), ours, theirs, tie)[0]
                counts[kind] += 1
    cards = {"cards": [card.description for card in offload_devices()]} if device == "card" else {}
    return {
        "device": device, "prompts": count, "tie_below": tie, **cards,
        "mean_acceptance_length": float(np.mean(lengths)),
        **{key: counts[key] for key in ("equal", "tie", "bug", "tokens")},
    }  # fmt: skip


def failures(found: Figures) -> list[str]:
    """Return how many replies differ by a bug."""
    return [f"{found['bug']} replies differ by more than a numerical tie"] if found["bug"] else []


def table(found: dict[str, Any]) -> str:
    """Return a summary of the replies, in a line."""
    return (
        "".join(f"on {card}: " for card in found.get("cards", ()))
        + f"{found['equal']} of {found['prompts']} replies equal ({found['tokens']} tokens), {found['tie']} ties,"
        f" {found['bug']} bugs; mean acceptance length {found['mean_acceptance_length']:.2f}"
        " (bonus or correction included)\n"
    )
