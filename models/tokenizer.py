"""The tokenizers of the pairs: byte-level BPE, split like llama.cpp's `gpt-2` pre-tokenizer.

Merges come from the training text alone, which is ASCII, so no merge crosses a boundary on which two versions of
Unicode could disagree, and llama.cpp and the training code split arbitrary UTF-8 alike. Digits are never merged.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.rendering import SPECIAL


def train(texts: Iterable[str], size: int, path: Path) -> Tokenizer:
    """Learn the merges of `size` tokens from `texts`, and write `path` (JSON)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return tokenizer


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
