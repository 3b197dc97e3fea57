"""The options of a context, and the sizes, threads and kind of cache that result for a model and its hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm.engine import native
from edgellm.engine.gguf.memory import output_rows
from edgellm.engine.graph_hooks import Capture, attention_rows
from edgellm.engine.hardware import DEFAULT_CACHE, N_BATCH, QUANTISED
from edgellm.engine.kv.kv_cache import snapshots_that_fit
from edgellm.engine.llama_api import NativeSpec
from edgellm.engine.model import Model
from edgellm.engine.native import lib
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import InvalidOption

_PLAIN_BATCH = 128  # rows without flash attention: more are not faster, and their scores take memory


@dataclass(frozen=True, slots=True)
class Padding:
    """Passes of at least `least` rows for each sequence, whose number `multiple` divides, so that llama.cpp computes a
    row alike, whatever rows are beside it.

    A kernel is chosen by the number of rows of a pass, and kernels round differently: a model that has read a text in
    other pieces may continue it differently. On processors without flash attention a single row is computed by other
    kernels than several rows; with weights laid out for products of four rows, the last rows of a pass that four do not
    divide are. So a trial finds the least numbers of rows for which all passes agree to the bit, and each pass is
    padded to such a number.
    """

    least: int = 1
    multiple: int = 1

    def rows(self, n: int) -> int:
        """Return the rows of a pass over `n` rows of one sequence."""
        return max(self.least, -(-n // self.multiple) * self.multiple)


PADDINGS = (Padding(), Padding(2), Padding(4, 4), Padding(8, 8))
"""The paddings that are tried, the cheapest first."""
MOST_PADDING = PADDINGS[-1].multiple
"""Rows that padding adds at most."""
_WIDTHS, _LONG = (1, 2, 3, 5, 7, 8, 16), (61, 64, 100)
"""Rows of the passes that are tried, which cover the kernels' tiles and what is left over of them."""
DEEP = 520
"""Positions before them: some kernels differ only behind the first 512."""
TRIED_ROWS = DEEP + max(_LONG)


def agree(decode: Callable[[Ids, int, int], Floats], vocabulary: int) -> bool:
    """Return whether all passes over the same rows give the same logits, to the bit. `decode` writes ids (n,) at a
    position, and returns the logits of the last rows, of as many as given."""
    ids = np.random.default_rng(0).integers(0, vocabulary, TRIED_ROWS).astype(np.int32)
    n = max(_WIDTHS)
    decode(ids[:DEEP], 0, 1)
    found = set()
    for width in _WIDTHS:
        rows = [decode(ids[at : at + width], at, width).copy() for at in range(DEEP, DEEP + n, width)]
        found.add(np.concatenate(rows)[:n].tobytes())
    ends = set()
    for width in _LONG:
        part, start = ids[DEEP + n - width : DEEP + n], DEEP + n - width
        rows_of = decode(part, start, n)
        found.add(rows_of.tobytes())
        ends.add(rows_of[-1].tobytes())
        ends.add(decode(part, start, 1).tobytes())
    return len(found) == len(ends) == 1


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
        spare = MOST_PADDING if self.reproducible else 0
        cells += spare * self.n_seq
        attends = capture is not None and bool(capture.attention)
        if attends:
            n_batch = min(n_batch, attention_rows(model.header, cells))
        n_batch = max(self.n_seq, min(n_batch, cells))
        if self.reproducible:  # a whole batch needs no padding
            n_batch = max(MOST_PADDING * self.n_seq, n_batch // MOST_PADDING * MOST_PADDING)
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
