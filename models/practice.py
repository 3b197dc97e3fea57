"""Practice on random tokens, which sharpens the seeded copy heads and keeps them."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from models.recipe import Recipe
from models.rendering import SPECIAL


def random_copying(recipe: Recipe, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of random tokens in which each row stands twice; only the second time counts."""
    generator = torch.Generator().manual_seed(step)
    length = int(torch.randint(4, 80, (1,), generator=generator))
    shape = (recipe.tokens // (2 * length + 1), length)
    once = torch.randint(len(SPECIAL), recipe.shape.vocabulary, shape, generator=generator)
    weights = torch.zeros(shape[0], 2 * length)
    weights[:, length + 1 :] = 1.0
    return torch.cat((once, once), dim=1), weights


LINKS = (" is", " the", " to", " with", " was", " by", " has", " on", " at", " for", ":", " -", " will", " it", " and")


def random_lookups(recipe: Recipe, step: int, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of lists of random keys and values with up to four ordinary words between; each key is queried.

    Only the value after the key and one such word count, so that a look-up does not depend on the distance of a value
    from its key.
    """
    generator = torch.Generator().manual_seed(step)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    vocabulary = recipe.shape.vocabulary
    links = [tokenizer.token_to_id(word.replace(" ", "\u0120")) for word in LINKS]
    words = torch.tensor([link for link in links if link is not None])
    begin, end = (tokenizer.token_to_id(token) for token in ("-", "\u010a"))
    pairs, key, gap, value = (int(draw(*bounds, 1)) for bounds in ((2, 13), (1, 3), (0, 5), (1, 3)))
    count = max(2, recipe.tokens // (pairs * (2 * key + gap + 2 * value + 5)))
    keys, values = (draw(len(SPECIAL), vocabulary, count, pairs, n) for n in (key, value))
    fixed = [torch.full((count, pairs, 1), token) for token in (begin, end)]
    between, queried = words[draw(0, len(words), count, pairs, gap)], words[draw(0, len(words), count, pairs, 1)]
    pages = torch.cat((fixed[0], keys, between, values, fixed[1]), dim=2).flatten(1)
    order = torch.rand(count, pairs, generator=generator).argsort(1)[..., None]
    again = [part.gather(1, order.expand_as(part)) for part in (keys, values)]
    questions = torch.cat((fixed[0], again[0], queried, again[1], fixed[1]), dim=2)
    weights = torch.zeros(questions.shape)
    weights[:, :, key + 2 : key + 2 + value] = 1.0
    return torch.cat((pages, questions.flatten(1)), 1), torch.cat((torch.zeros(pages.shape), weights.flatten(1)), 1)
