"""Check that a reply with every chunk verified is the verifier's own, token by token.

    python -m bench.robustness.lossless [PROMPTS] [--max-tokens 64] [--threads N] [--draft PATH] [--verifier PATH]
        [--retrieval auto|off] [--device host|rpc|card]

Greedy, on f32 copies of the pair, which are made first, and held-out cases of every family in turn. At the first
difference the verifier's logits after the common text are computed again, in one pass. If the two tokens are nearly
equal there, the difference is a numerical tie, because a batch of five adds up in another order than a batch of one;
else it is a bug, and the exit code is 1. With `--device rpc` or `card` draft model and verifier are on a device whose
memory is not the host's; the verifier that they are compared with stays on the host.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import edgellm
from bench.harness.report import write
from edgellm.engine import Context, ContextSpec, Message, Model, to_f32
from edgellm.engine.hardware import Hardware, offload_devices
from edgellm.spec.types import Ids
from edgellm.storage import resolve
from models.case import Case
from models.home.corpus import HELD_OUT_SEED, held_out
from models.home.families import FAMILIES
from testkit.processes.rpc_device import DEVICES, require_device

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=int, nargs="?", default=304)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, help="1 if the machine does other work, too")
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier")
    parser.add_argument("--retrieval", default="auto", help="as for `edgellm chat`")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="on which the models are")
    parser.add_argument("--name", default="lossless", help="of the result file")
    arguments = parser.parse_args()
    require_device(arguments.device)
    tie = CARD_TIE if arguments.device == "card" else TIE
    counts: Counter[str] = Counter()
    lengths: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        draft, verifier = Path(folder) / "draft.gguf", Path(folder) / "verifier.gguf"
        to_f32(resolve(arguments.draft), draft)
        to_f32(resolve(arguments.verifier), verifier)
        with (
            edgellm.LLM.open(draft, verifier, threads=arguments.threads) as pair,
            edgellm.LLM.open("none", verifier, threads=arguments.threads, hardware=ON_HOST) as alone,
            Model.load(verifier) as model,
        ):
            for number, case in enumerate(prompts(arguments.prompts)):
                messages = [Message(turn.role, turn.text) for turn in case.prompt]
                reply = pair.reply(messages, max_tokens=arguments.max_tokens, retrieval=arguments.retrieval)
                ours = [token.id for token in reply]
                bare = alone.reply(messages, max_tokens=arguments.max_tokens, retrieval="off")
                theirs = [token.id for token in bare]
                lengths.append(reply.summary.mean_acceptance_length or 0.0)
                counts["tokens"] += len(ours)
                if ours == theirs:
                    counts["equal"] += 1
                    continue
                kind, apart, at = difference(model, pair.prompt_ids(messages), ours, theirs, tie)
                counts[kind] += 1
                sys.stdout.write(f"prompt {number}, token {at}: logits {apart:.2e} apart: {kind}\n")
    n = arguments.prompts
    figures: dict[str, Any] = {"device": arguments.device, "prompts": n, "tie_below": tie}
    if arguments.device == "card":
        figures["cards"] = [card.description for card in offload_devices()]
    figures["mean_acceptance_length"] = float(np.mean(lengths))
    figures |= {key: counts[key] for key in ("equal", "tie", "bug", "tokens")}
    sys.stdout.write(table(figures))
    sys.stdout.write(f"written: {write(arguments.name, 'bench.robustness.lossless', figures, HELD_OUT_SEED)}\n")
    sys.exit(1 if counts["bug"] else 0)


def table(found: dict[str, Any]) -> str:
    """Return a summary of the replies, in a line."""
    return (
        "".join(f"on {card}: " for card in found.get("cards", ()))
        + f"{found['equal']} of {found['prompts']} replies equal ({found['tokens']} tokens), {found['tie']} ties,"
        f" {found['bug']} bugs; mean acceptance length {found['mean_acceptance_length']:.2f}"
        " (bonus or correction included)\n"
    )


if __name__ == "__main__":
    main()
