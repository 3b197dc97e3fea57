"""The code pair's two models: their shapes, their training recipes, and the curriculum."""

from tokenizers import Tokenizer

from models.code.corpus import SIZE, case_at
from models.recipe import Recipe, Shape, tokens_at
from models.rendering import Rendered, render

VERIFIER = Recipe("verifier", Shape(12, 256, 8, 704, SIZE), 3400, 2048, 0.006, 4e-4)
DRAFT = Recipe("draft", Shape(6, 128, 4, 352, SIZE), 500, 2048, 0.015, 1e-3)
RECIPES = {recipe.name: recipe for recipe in (VERIFIER, DRAFT)}

WEIGHTS = {"complete": 3.0, "rename": 1.2, "signature": 0.6, "call": 1.4}
COPYING = {"complete": 1.0, "rename": 2.4, "signature": 0.8, "call": 1.6}
"""How often each task is drawn, and in the end for the verifier: what is copied must be copied without a slip, and the
language is learned by then. The draft model is too small for that."""
_COPIES_FROM = 0.73  # of the curriculum
PROMPT_WEIGHTS = {"complete": 1.0, "rename": 0.0, "signature": 0.3, "call": 1.0}
"""Loss weights of the tokens of prompts: they are the real text from which code is learned."""


def rows(recipe: Recipe, step: int, count: int, tokenizer: Tokenizer) -> list[Rendered]:
    """Return the conversations of the pool of `count` batches that starts at `step`, always the same for one step."""
    progress = recipe.progress(step)
    weights = COPYING if recipe == VERIFIER and progress >= _COPIES_FROM else WEIGHTS
    drawn, total, index = [], 0, 0
    while total < count * tokens_at(progress, recipe):
        case = case_at(recipe.seed * 10**9 + step * 10_000 + index, min(1.0, 0.2 + 2 * progress), weights)
        index += 1
        rendered = render(case, tokenizer, prompt_weight=PROMPT_WEIGHTS[case.family])
        if len(rendered.ids) > recipe.shape.context:
            continue
        drawn.append(rendered)
        total += len(rendered.ids)
    return drawn
