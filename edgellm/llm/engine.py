"""The engine of a pair: its models and drafters, opened once, and knowledge about them; it owns and closes them all."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol, Self, TypeVar

from edgellm.engine import Capture, Context, ContextSpec, Model
from edgellm.engine.kv.saved_prompts import SavedPrompts
from edgellm.engine.memory_fit import Placed, place_model, positions_of
from edgellm.engine.model import LoadSpec
from edgellm.errors import InvalidOption
from edgellm.llm.cost_curves import IdleWork, ModelCurve
from edgellm.llm.drafting import Drafting
from edgellm.llm.model_loading import (
    EngineConfig,
    PairFit,
    PairMemory,
    PairPlacement,
    Progress,
    fit,
    model_file,
    named,
    place_pair,
    remote_verifier,
)  # fmt: skip
from edgellm.llm.pair_stats import PairStats
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.params import mechanism
from edgellm.spec.protocols import Drafter, Elsewhere, Verifier
from edgellm.spec.sampling import ModelSampling, sampling_of
from edgellm.storage.chat_log import History
from edgellm.storage.model_files import resolve_pair
from edgellm.verifier.in_process import LocalVerifier


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """The abilities of a drafter beside drafting: measure the attention of `layers`, follow `branches` guesses of up to
    `gamma` tokens each, leave the model early for tokens surer than `exits`."""

    layers: tuple[int, ...] = ()
    branches: int = 0
    gamma: int = 0
    exits: float | None = None


class Drafters:
    """The drafters of one model, one per running reply. Idle drafters are kept only of the last kind."""

    def __init__(
        self, model: Model, spec: ContextSpec, fingerprint: Callable[[], str], fit: PairFit, saved_prompts: SavedPrompts
    ) -> None:
        """Open drafters of `model` with contexts like `spec` and `saved_prompts`. `fingerprint` returns that of its
        file, under which the cut parts of the model are kept. `fit` compares its vocabulary with the verifier's."""
        self.model, self._spec, self._fingerprint, self._fit = model, spec, fingerprint, fit
        self._saved_prompts = saved_prompts
        self._idle: list[tuple[DrafterKind, Drafter]] = []
        self._lock = threading.Lock()  # Several threads may write replies.

    @cached_property
    def parts(self) -> tuple[Model, Model]:
        """Return the parts of the model before and behind its first early exit."""
        opened: tuple[Model, Model] = mechanism("early exit").open_parts(self.model, self._fingerprint())
        return opened

    @contextmanager
    def taken(self, kind: DrafterKind = DrafterKind()) -> Iterator[Drafter]:
        """Take a drafter of this kind for the `with` block: the one that was given back last, or a new one. Raises
        EngineFailed: there is no memory for it; ModelUnsupported: an early exit from a model that cannot be cut."""
        with self._lock:
            found = next((one for one in self._idle if one[0] == kind), None)
            if found is not None:
                self._idle.remove(found)
            else:
                self._close_idle()
                found = kind, self._open(kind)
        try:
            yield found[1]
        finally:
            with self._lock:
                self._idle.insert(0, found)

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def close(self) -> None:
        """Close all drafters, which replies have given back by then."""
        self._close_idle()
        for part in vars(self).get("parts", ()):
            part.close()

    def _open(self, kind: DrafterKind) -> Drafter:
        shared, translation = self._fit.shared_tokens, self._fit.translation
        if kind.exits is not None:
            early: Drafter = mechanism("early exit").EarlyExitDrafter(
                *self.parts, self._spec, threshold=kind.exits, layers=kind.layers, shared=shared
            )
            return early
        spec = replace(self._spec, n_seq=1 + kind.branches, spare=kind.branches * 2 * kind.gamma)
        capture = Capture(attention=kind.layers) if kind.layers else None
        context = Context(self.model, spec, capture=capture, saved_prompts=self._saved_prompts)
        if translation is not None:
            translated: Drafter = mechanism("translation").TranslatedDrafter(self.model, context, translation)
            return translated
        drafter = mechanism("parallel drafting").BranchingDrafter if kind.branches else ModelDrafter
        opened: Drafter = drafter(self.model, context, kind.layers, shared=shared)
        return opened


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class PairEngine:
    """The opened models of one pair, and everything that its replies share.

    `text_model` decides the text, or at least has its tokenizer; `context` is the number of tokens that prompt and
    reply can have together. `fit` compares the vocabularies; `placement` has the places of the models in this process.
    """

    text_model: Model
    context: int
    verifier: Verifier | None
    drafting: Drafting

    def __init__(self, config: EngineConfig | None = None) -> None:
        """Set up an engine without models: `open` loads them, or `load`, `own` and `attach` do."""
        self.config = config or EngineConfig()
        self.idle = IdleWork()
        self.saved_prompts = SavedPrompts(self.config.prompt_cache if self.config.history else 0, lambda: History().on)
        self.closing = ExitStack()
        self.closing.callback(self.idle.close)
        self.fit, self.placement = PairFit(), PairPlacement(None, None, Counter())
        self.drafters: Drafters | None = None
        self.knowledge: PairStats | None = None

    @classmethod
    def open(cls, config: EngineConfig, progress: Progress | None = None) -> Self:
        """Load the models, and compare their vocabularies. `progress` is called with a model's name and its loaded
        share.

        Raises InvalidOption, ModelNotFound, ModelCorrupt, ModelUnsupported: from placing and loading; MemoryShort: the
        models and their contexts do not fit, raised before anything is loaded; VocabularyMismatch: a server has another
        tokenizer, or does not tell which; ProtocolError, VerifierUnreachable: nothing answers, or a verifier sends a
        tokenizer that is not its own; PairingRequired, NotPaired, NotPermitted, IdentityClash: the devices do not trust
        each other; ProfileUnusable: the profile is of other models or of another version.
        """
        engine = cls(config)
        with engine.closed_on_error():
            engine._open(progress)
        return engine

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the engine if the `with` block raises an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _open(self, progress: Progress | None) -> None:
        config = self.config
        draft, verifier, _ = resolved = resolve_pair(named(config.draft), named(config.verifier))
        self.placement = found = place_pair(draft, verifier, config)
        small = None
        if found.draft is not None:
            small = self.load(found.draft, progress, chat=found.verifier is None, speculates=verifier is None)
        checks: Verifier | None = None
        fits = PairFit()
        if found.verifier is not None:
            text = self.load(found.verifier, progress, chat=True, speculates=True)
            if small is not None:
                fits = fit(small, text, config.draft, config.verifier)
            if small is not None and fits.left_out == "verifier":
                text = small
            else:
                checks = self.own(self._verifier_of(text, positions_of(text.file, config.n_ctx or text.hardware.n_ctx)))
        else:
            text = small or self._load_tokenizer(found.taken, progress)
            if verifier is not None:
                checks, its_own = remote_verifier(str(verifier), config, text, self.closing, progress)
                if small is not None and its_own is not None:
                    fits = fit(small, its_own, config.draft, verifier)
                text = its_own or text
        if fits.left_out == "draft":
            small = None
        self.attach(text, small, checks, replace(fits, notice=fits.notice or resolved.notice))

    def _load_tokenizer(self, taken: Counter[str], progress: Progress | None) -> Model:
        """Return the model whose vocabulary and template are used without another model in this process."""
        name = resolve_pair(self.config.tokenizer, None).draft or self.config.tokenizer
        placed = place_model(model_file(name), self.config.computing(None), taken, verifies=False)
        return self.load(placed, progress, chat=True)

    def load(self, placed: Placed, progress: Progress | None = None, **purpose: bool) -> Model:
        """Load a model, owned by this engine; `purpose` as for `LoadSpec`. Meanwhile, its file is hashed."""
        self.idle.file_hash(placed.file.path)
        on_progress = partial(progress, placed.file.name) if progress else None
        spec = LoadSpec(placed.hardware, eagle3=placed.eagle3, **purpose)
        return self.own(Model.load(placed.file, spec, progress=on_progress))

    def attach_beside(
        self, text: Model, taken: Counter[str], verifier: Verifier, progress: Progress | None = None
    ) -> Self:
        """Add a `verifier` with the tokenizer of `text`, and load the named draft model, if any, beside its bytes
        `taken`. A default with another tokenizer is left out."""
        small, fits = None, PairFit()
        if (name := named(self.config.draft)) is not None:
            hardware = self.config.computing(self.config.draft_hardware)
            small = self.load(place_model(model_file(name), hardware, taken, verifies=False), progress)
            fits = fit(small, text, name, text.path)
        return self.attach(text, None if fits.left_out else small, verifier, fits)

    def own(self, part: T) -> T:
        """Close a part with the engine, and return it."""
        self.closing.callback(part.close)
        return part

    def attach(
        self, text: Model, draft: Model | None = None, verifier: Verifier | None = None,
        fits: PairFit | None = None,
    ) -> Self:  # fmt: skip
        """Add loaded models, with the tokenizer and chat template of `text`, and what their replies need. Without
        `fits`, the vocabularies are equal. Raises InvalidOption: both models are missing, or `n_ctx` is more than the
        draft model was trained for; ProfileUnusable: the profile is not of this pair."""
        config, idle = self.config, self.idle
        self.fit = fits or PairFit()
        self.text_model, self.verifier = text, verifier
        lengths = []
        if verifier is not None:
            length = verifier.capabilities.context_length
            lengths.append(min(length, config.n_ctx or length))
        if draft is not None:
            draft_hash = idle.file_hash(draft.path)
            lengths.append(positions_of(draft.file, config.n_ctx or draft.hardware.n_ctx))
            if verifier is not None:
                model_hash = self.elsewhere.model_hash if self.elsewhere else idle.file_hash(text.path)
                self.knowledge = PairStats(draft_hash, model_hash, config.profile, history=config.history)
            spec = ContextSpec(lengths[-1], threads=config.threads)
            self.drafters = self.own(Drafters(draft, spec, draft_hash.compute, self.fit, self.saved_prompts))
        if not lengths:
            raise InvalidOption("Neither a draft model nor a verifier is given.", "Give at least one of the two.")
        self.context = min(lengths)
        curve = None
        if not self.linked:
            curve = ModelCurve(text, config.threads, idle.file_hash(text.path), idle, history=config.history)
        self.drafting = self.own(Drafting(text, partial(self._verifier_of, text, self.context), curve))
        self.own(idle)  # Registered again, to be closed first: callbacks run in reverse, and idle work uses the models.
        if curve is not None:
            idle.rest()  # Do not measure yet: a command asks its question at once.
            idle.add(curve.measure)
        return self

    def _verifier_of(self, model: Model, n_ctx: int) -> Verifier:
        """Return a verifier over `model`; of several replies at once, it computes batches."""
        replies = self.placement.replies
        spec = ContextSpec(
            n_ctx, replies, threads=self.config.threads, unified=replies == 1, rolls_back=True,
            speculates=True, reproducible=model.hardware.reproducible,
        )  # fmt: skip
        if replies == 1:
            return LocalVerifier(model, spec, self.saved_prompts)
        from edgellm.verifier.worker import BatchedVerifier

        return BatchedVerifier(model, spec, self.saved_prompts)

    @property
    def batches(self) -> bool:
        """Return whether replies that are written at once share batches of the model that decides the text."""
        return self.placement.replies > 1 and not self.linked

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Return what is known of a verifier in other processes."""
        return None if self.verifier is None else self.verifier.elsewhere

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
        return sampling_of(self.text_model.file) if told is None else told

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return where each model is, and why."""
        found = "" if self.elsewhere is None else self.elsewhere.finding
        return (*(placed.reason for placed in self.placement.placed), found)

    @property
    def models(self) -> list[Model]:
        """Return the models in this process."""
        return [self.text_model] if self.draft in (None, self.text_model) else [self.draft, self.text_model]

    @property
    def memory(self) -> PairMemory:
        """Return the bytes that the models take, with contexts for all replies: as placed, or by their headers."""
        placement, headers = self.placement, [model.header for model in self.models]
        weights = sum(header.weight_bytes for header in headers)
        taken = Counter(CPU=weights + self.context * sum(header.cache_bytes_per_token for header in headers))
        if placement.placed:
            taken = placement.taken - Counter(self.config.beside or {})
        return PairMemory(taken, min(weights, taken["CPU"]))

    def close(self) -> None:
        """Free the memory."""
        self.closing.close()
