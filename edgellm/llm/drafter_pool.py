"""Drafters of a pair: opened when a reply needs a drafter, and used again by the next reply."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from edgellm.engine import Capture, Context, ContextSpec, GgufHeader, Model, cut
from edgellm.engine.gguf.cuttable import check_cuttable, exit_cuts
from edgellm.engine.kv.prompt_cache import PromptCache
from edgellm.engine.model import LoadSpec
from edgellm.errors import InvalidOption, ModelUnsupported
from edgellm.layer_range import ranges
from edgellm.llm.model_loading import PairFit
from edgellm.spec.drafters.early_exit import EarlyExitDrafter
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.translation import TranslatedDrafter
from edgellm.storage import cache_dir
from edgellm.storage.state import private_folder

PooledDrafter: TypeAlias = ModelDrafter | EarlyExitDrafter | TranslatedDrafter

SPARE = 16  # least cells of the cache for a branch


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """The abilities of a drafter beside drafting: measure the attention of `layers`, follow `branches` guesses of up to
    `gamma` tokens each, leave the model after `exit_layer` for tokens surer than `threshold`.
    """

    layers: tuple[int, ...] = ()
    branches: int = 0
    gamma: int = 0
    exit_layer: int | None = None
    threshold: float = 1.0


class Drafters:
    """The drafters of one model, one per running reply. Idle drafters are kept only of the last kind."""

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        threads: int | None,
        fingerprint: Callable[[], str],
        fit: PairFit,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        """Open drafters of `model`. `fingerprint` returns that of its file, for the names of shards. `fit` compares its
        vocabulary with the verifier's. `prompt_cache` as for `Context`; an early exit does not use it."""
        self._prompt_cache = prompt_cache
        self._shared, self.translation = fit.shared_tokens, fit.translation
        self._model, self._n_ctx, self._threads, self._fingerprint = model, n_ctx, threads, fingerprint
        self._idle: list[tuple[DrafterKind, PooledDrafter]] = []
        self._in_use: list[PooledDrafter] = []
        self._shards: dict[int, tuple[Model, Model]] = {}
        self._lock = threading.Lock()  # Several threads may write replies.

    def take(self, kind: DrafterKind) -> PooledDrafter:
        """Return the drafter of this kind that was given back last, or a new one.

        Raises:
            EngineFailed: there is no memory for it.
            ModelUnsupported: an early exit from a model that cannot be cut.
        """
        with self._lock:
            at = next((at for at, (other, _) in enumerate(self._idle) if other == kind), None)
            if at is not None:
                drafter = self._idle.pop(at)[1]
            else:
                while self._idle:
                    self._idle.pop()[1].close()
                drafter = self._open(kind)
            self._in_use.append(drafter)
            return drafter

    def opened(self) -> int:
        """Return how many drafters are open, in use and idle."""
        return len(self._in_use) + len(self._idle)

    def give(self, kind: DrafterKind, drafter: PooledDrafter) -> None:
        """Give a drafter back, for the next reply."""
        with self._lock:
            if drafter in self._in_use:
                self._in_use.remove(drafter)
                self._idle.insert(0, (kind, drafter))

    def shard(self, layer: int) -> Model:
        """Return the model up to `layer`, with a head."""
        return self._cut(layer)[0]

    def keep_shards(self, layer: int | None) -> None:
        """Close the shards of early exits that no drafter uses, and remove their files, except those of `layer`."""
        with self._lock:
            while self._idle and self._idle[-1][0].exit_layer is not None:
                self._idle.pop()[1].close()
            for other in [other for other in self._shards if other != layer]:
                for shard in self._shards.pop(other):
                    shard.close()
            if layer is None or layer in self._shards:
                keep = () if layer is None else shard_files(self._model, self._fingerprint(), layer)
                for path in shard_folder().glob(f"{self._fingerprint()[:16]}-*.gguf"):
                    if path not in keep:
                        with suppress(OSError):
                            path.unlink()

    def close(self) -> None:
        """Close all drafters, also those that were not given back."""
        for drafter in [*self._in_use, *(idle for _, idle in self._idle)]:
            drafter.close()
        self._in_use.clear()
        self._idle.clear()
        for shard in (shard for pair in self._shards.values() for shard in pair):
            shard.close()
        self._shards.clear()

    def _open(self, kind: DrafterKind) -> PooledDrafter:
        if self.translation is not None:
            context = Context(
                self._model, ContextSpec(n_ctx=self._n_ctx, threads=self._threads), prompt_cache=self._prompt_cache
            )
            return TranslatedDrafter(self._model, context, self.translation)
        if kind.exit_layer is not None:
            lower, upper = self._cut(kind.exit_layer)
            layers = tuple(layer for layer in kind.layers if layer < lower.n_layer)
            return EarlyExitDrafter.open(
                lower,
                upper,
                n_ctx=self._n_ctx,
                threads=self._threads,
                threshold=kind.threshold,
                layers=layers,
                shared=self._shared,
            )
        context = Context(
            self._model,
            ContextSpec(
                n_ctx=self._n_ctx,
                n_seq=1 + kind.branches,
                spare=kind.branches * max(SPARE, kind.gamma + 2),
                threads=self._threads,
            ),
            capture=Capture(attention=kind.layers) if kind.layers else None,
            prompt_cache=self._prompt_cache,
        )
        return ModelDrafter(self._model, context, kind.layers, keeps_logits=kind.branches > 0, shared=self._shared)

    def _cut(self, layer: int) -> tuple[Model, Model]:
        if layer not in self._shards:
            lower, upper = shards(self._model, self._fingerprint(), layer)
            hardware = self._model.hardware
            first = Model.load(lower, LoadSpec(hardware))
            try:
                self._shards[layer] = first, Model.load(upper, LoadSpec(hardware))
            except BaseException:
                first.close()
                raise
        return self._shards[layer]


