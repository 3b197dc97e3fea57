"""The engine of a pair: its models, opened once, and knowledge about them; it owns and closes everything."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from edgellm.engine import Model
from edgellm.engine.memory_fit import Placed
from edgellm.engine.model import LoadSpec
from edgellm.engine.trial.probe import TrialChild
from edgellm.errors import InvalidOption
from edgellm.llm.cost_curves import ModelCurve
from edgellm.llm.drafter_pool import Drafters
from edgellm.llm.idle_work import IdleWork
from edgellm.llm.model_loading import (
    EngineConfig,
    PairFit,
    PairMemory,
    PairPlacement,
    Progress,
    fit,
    named,
    place_named,
    place_pair,
    positions,
    try_ahead,
    verifier_of,
)
from edgellm.llm.ngram_runtime import NgramRuntime
from edgellm.llm.opening.elsewhere import OpenedVerifier, fit_remote, remote_verifier
from edgellm.llm.pair_stats import PairStats
from edgellm.spec.model_sampling import ModelSampling, sampling_of
from edgellm.spec.protocols import Verifier
from edgellm.storage import History
from edgellm.storage.default_pair import resolve_pair
from edgellm.storage.saved_prompts import SavedPrompts
from edgellm.verifier.in_process import LocalVerifier


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class PairEngine:
    """The opened models of one pair, and everything that its replies share.

    `text` decides the text, or at least has its tokenizer; `context` is the number of tokens that prompt and reply can
    have together. `elsewhere` describes a verifier in other processes, `fit` compares the vocabularies, and `placement`
    has the places of the models in this process.
    """

    text: Model
    context: int
    verifier: Verifier | None
    drafters: Drafters | None
    knowledge: PairStats | None
    retrieval: NgramRuntime

    def __init__(self, config: EngineConfig | None = None) -> None:
        """Set up an engine without models: `open` loads them, or `load`, `own` and `attach` do."""
        self.config = config or EngineConfig()
        self.idle = IdleWork()
        self.prompts = SavedPrompts(self.config.prompt_cache if self.config.history else 0, lambda: History().on)
        self.closing = ExitStack()
        self.closing.callback(self.idle.close)
        self.elsewhere: OpenedVerifier | None = None
        self.fit, self.placement = PairFit(), PairPlacement(None, None, Counter())

    @classmethod
    def open(cls, config: EngineConfig, progress: Progress | None = None) -> Self:
        """Load the models, and compare their vocabularies. `progress` is called with a model's name and its loaded
        share.

        Raises:
            InvalidOption: `n_ctx` is more than a model was trained for, or there is no such device.
            ModelNotFound, ModelCorrupt, ModelUnsupported: from loading.
            ModelUnsupported: an EAGLE-3 head does not fit the verifier, which must be in this process.
            MemoryShort: the models and their contexts do not fit; raised before anything is loaded.
            VocabularyMismatch: a stock server has another tokenizer, or a verifier that does not send it; names the
                first token that differs.
            ProtocolError: a verifier sends a tokenizer that is not its own.
            VerifierUnreachable: nothing answers at the address.
            PairingRequired, NotPaired, NotPermitted, IdentityClash: the devices do not trust each other.
            ProfileUnusable: the profile is of other models or of another version.
        """
        engine = cls(config)
        try:
            engine._open(progress)
        except BaseException:
            engine.close()
            raise
        return engine

    def _open(self, progress: Progress | None) -> None:
        config = self.config
        draft, verifier, _ = resolved = resolve_pair(named(config.draft), named(config.verifier))
        self.placement = found = place_pair(draft, verifier, config)
        ahead = None if found.draft is None else try_ahead(found.verifier, self.closing)
        small = None
        if found.draft is not None:
            small = self.load(found.draft, progress, chat=found.verifier is None, speculates=verifier is None)
        checks: Verifier | OpenedVerifier | None = None
        fits = PairFit()
        if found.verifier is not None:
            text = self.load(found.verifier, progress, chat=True, speculates=True, trial=ahead)
            if small is not None:
                fits = fit(small, text, config.draft, config.verifier)
            if small is not None and fits.left_out == "verifier":
                text = small
            else:
                context = positions(text, config.n_ctx), config.threads, self.prompts.of(text.path)
                checks = self.own(verifier_of(text, *context))
        else:
            text = small or self._load_tokenizer(found.taken, progress)
            if verifier is not None:
                far = checks = remote_verifier(str(verifier), config, text, self.closing, progress)
                fits = fit_remote(small, text, far, config.draft, verifier)
                text = far.text or text
        if fits.left_out == "draft":
            small = None
        self.attach(text, small, checks, replace(fits, notice=fits.notice or resolved.notice))

    def _load_tokenizer(self, taken: Counter[str], progress: Progress | None) -> Model:
        """Return the model whose vocabulary and template are used without another model in this process."""
        name = resolve_pair(self.config.tokenizer, None).draft or self.config.tokenizer
        return self.load(place_named(name, self.config.computing(None), taken, verifies=False), progress, chat=True)

    def load(
        self, placed: Placed, progress: Progress | None = None, trial: TrialChild | None = None, **purpose: bool
    ) -> Model:
        """Load a model, owned by this engine; `purpose` as for `LoadSpec`. Meanwhile, its file is hashed."""
        self.idle.file_hash(placed.file.path)
        on_progress = partial(progress, placed.file.path.name) if progress else None
        spec = LoadSpec(placed.hardware, eagle3=placed.eagle3, **purpose)
        return self.own(Model.load(placed.file, spec, progress=on_progress, trial=trial))

    def load_beside(
        self, text: Model, taken: Counter[str], progress: Progress | None = None
    ) -> tuple[Model | None, PairFit]:
        """Load the named draft model, if any, beside the bytes `taken` for a verifier with the tokenizer of `text`, and
        compare their vocabularies. A default with another tokenizer is left out."""
        if (name := named(self.config.draft)) is None:
            return None, PairFit()
        hardware = self.config.computing(self.config.draft_hardware)
        small = self.load(place_named(name, hardware, taken, verifies=False), progress)
        compared = fit(small, text, name, text.path)
        return None if compared.left_out else small, compared

    def own(self, part: T) -> T:
        """Close a part with the engine, and return it."""
        self.closing.callback(part.close)
        return part

    @classmethod
    def over(
        cls, text: Model, draft: Model | None, verifier: Verifier | OpenedVerifier | None, **settings: Any
    ) -> Self:
        """Return an engine of loaded models, which stay open when the engine is closed."""
        engine = cls(EngineConfig(**settings))
        try:
            return engine.attach(text, draft, verifier)
        except BaseException:
            engine.close()
            raise

    def attach(
        self, text: Model, draft: Model | None = None, verifier: Verifier | OpenedVerifier | None = None,
        fits: PairFit | None = None,
    ) -> Self:  # fmt: skip
        """Add loaded models, with the tokenizer and chat template of `text`, and what their replies need. Without
        `fits`, the vocabularies are equal.

        Raises:
            InvalidOption: both models are missing, or `n_ctx` is more than the draft model was trained for.
            ProfileUnusable: the profile is not of this pair.
        """
        config, idle = self.config, self.idle
        self.fit = fits or PairFit()
        if isinstance(verifier, OpenedVerifier):
            self.elsewhere, verifier = verifier, verifier.verifier
        self.text, self.verifier, self.drafters, self.knowledge = text, verifier, None, None
        lengths = []
        if verifier is not None:
            length = verifier.capabilities.context_length
            lengths.append(min(length, config.n_ctx or length))
        if draft is not None:
            draft_hash = idle.file_hash(draft.path)
            lengths.append(positions(draft, config.n_ctx))
            if verifier is not None:
                model_hash = self.elsewhere.model_hash if self.elsewhere else idle.file_hash(text.path)
                self.knowledge = PairStats(draft_hash, model_hash, config.profile, history=config.history)
            prompts = self.prompts.of(draft.path)
            self.drafters = self.own(
                Drafters(draft, lengths[-1], config.threads, draft_hash.compute, self.fit, prompts)
            )
        if not lengths:
            raise InvalidOption("Neither a draft model nor a verifier is given.", "Give at least one of the two.")
        self.context = min(lengths)
        curve = None
        if not self.linked:
            curve = ModelCurve(text, config.threads, idle.file_hash(text.path), idle, history=config.history)
        self.retrieval = self.own(
            NgramRuntime(text, self.context, config.threads, curve, self.prompts.of(text.path))
        )  # fmt: skip
        self.own(idle)  # Idle work must end before the models are closed.
        return self

    @property
    def linked(self) -> bool:
        """Return whether the verifier is in other processes."""
        return self.elsewhere is not None

    @property
    def draft(self) -> Model | None:
        """Return the draft model."""
        return None if self.drafters is None else self.drafters.model

    @property
    def sampling(self) -> ModelSampling:
        """Return the sampling of the model that decides the text."""
        told = None if self.elsewhere is None else self.elsewhere.sampling
        return sampling_of(self.text.file) if told is None else told

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return where each model is, and why."""
        found = [placed.reason for placed in self.placement.placed]
        if self.elsewhere is not None and self.elsewhere.finding:
            found.append(self.elsewhere.finding)
        return tuple(found)

    @property
    def models(self) -> list[Model]:
        """Return the models in this process."""
        return [self.text] if self.draft in (None, self.text) else [self.draft, self.text]

    @property
    def memory(self) -> PairMemory:
        """Return the bytes that the models take, with contexts for all replies."""
        placement, taken = self.placement, None
        if placement.placed:
            taken = placement.taken - Counter(self.config.beside or {})
        unopened = Counter({name: self._unopened * size for name, size in placement.each.items()})
        return replace(PairMemory.of(self.models, taken, self.context), unopened=unopened)

    @property
    def _unopened(self) -> int:
        """Return the number of contexts that have memory but are not open yet."""
        opened = self.placement.replies
        if isinstance(self.verifier, LocalVerifier):
            opened = self.verifier.opened()
        elif self.drafters is not None:
            opened = self.drafters.opened()
        return max(0, self.placement.replies - opened)

    def close(self) -> None:
        """Free the memory."""
        self.closing.close()
