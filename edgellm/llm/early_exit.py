"""Early exits from a draft model: the two parts that it is cut into, and a drafter with them."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from edgellm.engine import Capture, Context, ContextSpec, Floats, GgufHeader, Ids, Model, Recorder, cut
from edgellm.engine.gguf.cuttable import check_cuttable, exit_cuts
from edgellm.engine.model import LoadSpec
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from edgellm.layer_range import ranges
from edgellm.spec.drafters.model import ModelDrafter, Step
from edgellm.spec.protocols import GenerationState
from edgellm.spec.sampling import top2
from edgellm.spec.types import Chunk
from edgellm.state import private_folder
from edgellm.system import cache_dir


def exit_layers(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers after which an early exit is considered: those of the last quarter of the model. Raises
    ModelUnsupported, ModelCorrupt: the model cannot be cut, or not behind any of these layers."""
    n = check_cuttable(header)
    layers = tuple(layer for layer in exit_cuts(header) if layer + 1 >= 3 * n / 4)
    if not layers:
        raise ModelUnsupported(
            f"An early exit leaves out at most a quarter of the {n} layers, and this model can be cut behind:"
            f" {ranges(exit_cuts(header))}.", "Do without the early exit.",
        )  # fmt: skip
    return layers


def first_exit(model: Model) -> int:
    """Return the first layer after which the model may be left. Raise InvalidOption if there is none."""
    try:
        return exit_layers(model.header)[0]
    except (ModelUnsupported, ModelCorrupt) as error:
        raise InvalidOption(
            f"There is no early exit from {model.name}: {error.what}", "Leave out --early-exit on."
        ) from None


def open_parts(model: Model, fingerprint: str) -> tuple[Model, Model]:
    """Return the part of a model up to its first exit, and the rest. The cache folder keeps their files by the
    `fingerprint` of the model's file. Raise InvalidOption: the model cannot be cut, or there is no room for the
    parts."""
    layer, folder, files = first_exit(model), cache_dir() / "shards", list[Path]()
    try:
        private_folder(folder)
        for first, last in ((0, layer), (layer + 1, check_cuttable(model.header) - 1)):
            files.append(file := folder / f"{fingerprint[:16]}-{first}-{last}.gguf")
            if not file.is_file():
                cut(model.path, file, first, last, head=True)
    except OSError as error:
        raise InvalidOption(
            f"{model.path} cannot be cut for an early exit: {error}.", f"Make room in {folder}, or do without the exit."
        ) from error
    with ExitStack() as opened:
        lower, upper = (opened.enter_context(Model.load(file, LoadSpec(model.hardware))) for file in files)
        opened.pop_all()
    return lower, upper


_PREFILL_ROWS = 32  # rows at once: llama.cpp reserves logits for each, even when it stops before the head
_HEAD_ROWS = 4  # most rows that go through the head together, which is cheaper than two batches


class EarlyExitDrafter(ModelDrafter):
    """A drafter with a model that is cut in two."""

    def __init__(
        self, lower: Model, upper: Model, spec: ContextSpec, *, threshold: float, layers: tuple[int, ...] = (),
        shared: int | None = None,
    ) -> None:  # fmt: skip
        """Open contexts like `spec` over the two shards of a model: `cut(..., 0, e, head=True)` and `cut(..., e + 1,
        last, head=True)`. A token leaves early where the probability of the likeliest token is more than `threshold`
        above that of the second; 1 means never. `layers` and `shared` as in `ModelDrafter`, layers of the upper shard
        without effect."""
        self._layer, self._threshold = lower.n_layer - 1, threshold
        layers = tuple(one for one in layers if one <= self._layer)
        capture = Capture(attention=layers, stop_after=self._layer)
        with ExitStack() as opened:
            below = opened.enter_context(Context(lower, replace(spec, whole_window=True), capture=capture))
            self._upper = Context(upper, replace(spec, whole_window=True))
            opened.pop_all()
        super().__init__(lower, below, layers, shared)
        self._recorder = cast("Recorder", below.captured)
        # The lower shard's output at each position; rows beyond the upper cache's length wait.
        self._rows = np.empty((spec.n_ctx, lower.n_embd), dtype=np.float32)

    def begin(self, state: GenerationState) -> None:
        super().begin(state)
        self._upper.set_cancel(state.should_stop)

    def end(self) -> None:
        super().end()
        self._upper.set_cancel(None)

    def close(self) -> None:
        super().close()
        self._upper.close()

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        try:
            return super().propose(state, gamma)
        except BaseException:  # The rows that wait may not be those of the lower cache.
            self._context.clear()
            self._upper.clear()
            raise

    def _first(self, state: GenerationState, prefix: Ids) -> Step:
        """Decode new text. All but a few ids go through every layer."""
        common, report = self._context.sync(prefix), state.prompt_progress(self._model.name)
        self._upper.rollback(min(common, self._upper.length()))
        body = max(common, len(prefix) - _HEAD_ROWS)
        for at in range(common, body, _PREFILL_ROWS):
            if body - common > _PREFILL_ROWS:
                report(common, at, body)
            self._run_lower(prefix[at : min(at + _PREFILL_ROWS, body)], head=False)
        if body > common:
            self._run_upper(outputs=0)
        return self._step(prefix[body:])

    def _step(self, ids: Ids) -> Step:
        row = self._run_lower(ids)[0][: self._shared]
        facts = top2(row)
        if facts.p1 - facts.p2 > self._threshold:
            return row, facts, self._layer
        row = self._run_upper(outputs=1)[0][: self._shared]
        return row, top2(row), None

    def _run_lower(self, ids: Ids, head: bool = True) -> Floats:
        """Decode `ids` in the lower shard and keep its output rows. Return the logits of the last row, (1, n_vocab),
        with `head`."""
        self._recorder.stop(not head)
        start = self._context.length()
        logits = self._context.decode(ids)
        self._rows[start : start + len(ids)] = self._recorder.output()
        return logits

    def _run_upper(self, outputs: int) -> Floats:
        """Decode all waiting rows in the upper shard; return full logits of the last `outputs` of them."""
        waiting = self._rows[self._upper.length() : self._context.length()]
        return self._upper.decode_embeddings(waiting, outputs=outputs)
