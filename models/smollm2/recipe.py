"""The draft model of SmolLM2: its shape, and the recipe by which it is distilled."""

from models.recipe import Recipe, Shape

VOCABULARY = 49_152
ROW = 1_024
"""Tokens of a row, into which conversations are packed."""
DRAFT = Recipe("draft", Shape(6, 256, 4, 768, VOCABULARY, ROW), steps=900, tokens=4 * ROW, rate=0.006, adam_rate=6e-4)
"""`tokens` of each step. The width costs most: a row of the head has as many weights as the width, for each token of
the vocabulary."""
NEGATIVES = 3_072
"""Tokens drawn from the rest of the vocabulary for each step, beside those that the teacher thought of."""
SHARPENED = 0.4
"""Temperature of one half of each target; the other half is the teacher's distribution as it is. Drafts are accepted
where the likeliest token agrees, which the sharpened half teaches, and the other half is worth more for each token."""
LIKELIEST = 8
"""Tokens of each of the teacher's distributions that are among those the loss runs over."""


def practises(step: int) -> bool:
    """Return whether a step is practice of copying, without which the copy heads are lost."""
    return step % (4 if step < DRAFT.steps // 4 else 8) == 0
