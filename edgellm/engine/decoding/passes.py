"""A context of llama.cpp: open it, run one batch after the other, return their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

from edgellm.engine import native
from edgellm.engine.abort_flag import Stop
from edgellm.engine.cores import sharing
from edgellm.engine.decoding import driver
from edgellm.engine.decoding.batch import LlamaBatch
from edgellm.engine.decoding.cache import Cache
from edgellm.engine.decoding.graph_hooks import Capture, Recorder
from edgellm.engine.decoding.lazy_logits import Late
from edgellm.engine.decoding.lm_head import LMHead
from edgellm.engine.model import Model
from edgellm.engine.native import lib
from edgellm.engine.types import Floats, Ids
from edgellm.errors import InvalidOption, ModelUnsupported, Stopped

_UNWATCHED = nullcontext()


class Passes(Cache):
    """The common part of every way to decode; see `Context`."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_seq: int = 1,
        n_batch: int = 512,
        threads: int | None = None,
        unified: bool = True,
        spare: int | None = None,
        capture: Capture | None = None,
        exact: bool | None = None,
        flash: bool | None = None,
        late: bool = False,
    ) -> None:
        """Reserve the cache. `flash` attention defaults to `flash_pays`, where it is possible.

        With `late` it can decode late, where the model's head can be computed alone and nothing is captured; a pass
        then takes 1% longer.

        Raises:
            InvalidOption: a size that is not positive, too many sequences, fewer rows in a batch than sequences (where
                llama.cpp would abort), spare cells for separate buffers, a layer to capture that does not exist.
            EngineFailed: llama.cpp cannot reserve it, for want of memory above all.
        """
        driver.check_sizes(n_ctx, n_seq, n_batch, threads, unified, spare)
        if capture is not None:
            capture.check(model.n_layer)
        super().__init__(model, n_ctx, n_seq, unified)
        cells = n_ctx * n_seq if spare is None else min(n_ctx + spare, n_ctx * n_seq)
        self.n_batch = max(n_seq, min(n_batch, cells))
        self.threads = self.threads_used = threads or native.default_threads(model.n_params)
        """Threads of a decode that is alone, and of the last decode: fewer if others computed at the same time."""
        self.shared = 0
        """Decodes that had fewer threads than a decode that is alone."""
        self.exact = model.is_f32 if exact is None else exact
        flash = native.flash_pays(model.n_params, self.n_batch) if flash is None else flash
        self.flash = flash and not self.exact and not (capture and capture.attention)
        self.captured = None if capture is None else Recorder(capture, n_seq, unified)
        head = LMHead.open(model, self.threads) if late and capture is None else None
        self._late = None if head is None else Late(head)
        seer = self.captured or self._late
        self._owned = driver.open_context(
            model.owned,
            positions=cells,
            sequences=n_seq,
            rows=self.n_batch,
            threads=self.threads,
            unified=unified,
            exact=self.exact,
            callback=seer and seer.callback,
            flash_attention=self.flash,
        )
        if not lib.llama_get_memory(self._owned.pointer):
            raise ModelUnsupported(f"{model.name} keeps no cache.", "Use a model that generates text.")
        self._logits = driver.LogitsView(model.n_vocab)
        self._stopped: Callable[[], bool] | None = None
        self._batch = LlamaBatch(self.n_batch, n_ctx)
        outer = None if capture is None else {capture.stop_after, *capture.outputs}
        # the last layer's output holds only the rows of which logits are wanted
        self._flag_all = bool(outer and model.n_layer - 1 in outer)
        self._plain = not self._flag_all and (capture is None or capture.stop_after is None)
        rows_only = capture is None or not (capture.outputs or (self.captured and self.captured.stops))
        self._pairs = rows_only and not self.flash and not self.exact and native.is_small(model.n_params)
        self._widths: Sequence[int] = ()

    @property
    def late(self) -> Late | None:
        """The source of late logits for `Context.decode_late`; None where that computes all logits at once."""
        return None if self.model.head_is_plain is False else self._late

    def heed(self, stopped: Callable[[], bool] | None) -> None:
        """Have decodes ask `stopped` before each of llama.cpp's batches, and a `Stop` also during a batch.

        A decode that is stopped raises Stopped, and has changed nothing. None: nothing is asked.
        """
        if self._owned is not None:
            driver.heed(self._owned, stopped if isinstance(stopped, Stop) else None)
        self._stopped = stopped

    def fill(self, widths: Sequence[int], heads: Sequence[float] = ()) -> None:
        """Have a decode of n rows of one sequence filled up to `widths[n]` rows, where that is more and there is room.

        The additional rows are copies of the last one, and are dropped. Some numbers of rows take less time than
        smaller ones: llama.cpp computes quantised rows in fours, and the rest one by one. `heads` are the seconds of
        heads of `HEADS` rows together, by which late heads are planned.
        """
        if self.late is not None and heads:
            self.late.take(heads)
        self._widths = widths if self.captured is None else ()

    @property
    def pointer(self) -> Any:
        """The native context, for llama.cpp's own functions."""
        return self._open().pointer

    def close(self) -> None:
        """Close the context; its memory is freed once no view of the logits is left."""
        self._owned = None
        if self._late is not None:
            self._late.close()
            self._late = None
        self._logits = driver.LogitsView(self.model.n_vocab)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _begin(self, seq: int, n: int, outputs: int) -> int:
        """Return the length of the sequence if `n` more positions with `outputs` rows of logits are possible."""
        self._open()
        if n < 1 or not 0 <= outputs <= min(n, self.n_batch):
            raise InvalidOption(
                f"{outputs} rows of logits of {n} ids were asked for.", f"Give ids, and ask for at most {self.n_batch}."
            )
        if self.captured is not None:
            self.captured.clear()
        return self._sequences.room(seq, n)

    def _place(self, at: int, seq: int, ids: Ids, outputs: int) -> int:
        """Put `ids` into the batch from row `at` on, and into the record; return the row after them."""
        return self._batch.put(at, seq, self._sequences.note(seq, ids), ids, outputs, self._flag_all)

    def _run(self, n: int, batch: Any, copies: int = 0) -> None:
        """Decode the first `n` rows of a batch; the last `copies` of them are not shown."""
        if self._stopped is not None and self._stopped():
            raise Stopped
        if self.captured is not None:
            self.captured.begin(n, copies)
        context = self._open()
        with self.captured or self._late or _UNWATCHED, sharing.computing(self.threads) as share:
            if share != self.threads_used:
                driver.set_threads(context, share)
                self.threads_used = share
            self.shared += share < self.threads
            driver.decode(context, batch, n)

    def _views(self, rows: Sequence[tuple[int, int]]) -> list[Floats]:
        """Return the logits for the entries of the last batch, given as (rows, rows with logits wanted)."""
        if self.captured is not None and self.captured.stops:
            return [self._logits.none] * len(rows)
        flagged = [n if self._flag_all else outputs for n, outputs in rows]
        view, end, views = self._logits.rows(self._open(), sum(flagged)), 0, []
        for (_, outputs), n in zip(rows, flagged, strict=True):
            end += n
            views.append(view[end - outputs : end])
        return views
