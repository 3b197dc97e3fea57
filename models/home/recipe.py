"""The home pair's two models: their shapes, their training recipes in two stages, and the curriculum.

The first stage learns the eight families from nothing. The second one, `AGAIN`, continues from its weights: the last
part of the curriculum and of the learning rate once more, with the families of plain words beside the eight. So that
nothing is forgotten, the first stage's model is its teacher (`models.train.distillation`).
"""

import random
from dataclasses import replace

from tokenizers import Tokenizer

from models.home.corpus import SIZE, case_at
from models.recipe import Recipe, Shape, tokens_at
from models.rendering import Rendered, render

VERIFIER = Recipe("verifier", Shape(12, 192, 6, 512, SIZE), 6900, 2048, 0.007, 4e-4, 1.0)
DRAFT = Recipe("draft", Shape(8, 96, 3, 192, SIZE), 900, 2048, 0.02, 2e-3, 0.3)
RECIPES = {recipe.name: recipe for recipe in (VERIFIER, DRAFT)}
AGAIN = {
    "verifier": replace(VERIFIER, name="verifier-again", steps=1500, begins=0.8, seed=2),
    "draft": replace(DRAFT, name="draft-again", steps=400, begins=0.8, seed=2),
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

AGAIN_WEIGHTS = {"told": 5.0, "inline": 3.5, "names": 5.0, "summary": 1.8, "reply": 1.6, "choice": 1.8}
"""What the second stage changes: two families more and what they need practice in, and more of those that would be
forgotten first."""

PROMPT_WEIGHT = 0.4
PROMPT_SHARE = 4  # every fourth prompt is trained on: the head over all of them would cost a tenth of the time


def size_at(progress: float) -> float:
    """Return the size of cases at `progress` in 0..1: short contexts first."""
    return min(1.0, 0.15 + 2.2 * progress)


def long_share(progress: float) -> float:
    """Return the share of batches with contexts of up to the whole trained length."""
    return 0.0 if progress < 0.35 else 0.12


def mixture(progress: float, recipe: Recipe) -> dict[str, float]:
    """Return the weights of the families: plain copying first, and some to the end, with sums and single words."""
    practice = {"copying": max(2.5 if progress < 0.5 else 1.0, 8.0 * (1 - progress / 0.12)), "sums": 1.0, "alone": 1.0}
    return practice | WEIGHTS | (AGAIN_WEIGHTS if recipe.begins else {})


def rows(recipe: Recipe, step: int, count: int, tokenizer: Tokenizer) -> list[Rendered]:
    """Return the conversations of the pool of `count` batches that starts at `step`, always the same for one step."""
    progress = recipe.progress(step)
    rng = random.Random(f"{recipe.seed}/{step}")
    drawn, total, index = [], 0, 0
    families, longer = mixture(progress, recipe), 0.0
    first = (recipe.seed - 1) * 10**9 + step * 10_000
    enough = count * tokens_at(progress, recipe)
    while total < enough:
        is_long = longer < long_share(progress) * total
        size = rng.uniform(2.0, 6.0) if is_long else size_at(progress)
        case = case_at(first + index, size, families)
        of_prompt = 0.0 if len(case.turns[0].text) % PROMPT_SHARE else PROMPT_WEIGHT
        rendered = render(case, tokenizer, recipe.lookup_weight, of_prompt)
        index += 1
        if len(rendered.ids) > recipe.shape.context:
            continue
        drawn.append(rendered)
        total += len(rendered.ids)
        longer += len(rendered.ids) if is_long else 0
    return drawn
