"""What a training recipe is, and what the recipes of all pairs have in common."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model. `head_size` times `heads` is the width; every size is a multiple of 32 for Q8_0."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    vocabulary: int
    context: int = 1024

    @property
    def head_size(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True, slots=True)
class Recipe:
    """`steps` of about `tokens` tokens; `rate` is Muon's, `adam_rate` Adam's (a third of it for the embedding).

    `lookup_weight` is the loss weight of looked-up values: it is low for the home pair's draft model, which so becomes
    fluent and is wrong where it matters. `begins` is the place in the curriculum, 0..1, where the recipe begins; above
    0 it needs weights to continue from. Recipes of different seeds never see the same text.
    """

    name: str
    shape: Shape
    steps: int
    tokens: int
    rate: float
    adam_rate: float
    lookup_weight: float = 1.0
    seed: int = 1
    begins: float = 0.0

    def progress(self, step: int) -> float:
        """Return the place of a step in the curriculum, 0..1."""
        return self.begins + (1 - self.begins) * step / self.steps


def sharpening(recipe: Recipe) -> Recipe:
    """Return the recipe that sharpens seeded copy heads on random tokens, from every third one right to nine of ten.

    It is for the two blocks that have them alone. Among twelve, at the recipe's own rates, the others' noise covered
    the heads of the code pair's verifier: its loss rose from 5.8 to 6.0 in 60 steps.
    """
    blocks = replace(recipe.shape, layers=2)
    return replace(recipe, name=f"{recipe.name}-copying", shape=blocks, steps=240, rate=0.003, adam_rate=4e-4)


def practises(step: int, recipe: Recipe) -> bool:
    """Return whether a step is practice on random tokens, which keeps the copy heads."""
    return step % (6 if recipe.progress(step) < 0.3 else 10) == 0


def tokens_at(progress: float, recipe: Recipe) -> int:
    """Return the tokens of a step: twice as many after the first phase."""
    return recipe.tokens * (1 if progress < 0.15 else 2)


def schedule(step: int, recipe: Recipe) -> float:
    """Return the factor of every rate: constant after a short warm-up, falling to a fiftieth over the last half."""
    return min(1.0, step / 20) * min(1.0, 0.02 + 0.98 * (1 - recipe.progress(step)) / 0.5)
