"""The pairs that this folder makes: `home`, which is bundled, and `code`, which lies in a checkout alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from models import tokenizer
from models.case import Case
from models.code import corpus as code_corpus
from models.code import recipe as code_recipe
from models.home import corpus, recipe
from models.home.families import JUDGED
from models.recipe import Recipe
from models.rendering import Rendered

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair: where its files are, how it is trained, and on which cases it is judged.

    `rows` returns the conversations of a pool of batches, `again` has the recipes of a second stage, if there is one,
    `held_out` returns as many cases of a family as asked for, by a seed, and `texts` what the tokenizer learns from,
    which has `size` tokens.
    """

    folder: Path
    recipes: Mapping[str, Recipe]
    again: Mapping[str, Recipe]
    rows: Callable[[Recipe, int, int, Tokenizer], list[Rendered]]
    families: tuple[str, ...]
    held_out: Callable[..., Iterator[Case]]
    texts: Callable[[], Iterator[str]]
    size: int

    def file(self, name: str) -> Path:
        """Return the GGUF of the `draft` model or the `verifier`."""
        return self.folder / f"{name}.gguf"

    @property
    def profile(self) -> Path:
        """Return the file of the pair's profile."""
        return self.folder / "profile.json"

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which learns its merges now if it has not yet."""
        path = self.folder / "tokenizer.json"
        return tokenizer.load(path) if path.exists() else tokenizer.train(self.texts(), self.size, path)


PAIRS = {
    "home": Pair(
        HERE, recipe.RECIPES, recipe.AGAIN, recipe.rows, tuple(JUDGED), corpus.held_out, corpus.texts, corpus.SIZE
    ),
    "code": Pair(
        HERE / "code", code_recipe.RECIPES, {}, code_recipe.rows, tuple(code_corpus.TASKS), code_corpus.held_out,
        code_corpus.texts, code_corpus.SIZE,
    ),
}  # fmt: skip
