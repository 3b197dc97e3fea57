"""The options of a context, and the sizes, threads and kind of cache that result for a model and its hardware."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.engine import native
from edgellm.engine.gguf.memory import output_rows
from edgellm.engine.graph_hooks import Capture, attention_rows
from edgellm.engine.hardware import DEFAULT_CACHE, N_BATCH, QUANTISED
from edgellm.engine.kv import row_padding
from edgellm.engine.kv.kv_cache import snapshots_that_fit
from edgellm.engine.kv.row_padding import Padding
from edgellm.engine.llama_api import NativeSpec
from edgellm.engine.model import Model
from edgellm.engine.native import lib
from edgellm.errors import InvalidOption

_PLAIN_BATCH = 128  # rows without flash attention: more are not faster, and their scores take memory


@dataclass(frozen=True, slots=True)
class ContextSpec:
    """`n_seq` sequences of up to `n_ctx` positions each; None: as the model's `hardware` says, or by default.

    `n_batch`: rows of a batch, `N_BATCH` by default. `threads` default to the physical cores that this process may use,
    and to one for a tiny model.

    `unified`: one buffer for all sequences, in which branching copies nothing; without it each has its own, which is
    faster for many unrelated sessions. With `spare` a unified buffer has `n_ctx + spare` cells instead of room for all
    sequences in full: enough for one sequence and its branches, which share its cells.

    `exact` keeps the cache in float32 and does without flash attention, so that logits do not depend on how the ids
    were batched (1e-5 of the largest; flash attention on a CPU rounds to 16 bits, and differently for other batch sizes
    and, with single rows, for other numbers of threads: 1e-3). By default for a model in float32. `flash`: flash
    attention, by default where it pays and is possible.

    `lazy`: it can decode lazily, if the model's head can be computed alone and nothing is captured; a pass then takes
    1% longer. `rolls_back`: where the model's state is recurrent, keep snapshots of it, so that drafted tokens at the
    end of a batch can be rolled back at once; otherwise checkpoints are saved to roll back to. `speculates`: the
    model's `speculator` is opened beside it, if it has one. `whole_window`: keep all positions of a sliding window, so
    that rows can be rolled back, which cannot be read again. `reproducible`: passes are padded so that logits do not
    depend on how the ids were batched, to the bit; by `padding`, which a trial finds where it is None.
    """

    n_ctx: int
    n_seq: int = 1
    n_batch: int | None = None
    threads: int | None = None
    unified: bool = True
    spare: int | None = None
    exact: bool | None = None
    flash: bool | None = None
    lazy: bool = False
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

    def resolved(self, model: Model, capture: Capture | None) -> OpenSpec:
        """Return the resolved options of a context over `model` with this `capture`.

        Where attention is captured, batches have as many rows as keep its scores within `SCORES` bytes, at least 32:
        without flash attention each row has a score for every head and position.

        Raises:
            InvalidOption: a size that is not positive, too many sequences, fewer rows in a batch than sequences (where
                llama.cpp would abort).
        """
        hardware, cells = model.hardware, self.n_ctx * self.n_seq
        if self.spare is not None:
            cells = min(self.n_ctx + self.spare, cells)
        rows = hardware.n_batch or (_PLAIN_BATCH if self.reproducible else N_BATCH)
        n_batch = max(self.n_seq, rows) if self.n_batch is None else self.n_batch
        self._check(n_batch)
        spare = row_padding.MOST if self.reproducible else 0
        cells += spare * self.n_seq
        attends = capture is not None and bool(capture.attention)
        if attends:
            n_batch = min(n_batch, attention_rows(model.header, cells))
        n_batch = max(self.n_seq, min(n_batch, cells))
        if self.reproducible:  # a whole batch needs no padding
            n_batch = max(row_padding.MOST * self.n_seq, n_batch // row_padding.MOST * row_padding.MOST)
        exact = model.is_f32 if self.exact is None else self.exact
        flash = hardware.flash_attn if self.flash is None else self.flash
        if flash is None:
            quantised = hardware.cache_type in QUANTISED and not exact
            flash = quantised or native.flash_pays(model.n_params, n_batch, model.offloaded)
        flash = flash and not exact and not attends and not self.reproducible
        wanted = hardware.cache_type  # without flash attention, llama.cpp has no quantised values
        default = wanted is None or (wanted in QUANTISED and not flash)
        few = model.spec.few_outputs and not (capture and capture.outputs)
        native_spec = NativeSpec(
            positions=cells,
            sequences=self.n_seq,
            rows=n_batch,
            threads=self.threads or hardware.threads or native.default_threads(model.n_params),
            unified=self.unified,
            cache_type="f32" if exact else DEFAULT_CACHE if default else str(wanted),
            flash=flash,
            snapshots=snapshots_that_fit(model.header, model.size_bytes, self.n_seq) if self.rolls_back else 0,
            whole_window=self.whole_window or self.reproducible,
            outputs=output_rows(self.n_seq, n_batch) if few else 0,
        )
        return OpenSpec(self.n_ctx, exact, native_spec)


@dataclass(frozen=True, slots=True)
class OpenSpec:
    """The resolved options of a context: `n_ctx` positions of a sequence, `exact`, llama.cpp's parameters, and the
    `padding` of passes."""

    n_ctx: int
    exact: bool
    native: NativeSpec
    padding: Padding | None = None