def exit_layers(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers after which an early exit is considered: those of the last quarter of the model.

    Raises:
        ModelUnsupported, ModelCorrupt: the model cannot be cut, or not behind any of these layers.
    """
    n = check_cuttable(header)
    layers = tuple(layer for layer in exit_cuts(header) if layer + 1 >= 3 * n / 4)
    if not layers:
        raise ModelUnsupported(
            f"An early exit leaves out at most a quarter of the {n} layers, and this model can be cut behind:"
            f" {ranges(exit_cuts(header))}.", "Do without the early exit.",
        )  # fmt: skip
    return layers


def shards(model: Model, fingerprint: str, layer: int) -> tuple[Path, Path]:
    """Cut a model behind `layer` and return both parts, each with a head; the cache folder keeps them by `fingerprint`.

    Raises:
        ModelUnsupported: a model that cannot be cut.
        InvalidOption: there is no room for them.
    """
    names, folder = shard_files(model, fingerprint, layer), shard_folder()
    try:
        private_folder(folder)
        for name, (first, last) in zip(names, _ranges(model, layer), strict=True):
            if not name.is_file():
                cut(model.path, name, first, last, head=True)
    except OSError as error:
        raise InvalidOption(
            f"{model.path} cannot be cut for an early exit: {error}.", f"Make room in {folder}, or do without the exit."
        ) from error
    return names[0], names[1]


def shard_folder() -> Path:
    """Return the folder of all shards; it need not exist."""
    return cache_dir() / "shards"


def shard_files(model: Model, fingerprint: str, layer: int) -> tuple[Path, Path]:
    """Return the files of both parts of a model that is cut behind `layer`; they need not exist.

    Raises:
        ModelUnsupported: a model that cannot be cut.
    """
    lower, upper = (shard_folder() / f"{fingerprint[:16]}-{first}-{last}.gguf" for first, last in _ranges(model, layer))
    return lower, upper


def _ranges(model: Model, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (0, layer), (layer + 1, check_cuttable(model.header) - 1)
