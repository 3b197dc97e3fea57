"""The tokenizer of the bundled pair: byte-level BPE, split like llama.cpp's `gpt-2` pre-tokenizer.

Merges come from the training text alone, which is ASCII, so no merge crosses a boundary on which two versions of
Unicode could disagree, and llama.cpp and the training code split arbitrary UTF-8 alike. Digits are never merged.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.corpus import SPECIAL, SYSTEMS, TRAINING_SEED
from models.families import FAMILIES
from models.lexicon import WORDS
from models.world import Split, World

SIZE = 2560


def _texts(count: int) -> Iterator[str]:
    yield from SYSTEMS
    for word in WORDS:
        yield f"{word}" + f" {word}" * 6
    for index in range(count):
        for number, make in enumerate(FAMILIES.values()):
            rng = random.Random(f"{TRAINING_SEED}/tokenizer/{number}/{index}")
            for turn in make(World(rng, Split.TRAIN, strange_share=0.02), 1.0).turns:
                yield turn.text


def train(path: Path, count: int = 4000) -> Tokenizer:
    """Learn the merges from `count` cases a family and write `path` (JSON)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(count), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return tokenizer


def load(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path))
