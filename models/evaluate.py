"""Judges checkpoints on held-out cases without generating.

A greedy reply is exact if and only if every token of the right reply is the most probable one after those before it.

    python -m models.evaluate [--pair home] --verifier CHECKPOINT --draft CHECKPOINT [--cases 300]

The shipped pair is judged through llama.cpp by `bench/synera/quality.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from models.case import Case
from models.net import Net
from models.pairs import PAIRS
from models.recipe import Recipe
from models.rendering import render
from models.train import padded

GAMMA = 4


@dataclass(frozen=True, slots=True)
class Judged:
    """Of a case: the right reply, the model's token at each place of it, and which are looked up; each (n,)."""

    right: npt.NDArray[np.int64]
    written: npt.NDArray[np.int64]
    looked_up: npt.NDArray[np.bool_]


@torch.inference_mode()
def judge(net: Net, cases: list[Case], tokenizer: Tokenizer) -> list[Judged]:
    """Return the model's choice at every token of the last turn of each case."""
    rendered = [render(case, tokenizer, lookup_weight=2.0) for case in cases]
    answers = [len(tokenizer.encode(case.answer, add_special_tokens=False).ids) + 1 for case in cases]
    judged: list[Judged | None] = [None] * len(cases)
    order = sorted(range(len(cases)), key=lambda at: len(rendered[at].ids))
    for start in range(0, len(order), 32):
        group = order[start : start + 32]
        ids, weights = padded([rendered[at] for at in group])
        written = net.head(net(ids)).argmax(-1).numpy()
        for row, at in enumerate(group):
            end = len(rendered[at].ids)
            span = slice(end - answers[at], end)
            before = slice(span.start - 1, span.stop - 1)
            judged[at] = Judged(ids[row, span].numpy(), written[row, before], weights[row, span].numpy() == 2.0)
    return [each for each in judged if each is not None]


def whole_chunks(draft: Judged, verifier: Judged) -> tuple[int, int]:
    """Return (chunks accepted whole, chunks) along the right reply, if the verifier writes it."""
    agree = draft.written == verifier.written
    at = whole = chunks = 0
    while at < len(agree):
        chunk = agree[at : at + GAMMA]
        chunks += 1
        if chunk.all():
            whole += 1
            at += len(chunk) + 1  # the bonus token
        else:
            at += int(np.argmin(chunk)) + 1  # the correction
    return whole, chunks


def _net(recipe: Recipe, path: Path) -> Net:
    net = Net(recipe.shape)
    state = torch.load(path, map_location="cpu", weights_only=True)
    net.load_state_dict(state.get("net", state))
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", choices=PAIRS, default="home")
    parser.add_argument("--verifier", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--cases", type=int, default=300)
    arguments = parser.parse_args()
    pair = PAIRS[arguments.pair]
    tokenizer = pair.tokenizer()
    nets = {name: _net(recipe, path) for name, recipe in pair.recipes.items() if (path := getattr(arguments, name))}
    totals = np.zeros(2, dtype=int)
    for family in pair.families:
        cases = list(pair.held_out(family, arguments.cases))
        judged = {name: judge(net, cases, tokenizer) for name, net in nets.items()}
        line = f"{family:10}"
        for name, each in judged.items():
            exact = np.mean([(case.right == case.written).all() for case in each])
            looked = np.concatenate([(case.right == case.written)[case.looked_up] for case in each]).mean()
            plain = np.concatenate([(case.right == case.written)[~case.looked_up] for case in each]).mean()
            line += f"  {name} exact {exact:6.1%} look-ups {looked:6.1%} other {plain:6.1%}"
        if len(judged) == 2:
            counts = np.array([whole_chunks(d, v) for d, v in zip(judged["draft"], judged["verifier"], strict=True)])
            totals += counts.sum(0)
            line += f"  chunks accepted whole {counts[:, 0].sum() / counts[:, 1].sum():6.1%}"
        sys.stdout.write(line + "\n")
    if totals[1]:
        sys.stdout.write(f"chunks accepted whole, all families: {totals[0] / totals[1]:.1%}\n")


if __name__ == "__main__":
    main()
