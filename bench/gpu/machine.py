"""The device that is measured, how much of everything is measured on it, and the models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.engine.hardware import ALL_LAYERS, Hardware, offload_devices
from testkit.gguf import random_model


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured: shapes of random weights, tokens of a reply, repeats, sessions at once, lengths of long
    prompts, and cases of a family."""

    shapes: Sequence[str]
    tokens: int
    repeats: int
    sessions: Sequence[int]
    lengths: Sequence[int]
    cases: int


ON_CARD = Amount(("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"), 128, 5, (1, 16, 64), (8_192, 32_768), 40)
ON_PROCESSOR = Amount(("qwen2.5-0.5b",), 32, 3, (1, 4), (1_024,), 3)
TYPE = "Q4_0"


@dataclass(frozen=True, slots=True)
class Machine:
    """A device by its `name`, llama-server for it, and a folder for models and logs."""

    name: str
    on_card: bool
    llama_server: Path | None
    folder: Path
    amount: Amount

    @classmethod
    def here(cls, llama_server: Path | None, folder: Path, *, processor: bool = False) -> Machine:
        """Return the first graphics card that llama.cpp can use; the processor without one, or if it is asked for."""
        cards = () if processor else offload_devices(())
        if not cards:
            return cls("processor", False, llama_server, folder, ON_PROCESSOR)
        return cls(cards[0].description, True, llama_server, folder, ON_CARD)

    @property
    def threads(self) -> int:
        return os.cpu_count() or 1

    @property
    def server(self) -> Path:
        """Return llama-server, without which no table is begun that needs it."""
        assert self.llama_server is not None
        return self.llama_server

    def hardware(self, n_ctx: int | None = None) -> Hardware:
        """Return how models are loaded: with all layers on the card if there is one."""
        return Hardware(gpu_layers=ALL_LAYERS if self.on_card else 0, threads=self.threads, n_ctx=n_ctx)

    def server_words(self, n_ctx: int) -> list[str]:
        """Return llama-server's options for the same."""
        layers = "999" if self.on_card else "0"
        return ["-ngl", layers, "-c", str(n_ctx), "-t", str(self.threads), "--no-warmup"]

    def random_model(self, shape: str) -> Path:
        """Return a file with random weights of a shape, written at the first call."""
        path = self.folder / f"{shape}-{TYPE}.gguf"
        if not path.exists():
            random_model.write(path, random_model.SHAPES[shape], TYPE)
        return path
