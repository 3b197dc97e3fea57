"""A model in memory: its weights, its file's description of it, what drafts from its states, and the options of a
context over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from edgellm.engine import llama_api, native
from edgellm.engine.chat.template import TemplateRenderer
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.graph_hooks import Capture, attention_rows
from edgellm.engine.hardware import (
    DEFAULT_CACHE,
    N_BATCH,
    ON_PROCESSOR,
    QUANTISED,
    Hardware,
    offload_devices,
    placement,
)
from edgellm.engine.kv.kv_cache import snapshots_that_fit
from edgellm.engine.kv.row_padding import MOST_PADDING, Padding
from edgellm.engine.llama_api import NativeSpec
from edgellm.engine.native import lib
from edgellm.engine.text_model import TextModel, renderer_of
from edgellm.engine.trial.probe import EAGLE3, MTP, Probe, faults_of
from edgellm.errors import SAME_VERSION, InvalidOption, ModelUnsupported

if TYPE_CHECKING:
    from edgellm.engine.speculators.speculator import SpeculatorModel


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The parts of a model to load, and how. `hardware` also has the defaults of contexts over the model.

    `text_only`: no weights are loaded: the model tokenises, but no context can be opened over it. `chat`: the process
    that renders its chat template starts meanwhile, so that the first `chat_prompt` need not wait. `dry`: nothing is
    allocated, neither here nor by contexts, and llama.cpp only logs the memory that it would take; with `few_outputs`
    for the requested rows of logits, and not for all rows of a batch. `speculates`: a speculator is loaded, too: the
    EAGLE-3 head `eagle3`, if given, else the layer that predicts further tokens (MTP), if it can be used; see
    `engine.speculators`.
    """

    hardware: Hardware = ON_PROCESSOR
    text_only: bool = False
    chat: bool = False
    dry: bool = False
    few_outputs: bool = False
    speculates: bool = False
    eagle3: ModelFile | None = None


TEXT_ONLY = LoadSpec(text_only=True)


