"""The two models of the pair: their shapes and training recipes."""

from __future__ import annotations

from dataclasses import dataclass

from models.net import Shape
from models.tokenizer import SIZE


@dataclass(frozen=True, slots=True)
class Recipe:
    """`steps` of about `tokens` tokens; `rate` is Muon's, `adam_rate` Adam's (a third of it for the embedding).

    `lookup_weight` is the loss weight of looked-up values: it is low for the draft model, which so becomes fluent and
    is wrong where it matters.
    """

    name: str
    shape: Shape
    steps: int
    tokens: int
    rate: float
    adam_rate: float
    lookup_weight: float
    seed: int = 1


VERIFIER = Recipe("verifier", Shape(12, 192, 6, 512, SIZE), 6900, 2048, 0.007, 4e-4, 1.0)
DRAFT = Recipe("draft", Shape(8, 96, 3, 192, SIZE), 900, 2048, 0.02, 2e-3, 0.3)
RECIPES = {recipe.name: recipe for recipe in (VERIFIER, DRAFT)}

WEIGHTS = {
    "qa": 2.0,
    "summary": 1.2,
    "reply": 1.0,
    "command": 1.0,
    "judge": 1.5,
    "choice": 1.2,
    "chat": 0.8,
    "quantity": 1.4,
}
"""Weights of the families, higher for those that are learned late."""

SHARPENING = 60
"""First steps, on random copying alone, from seeded copy heads (half of 24 tokens right) to nearly perfect ones."""


def practises(step: int, progress: float) -> bool:
    """Return whether a step is practice on random tokens: all steps at first, then some, which keep the copy heads."""
    return step < SHARPENING or (step % (6 if progress < 0.3 else 10) == 0)


def tokens_at(progress: float, recipe: Recipe) -> int:
    """Return the tokens of a step: twice as many after the first phase."""
    return recipe.tokens * (1 if progress < 0.15 else 2)


def size_at(progress: float) -> float:
    """Return the size of cases at `progress` in 0..1: short contexts first."""
    return min(1.0, 0.15 + 2.2 * progress)


def long_share(progress: float) -> float:
    """Return the share of batches with contexts of up to the whole trained length."""
    return 0.0 if progress < 0.35 else 0.12


def mixture(progress: float) -> dict[str, float]:
    """Return the weights of the families: plain copying first, and some to the end, with sums and single words."""
    return {
        "copying": max(2.5 if progress < 0.5 else 1.0, 8.0 * (1 - progress / 0.12)),
        "sums": 1.0,
        "alone": 1.0,
    } | WEIGHTS


def schedule(step: int, recipe: Recipe) -> float:
    """Return the factor of every rate: constant after a short warm-up, falling to a fiftieth over the last half."""
    progress = step / recipe.steps
    return min(1.0, step / 20) * min(1.0, 0.02 + 0.98 * (1 - progress) / 0.5)
