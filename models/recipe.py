"""The two models of the pair: their shapes and training recipes, in two stages.

The first stage learns the eight families from nothing. The second one, `AGAIN`, continues from its weights: the last
part of the curriculum and of the learning rate once more, with the families of plain words beside the eight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from models.net import Shape
from models.tokenizer import SIZE


@dataclass(frozen=True, slots=True)
class Recipe:
    """`steps` of about `tokens` tokens; `rate` is Muon's, `adam_rate` Adam's (a third of it for the embedding).

    `lookup_weight` is the loss weight of looked-up values: it is low for the draft model, which so becomes fluent and
    is wrong where it matters. `begins` is the place in the curriculum, 0..1, where the recipe begins; above 0 it needs
    weights to continue from. Recipes of different seeds never see the same text.
    """

    name: str
    shape: Shape
    steps: int
    tokens: int
    rate: float
    adam_rate: float
    lookup_weight: float
    seed: int = 1
    begins: float = 0.0

    def progress(self, step: int) -> float:
        """Return the place of a step in the curriculum, 0..1."""
        return self.begins + (1 - self.begins) * step / self.steps


VERIFIER = Recipe("verifier", Shape(12, 192, 6, 512, SIZE), 6900, 2048, 0.007, 4e-4, 1.0)
DRAFT = Recipe("draft", Shape(8, 96, 3, 192, SIZE), 900, 2048, 0.02, 2e-3, 0.3)
RECIPES = {recipe.name: recipe for recipe in (VERIFIER, DRAFT)}
AGAIN = {
    "verifier": replace(VERIFIER, name="verifier-again", steps=800, tokens=2048, begins=0.8, seed=2),
    "draft": replace(DRAFT, name="draft-again", steps=300, tokens=2048, begins=0.8, seed=2),
}

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

PLAIN_WEIGHTS = {"told": 4.0, "inline": 3.5}
"""Weights of the families that only the second stage shows."""

SHARPENING = 60
"""First steps, on random copying alone, from seeded copy heads (half of 24 tokens right) to nearly perfect ones."""


def practises(step: int, recipe: Recipe) -> bool:
    """Return whether a step is practice on random tokens: all steps at first, then some, which keep the copy heads."""
    progress = recipe.progress(step)
    return sharpens(step, recipe) or step % (6 if progress < 0.3 else 10) == 0


def sharpens(step: int, recipe: Recipe) -> bool:
    """Return whether a step sharpens copy heads that were seeded just now."""
    return recipe.begins == 0 and step < SHARPENING


def tokens_at(progress: float, recipe: Recipe) -> int:
    """Return the tokens of a step: twice as many after the first phase."""
    return recipe.tokens * (1 if progress < 0.15 else 2)


def size_at(progress: float) -> float:
    """Return the size of cases at `progress` in 0..1: short contexts first."""
    return min(1.0, 0.15 + 2.2 * progress)


def long_share(progress: float) -> float:
    """Return the share of batches with contexts of up to the whole trained length."""
    return 0.0 if progress < 0.35 else 0.12


def mixture(progress: float, recipe: Recipe) -> dict[str, float]:
    """Return the weights of the families: plain copying first, and some to the end, with sums and single words."""
    practice = {
        "copying": max(2.5 if progress < 0.5 else 1.0, 8.0 * (1 - progress / 0.12)),
        "sums": 1.0,
        "alone": 1.0,
    }
    return practice | WEIGHTS | (PLAIN_WEIGHTS if recipe.begins else {})


def schedule(step: int, recipe: Recipe) -> float:
    """Return the factor of every rate: constant after a short warm-up, falling to a fiftieth over the last half."""
    return min(1.0, step / 20) * min(1.0, 0.02 + 0.98 * (1 - recipe.progress(step)) / 0.5)