class Model(TextModel):
    """A loaded GGUF. Several contexts may share it; its memory is freed once it and all of them are closed.

    `n_ctx_train` are the positions that it was trained for.
    """

    def __init__(
        self, file: ModelFile, owned: native.Owned, renderer: TemplateRenderer | None, spec: LoadSpec,
        faults: Sequence[str], speculator: "SpeculatorModel | None" = None,
    ) -> None:  # fmt: skip
        """Set up a model that `load` has loaded; not for other callers."""
        super().__init__(file, owned, renderer)
        self.spec = spec
        self.faults = frozenset(faults)
        """The kinds of speculators that end the process, by `engine.trial.probe`: they are not used."""
        self.speculator = speculator
        """The MTP layer or EAGLE-3 head that drafts from the model's states."""
        pointer = owned.pointer
        self.n_layer: int = lib.llama_model_n_layer(pointer)
        self.window = max(0, int(lib.llama_model_n_swa(pointer)))
        """Positions of the sliding window that some layers attend to; 0 without one."""
        self.n_embd: int = lib.llama_model_n_embd(pointer)
        several = lib.llama_model_rope_type(pointer) in (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
        self.position_planes = 4 if several else 1
        """Positions of a row: several in models of images and text."""
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(pointer)

    @property
    def hardware(self) -> Hardware:
        """The settings with which it is computed."""
        return self.spec.hardware

    @cached_property
    def n_params(self) -> int:
        """The number of its weights."""
        return self.header.n_params

    @cached_property
    def offloaded(self) -> bool:
        """Return whether some layers are on a graphics card."""
        return bool(self.hardware.gpu_layers) and bool(offload_devices(self.hardware.devices))

    @cached_property
    def placement(self) -> str:
        """The name of the devices that compute the model, for names of measurements; "" for the processor."""
        return placement(self.hardware)

    @classmethod
    def load(
        cls, source: Path | ModelFile, spec: LoadSpec = LoadSpec(), *,
        progress: Callable[[float], None] | None = None, faults: Sequence[str] | None = None,
    ) -> "Model":  # fmt: skip
        """Load a model; a path (of a split model, its first part's) has its header checked first.

        `progress` is called with shares from 0 to 1; an exception that it raises stops the loading. A model whose
        header is new on this machine is loaded in a child process first (`engine.trial.probe`). If its `faults`
        are given, there is no trial.
        Raises ModelNotFound, ModelCorrupt, ModelUnsupported: as for `ModelFile.open`; ModelUnsupported: llama.cpp
        cannot use it, ends the process over it, it does not generate text, it only drafts for another model, or the
        EAGLE-3 head does not fit it; EngineFailed: the child process cannot be started, or was ended from outside.
        """
        native.start()
        file = source if isinstance(source, ModelFile) else ModelFile.open(source)
        if kind := drafter_kind(file.header):
            raise ModelUnsupported(
                f"{file.path.name} is {kind}: it drafts from another model's states, and writes no text by itself.",
                "Name it as the draft model, with the verifier that it was made for, in one process and on no mesh."
                if file.header.architecture == EAGLE3
                else "Name a whole model; MTP layers inside a model's own file are used. edgellm show tells.",
            )
        if spec.eagle3 is not None:
            speculator_module(EAGLE3).check_eagle3(spec.eagle3, file)
        asked = probe_of(file, spec)
        if faults is None:
            faults, tried = faults_of(asked, _half(progress, 0.0))
            progress = _half(progress, 0.5) if tried else progress
        renderer = renderer_of(file)
        try:
            if spec.chat and renderer is not None:
                renderer.start()
            mtp = spec.speculates and asked.mtp and MTP not in faults
            owned = llama_api.load_model(file.path, spec.hardware, spec.text_only, progress, dry=spec.dry, mtp=mtp)
            if lib.llama_model_has_encoder(owned.pointer) or not lib.llama_model_has_decoder(owned.pointer):
                raise ModelUnsupported(f"{file.path} is an encoder.", "Use a model that generates text.")
            speculator: SpeculatorModel | None = None
            if mtp:
                speculator = speculator_module(MTP).loaded(owned, file.header.architecture)
            elif spec.speculates and spec.eagle3 is not None and EAGLE3 not in faults:
                speculator = speculator_module(EAGLE3).loaded(spec.eagle3, file, spec.hardware, dry=spec.dry)
            return cls(file, owned, renderer, spec, faults, speculator)
        except BaseException:
            if renderer is not None:
                renderer.close()
            raise

    @property
    def owned(self) -> native.Owned:
        """The native model, for contexts to hold."""
        self._check_open()
        if self.spec.text_only:
            raise InvalidOption(
                f"Only the vocabulary of {self.name} is loaded.", "Load the whole model to compute with it."
            )
        return cast(native.Owned, self._owned)

    def close(self) -> None:
        self.speculator = None
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


def probe_of(file: ModelFile, spec: LoadSpec) -> Probe:
    """Return the trial of a model for a child process."""
    mtp = not spec.text_only and spec.eagle3 is None and not mtp_obstacle(file.header)
    return Probe(file, spec.hardware, spec.text_only, mtp, spec.eagle3, spec.dry)


def _half(progress: Callable[[float], None] | None, start: float) -> Callable[[float], None] | None:
    return None if progress is None else lambda share: progress(start + share / 2)


def load_tokenizer(path: Path) -> Model:
    """Return a tokenizer that somebody has sent, as a model without weights. Raises ModelCorrupt, ModelUnsupported: the
    file is something else."""
    if (file := ModelFile.open(path)).header.tensors:
        raise ModelUnsupported("It holds more than a tokenizer.", SAME_VERSION)
    model = Model.load(file, LoadSpec(text_only=True, chat=True))
    try:
        _ = model.vocabulary  # Raises without a vocabulary.
    except BaseException:
        model.close()
        raise
    return model


SPECULATORS = {
    MTP: "edgellm.engine.speculators.mtp",
    EAGLE3: "edgellm.engine.speculators.eagle3",
}  # fmt: skip
"""The module of each kind of speculator. Without a kind's line, its files are refused."""

_DRAFTERS = {
    EAGLE3: "an EAGLE-3 head",
    "dflash": "a DFlash drafter",
    "gemma4-assistant": "a drafter for Gemma 4 (assistant)",
}
"""Files that read the states of another model's layers while that model computes, by architecture."""


def speculator_module(kind: str) -> Any:
    """Return the module of a kind of speculator. Raise ModelUnsupported without one."""
    if kind not in SPECULATORS:
        raise ModelUnsupported(f"This edgellm cannot draft by {kind}.", "Leave it out.")
    return import_module(SPECULATORS[kind])


def is_eagle3(header: GgufHeader) -> bool:
    """Return whether a file is an EAGLE-3 head."""
    return header.architecture == EAGLE3


def drafter_kind(header: GgufHeader) -> str:
    """Return the kind of a file that only drafts for another model, such as "an EAGLE-3 head"; "" for a whole model."""
    if (kind := _DRAFTERS.get(header.architecture)) is not None:
        return kind
    trunk = any(tensor.name.startswith("blk.0.") for tensor in header.tensors)
    return "an MTP layer without the model that it belongs to" if header.mtp_layers and not trunk else ""


def mtp_obstacle(header: GgufHeader) -> str:
    """Return why the MTP layer of a model with this header cannot be used; "" if it can."""
    if not header.mtp_layers:
        return "it has no layer that predicts further tokens (MTP)"
    if MTP not in SPECULATORS:
        return "its layer that predicts further tokens (MTP) is not used"
    return str(speculator_module(MTP).unusable(header))


PREDICTED_ROWS = 32
"""Rows of logits in a batch that predicts a text's tokens: 19 MB at 152,000 tokens."""
_CHECKED_ROWS = 9  # rows of logits for each sequence in a batch that verifies drafts
_PLAIN_BATCH = 128  # rows without flash attention: more are not faster, and their scores take memory


def output_rows(n_seq: int, n_batch: int) -> int:
    """Return the most rows of logits in a batch of `n_batch` rows of `n_seq` sequences."""
    return min(n_batch, max(PREDICTED_ROWS, _CHECKED_ROWS * n_seq))


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """`n_seq` sequences of up to `n_ctx` positions each; None: as the model's `hardware` says, or by default.

    `n_batch`: rows of a batch, `N_BATCH` by default. `threads` default to the physical cores that this process may use,
    and to one for a tiny model.

    `unified`: one buffer for all sequences, in which branching copies nothing; without it each has its own, which is
    faster for many unrelated sessions. With `spare` a unified buffer has `n_ctx + spare` cells instead of room for all
    sequences in full: enough for one sequence and its branches, which share its cells.

    A float32 model has a float32 cache and no flash attention: how ids are batched then changes logits by at most 1e-5
    of the largest. With flash attention on a CPU, which rounds to 16 bits, it is 1e-3, and the number of threads
    matters, too. `flash`: flash attention, by default where it pays and is possible.

    `rolls_back`: where the model's state is recurrent, keep snapshots of it, so that drafted tokens at the end of a
    batch can be rolled back at once; otherwise checkpoints are saved to roll back to. `speculates`: the
    model's `speculator` is opened beside it, if it has one. `whole_window`: keep all positions of a sliding window, so
    that rows that cannot be read again, such as embeddings, can still be rolled back. `reproducible`: passes are padded
    so that logits do not depend on how ids were batched, to the bit; by `padding`, which a trial finds if it is None.
    """

    n_ctx: int
    n_seq: int = 1
    n_batch: int | None = None
    threads: int | None = None
    unified: bool = True
    spare: int | None = None
    flash: bool | None = None
    rolls_back: bool = False
    speculates: bool = False
    whole_window: bool = False
    reproducible: bool = False
    padding: Padding | None = None

    def _check(self, n_batch: int) -> None:
        """Raise InvalidOption for sizes with which llama.cpp cannot open a context, or aborts."""
        most = lib.llama_max_parallel_sequences()
        sizes = ((self.n_ctx, "n_ctx", 2**31 - 1), (n_batch, "n_batch", 2**16), (self.n_seq, "n_seq", most))
        for value, name, limit in sizes:
            if not 1 <= value <= limit:
                raise InvalidOption(f"{name} is {value}.", f"Use 1 to {limit}.")
        if n_batch < self.n_seq:
            raise InvalidOption(
                f"A batch of {n_batch} rows has no room for a row of each of {self.n_seq} sequences.",
                f"Give an n_batch of at least {self.n_seq}.",
            )
        if self.threads is not None and self.threads < 1:
            raise InvalidOption(f"threads is {self.threads}.", "Use 1 or more, or None for all cores.")

    def resolved(self, model: Model, capture: Capture | None) -> NativeSpec:
        """Return the resolved options of a context over `model` with this `capture`.

        Where attention is captured, batches have as many rows as keep its scores within `SCORES` bytes:
        without flash attention each row has a score for every head and position. Raises InvalidOption: a size that is
        not positive, too many sequences, fewer rows in a batch than sequences (where llama.cpp would abort).
        """
        hardware, cells = model.hardware, self.n_ctx * self.n_seq
        if self.spare is not None:
            cells = min(self.n_ctx + self.spare, cells)
        rows = hardware.n_batch or (_PLAIN_BATCH if self.reproducible else N_BATCH)
        n_batch = max(self.n_seq, rows) if self.n_batch is None else self.n_batch
        self._check(n_batch)
        room_for_padding = MOST_PADDING if self.reproducible else 0
        cells += room_for_padding * self.n_seq
        attends = capture is not None and bool(capture.attention)
        if attends:
            n_batch = min(n_batch, attention_rows(model.header, cells))
        n_batch = max(self.n_seq, min(n_batch, cells))
        if self.reproducible:  # a whole batch needs no padding
            n_batch = max(MOST_PADDING * self.n_seq, n_batch // MOST_PADDING * MOST_PADDING)
        exact = model.header.is_f32
        flash = hardware.flash_attn if self.flash is None else self.flash
        if flash is None:
            quantised = hardware.cache_type in QUANTISED and not exact
            flash = quantised or native.flash_pays(model.n_params, n_batch, model.offloaded)
        flash = flash and not exact and not attends and not self.reproducible
        wanted = hardware.cache_type  # without flash attention, llama.cpp has no quantised values
        default = wanted is None or (wanted in QUANTISED and not flash)
        few = model.spec.few_outputs and (capture is None or capture.stop_after is None)
        return NativeSpec(
            cells, self.n_seq, n_batch, self.threads or hardware.threads or native.default_threads(model.n_params),
            self.unified, "f32" if exact else DEFAULT_CACHE if default else str(wanted), flash,
            snapshots=snapshots_that_fit(model.header, self.n_seq) if self.rolls_back else 0,
            whole_window=self.whole_window or self.reproducible,
            outputs=output_rows(self.n_seq, n_batch) if few else 0,
            n_ctx=self.n_ctx,
        )  # fmt: skip
