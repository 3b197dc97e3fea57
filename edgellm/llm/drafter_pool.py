"""Drafters of a pair: opened when a reply needs a drafter, and used again by the next reply."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edgellm.engine import Capture, Context, ContextSpec, Model
from edgellm.engine.kv.prompt_cache import PromptCache
from edgellm.llm.model_loading import PairFit
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.mechanisms import mechanism
from edgellm.spec.protocols import Drafter

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
        self, model: Model, n_ctx: int, threads: int | None, fingerprint: Callable[[], str], fit: PairFit,
        prompt_cache: PromptCache | None = None,
    ) -> None:  # fmt: skip
        """Open drafters of `model`. `fingerprint` returns that of its file, which names the parts for early exits.
        `fit` compares its vocabulary with the verifier's. `prompt_cache` as for `Context`."""
        self.model, self.translation, self._shared = model, fit.translation, fit.shared_tokens
        self._n_ctx, self._threads, self._fingerprint, self._prompt_cache = n_ctx, threads, fingerprint, prompt_cache
        self._idle: list[tuple[DrafterKind, Drafter]] = []
        self._in_use: list[Drafter] = []
        self._lock = threading.Lock()  # Several threads may write replies.

    @cached_property
    def exits(self) -> Any:
        """Return the early exits from the model (`early_exit.EarlyExits`)."""
        return mechanism("early exit").EarlyExits(self.model, self._fingerprint())

    def take(self, kind: DrafterKind) -> Drafter:
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

    def give(self, kind: DrafterKind, drafter: Drafter) -> None:
        """Give a drafter back, for the next reply."""
        with self._lock:
            if drafter in self._in_use:
                self._in_use.remove(drafter)
                self._idle.insert(0, (kind, drafter))

    @contextmanager
    def taken(self, kind: DrafterKind = DrafterKind()) -> Iterator[Drafter]:
        """Take a drafter for the `with` block."""
        drafter = self.take(kind)
        try:
            yield drafter
        finally:
            self.give(kind, drafter)

    def opened(self) -> int:
        """Return how many drafters are open, in use and idle."""
        return len(self._in_use) + len(self._idle)

    def close(self) -> None:
        """Close all drafters, also those that were not given back."""
        for drafter in [*self._in_use, *(idle for _, idle in self._idle)]:
            drafter.close()
        self._in_use.clear()
        self._idle.clear()
        if "exits" in vars(self):
            self.exits.close()

    def _open(self, kind: DrafterKind) -> Drafter:
        terms: dict[str, Any] = {"n_ctx": self._n_ctx, "threads": self._threads}
        if kind.exit_layer is not None and self.translation is None:
            early: Drafter = self.exits.open(
                kind.exit_layer, **terms, threshold=kind.threshold, layers=kind.layers, shared=self._shared
            )
            return early
        spec = ContextSpec(**terms, n_seq=1 + kind.branches, spare=kind.branches * max(SPARE, kind.gamma + 2))
        capture = Capture(attention=kind.layers) if kind.layers else None
        context = Context(self.model, spec, capture=capture, prompt_cache=self._prompt_cache)
        if self.translation is not None:
            translated: Drafter = mechanism("translation").TranslatedDrafter(self.model, context, self.translation)
            return translated
        drafter = mechanism("parallel drafting").BranchingDrafter if kind.branches else ModelDrafter
        opened: Drafter = drafter(self.model, context, kind.layers, shared=self._shared)
        return opened
