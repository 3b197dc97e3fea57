"""Early exits from a draft model: the two parts that it is cut into, and where an exit pays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, cast

import numpy as np

from edgellm.engine import Capture, Context, ContextSpec, Floats, GgufHeader, Ids, Model, Recorder, cut, top2
from edgellm.engine.gguf.cuttable import check_cuttable, exit_cuts
from edgellm.engine.model import LoadSpec
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from edgellm.layer_range import ranges
from edgellm.spec.drafters.model import ModelDrafter, Step
from edgellm.spec.gates.profile import ExitPoint
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.state import private_folder
from edgellm.storage.saved_prompts import removed
from edgellm.system import cache_dir

if TYPE_CHECKING:
    from edgellm.llm.engine import Drafters

THRESHOLD = 0.7  # paper's margin
MOST_READ = 4_096
"""Most tokens of a prompt that an exit is measured on: its contexts come beside the pair's own."""
_PROMPTS = 12  # prompts that an exit is measured on, at most
_MAX_SECONDS, _MIN_AGREEMENT = 0.9, 0.98
"""Shares of full depth's time, and of tokens on which full depth agrees, between which an exit pays."""


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


class EarlyExits:
    """The early exits from one model; the cache folder keeps its parts by the fingerprint of its file."""

    def __init__(self, model: Model, fingerprint: str) -> None:
        self._model, self._fingerprint = model, fingerprint[:16]
        self._parts: dict[int, tuple[Model, Model]] = {}

    def open(
        self, layer: int, spec: ContextSpec, *, threshold: float = THRESHOLD, layers: tuple[int, ...] = (),
        shared: int | None = None,
    ) -> EarlyExitDrafter:  # fmt: skip
        """Return a drafter that leaves the model after `layer`; the others as for `EarlyExitDrafter`. Raises
        ModelUnsupported: a model that cannot be cut; InvalidOption: there is no room for the parts."""
        if layer not in self._parts:
            hardware = LoadSpec(self._model.hardware)
            with ExitStack() as opened:
                lower, upper = (opened.enter_context(Model.load(part, hardware)) for part in self._cut(layer))
                opened.pop_all()
            self._parts[layer] = lower, upper
        lower_part, upper_part = self._parts[layer]
        return EarlyExitDrafter(
            lower_part, upper_part, n_ctx=spec.n_ctx, threads=spec.threads, threshold=threshold,
            layers=tuple(each for each in layers if each < lower_part.n_layer), shared=shared,
        )  # fmt: skip

    def keep(self, layer: int | None) -> None:
        """Close the parts for other exits than after `layer`, which no drafter uses, and remove their files."""
        self.close(but=layer)
        kept = () if layer is None else self._files(layer)
        for path in _folder().glob(f"{self._fingerprint}-*.gguf"):
            if path not in kept:
                removed(path)

    def close(self, but: int | None = None) -> None:
        """Close all parts, except those for an exit after layer `but`."""
        for layer in self._parts.keys() - {but}:
            for part in self._parts.pop(layer):
                part.close()

    def _ranges(self, layer: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (0, layer), (layer + 1, check_cuttable(self._model.header) - 1)

    def _files(self, layer: int) -> tuple[Path, ...]:
        """Return the files of the part up to `layer`, and of the rest; they need not exist."""
        ranges = self._ranges(layer)
        return tuple(_folder() / f"{self._fingerprint}-{first}-{last}.gguf" for first, last in ranges)

    def _cut(self, layer: int) -> tuple[Path, ...]:
        files = self._files(layer)
        try:
            private_folder(_folder())
            for file, (first, last) in zip(files, self._ranges(layer), strict=True):
                if not file.is_file():
                    cut(self._model.path, file, first, last, head=True)
        except OSError as error:
            raise InvalidOption(
                f"{self._model.path} cannot be cut for an early exit: {error}.",
                f"Make room in {_folder()}, or do without the exit.",
            ) from error
        return files


def _folder() -> Path:
    """Return the folder of all models' parts; it need not exist."""
    return cache_dir() / "shards"


def best_exit(points: Sequence[ExitPoint]) -> tuple[int | None, str]:
    """Return the layer after which one of the measured exits pays most, None if all are too slow, and why."""
    paying = [
        point for point in points
        if point.seconds < _MAX_SECONDS * point.full_seconds and point.agreement >= _MIN_AGREEMENT
    ]  # fmt: skip
    best = min(paying or points, key=lambda point: point.seconds / point.full_seconds)
    found = (
        f"an exit after layer {best.layer} takes {best.seconds / best.full_seconds:.0%} of the time a token;"
        f" {best.left:.0%} of tokens exit, and {best.agreement:.1%} of those agree with full depth"
    )
    return (best.layer, found) if paying else (None, f"it does not pay: {found}")


def exit_points(
    model: Model, drafters: Drafters, prompts: Sequence[Ids], *, gamma: int, most: int, threads: int | None
) -> tuple[ExitPoint, ...]:
    """Measure an exit after each layer of `exit_layers` on replies of the draft model, of at most `most` tokens; return
    () where the model cannot be cut, or all prompts are longer than 4,096 tokens. The parts for the best exit stay."""
    prompts = [prompt for prompt in prompts if len(prompt) <= MOST_READ][:_PROMPTS]
    try:
        layers = exit_layers(model.header) if prompts else ()
    except (ModelUnsupported, ModelCorrupt):
        return ()
    with drafters.taken() as whole:
        texts = [(prompt, _written(whole, model, prompt, gamma, most)) for prompt in prompts]
        full = median(_along(whole, prompt, reply, gamma)[0] for prompt, reply in texts)
    n_ctx = max((len(prompt) + len(reply) for prompt, reply in texts), default=0) + gamma
    spec = ContextSpec(n_ctx, threads=threads)
    exits, found = drafters.exits, list[ExitPoint]()
    for layer in layers:
        try:
            with closing(exits.open(layer, spec)) as early:
                times, left, same = zip(*(_along(early, *text, gamma) for text in texts), strict=True)
        except (InvalidOption, ModelUnsupported):  # Without room for the parts, the rest of the profile is good.
            continue
        tokens, exited = sum(len(reply) for _, reply in texts), sum(left)
        found.append(ExitPoint(layer, exited / tokens, sum(same) / max(1, exited), median(times), full))
        exits.keep(best_exit(found)[0])
    return tuple(found)


def _written(drafter: Drafter, model: Model, prompt: Ids, gamma: int, most: int) -> Ids:
    """Return the draft model's own reply to `prompt`, of at least one token."""
    ids = prompt
    while len(ids) - len(prompt) < most and not model.is_eog(int(ids[-1])):
        ids = np.concatenate(
            (ids, drafter.propose(GenerationState(ids), min(gamma, most - len(ids) + len(prompt))).ids)
        )
    return ids[len(prompt) :]


def _along(drafter: Drafter, prompt: Ids, reply: Ids, gamma: int) -> tuple[float, int, int]:
    """Draft along a reply of full depth. Return the seconds of a token without the decoding of the prompt, how many
    tokens left early behind the reply's own text, and how many of those are the reply's."""
    drafter.propose(GenerationState(prompt), 1)
    seconds, drafted, left, same = 0.0, 0, 0, 0
    for at in range(0, len(reply), gamma):
        state = GenerationState(np.concatenate((prompt, reply[:at])))
        began = perf_counter()
        chunk = drafter.propose(state, gamma)
        seconds, drafted = seconds + perf_counter() - began, drafted + len(chunk)
        for token, wanted, layer in zip(chunk.ids.tolist(), reply[at:].tolist(), chunk.exit_layers or (), strict=False):
            left += layer is not None
            same += layer is not None and token == wanted
            if token != wanted:
                break
    return seconds / max(1, drafted), left, same


_PREFILL_ROWS = 32  # rows at once: llama.cpp reserves logits for each, even when it stops before the head
_HEAD_ROWS = 4  # most rows that go through the head together, which is cheaper than two batches


class EarlyExitDrafter(ModelDrafter):
    """A drafter with a model that is cut in two."""

    exits = True

    def __init__(
        self, lower: Model, upper: Model, *, n_ctx: int, threads: int | None, threshold: float = THRESHOLD,
        layers: tuple[int, ...] = (), shared: int | None = None,
    ) -> None:  # fmt: skip
        """Open contexts over the two shards of a model: `cut(..., 0, e, head=True)` and `cut(..., e + 1, last,
        head=True)`. A token leaves early where the probability of the likeliest token is more than `threshold` above
        that of the second; 1 means never. `layers`, of the lower shard, and `shared` as in `ModelDrafter`."""
        self._layer, self._threshold = lower.n_layer - 1, threshold
        capture = Capture(attention=layers, outputs=(self._layer,), stop_after=self._layer)
        below = Context(lower, ContextSpec(n_ctx=n_ctx, threads=threads, whole_window=True), capture=capture)
        try:
            self._upper = Context(upper, ContextSpec(n_ctx=n_ctx, threads=threads, whole_window=True))
        except BaseException:
            below.close()
            raise
        super().__init__(lower, below, layers, shared)
        self._recorder = cast("Recorder", below.captured)
        # The lower shard's output at each position; rows beyond the upper cache's length wait.
        self._rows = np.empty((n_ctx, lower.n_embd), dtype=np.float32)

    def begin(self, state: GenerationState) -> None:
        super().begin(state)
        self._upper.set_cancel(state.should_stop)

    def end(self) -> None:
        super().end()
        self._upper.set_cancel(None)

    def close(self) -> None:
        super().close()
        self._upper.close()

    def _first(self, state: GenerationState, prefix: Ids) -> Step:
        """Decode new text. All but a few ids go through every layer."""
        common, report = self._context.sync(prefix), state.prompt_progress(self._model.name)
        self._upper.rollback(min(common, self._upper.length()))
        body = max(common, len(prefix) - _HEAD_ROWS)
        for at in range(common, body, _PREFILL_ROWS):
            if body - common > _PREFILL_ROWS:
                report(at - common, body - common)
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
        self._rows[start : start + len(ids)] = self._recorder.output(self._layer)
        return logits

    def _run_upper(self, outputs: int) -> Floats:
        """Decode all waiting rows in the upper shard; return full logits of the last `outputs` of them."""
        waiting = self._rows[self._upper.length() : self._context.length()]
        return self._upper.decode_embeddings(waiting, outputs=outputs)

    def _clear(self) -> None:
        self._context.clear()
        self._upper.clear()
