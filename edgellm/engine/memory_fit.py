"""The memory that a model and its contexts take of each device, and how many layers fit on graphics cards.

llama.cpp computes the sizes: it loads the model without its weights, opens the contexts without their buffers, and logs
the size of each. So the figures hold for every architecture.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from edgellm import system
from edgellm.engine import native
from edgellm.engine.context import Context
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.hardware import ALL_LAYERS, ComputeDevice, Hardware, offload_devices
from edgellm.engine.kv.kv_cache import checkpoint_bytes, snapshots_that_fit
from edgellm.engine.model import ContextSpec, LoadSpec, Model, output_rows, probe_of, speculator_module
from edgellm.engine.trial.probe import EAGLE3, faults_of
from edgellm.errors import InvalidOption, MemoryShort

Contexts: TypeAlias = Callable[[Model], Sequence[Context]]
"""A function that opens a model's contexts."""

T = TypeVar("T")

_MIB = 2**20
_MARGIN = 512 * _MIB  # bytes of a card kept free for its driver and the screen
_PLENTY = 0.4  # share of the free memory below which a rough estimate is enough
_MOST_CONTEXT = 32_768
LEAST_CONTEXT = 4_096
"""Least positions of a default context, unless the model was trained for fewer."""
_CACHE_SHARE = 1 / 16  # share of the free memory for keys and values of a default context
_ASSIGNED = re.compile(r"layer +(\d+) assigned to device (\S+),")
_COMPUTE = re.compile(r": +(\S+) +(?:compute|output) buffer size = +([\d.]+) MiB")
_CACHE = re.compile(r": size = +([\d.]+) MiB \( *\d+ cells")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of weights, caches and computation by device; "CPU" is the machine's own memory, which also holds the
    `checkpoints` of a cache that cannot be cut (most bytes), and the `overhead`: vocabularies and logits."""

    weights: Counter[str]
    caches: Counter[str]
    compute: Counter[str]
    checkpoints: int = 0
    overhead: int = 0

    def on(self, device: str) -> int:
        """Return the bytes on a device."""
        return self.by_device[device]

    @property
    def by_device(self) -> Counter[str]:
        """Return all bytes by device."""
        return self.weights + self.caches + self.compute + Counter(CPU=self.checkpoints + self.overhead)


def free_memory() -> int:
    """Return the bytes of memory that this process can still have."""
    return system.available_memory()[0]


def spare_memory(card: ComputeDevice) -> int:
    """Return the bytes of a card that models can have."""
    return max(0, card.free - _MARGIN)


def trained_positions(header: GgufHeader) -> int | None:
    """Return the number of positions that a model was trained for; None where its header does not say."""
    trained = header.number("context_length")
    return trained if trained > 0 else None


def check_context(header: GgufHeader, name: str, n_ctx: int | None) -> None:
    """Raise InvalidOption where a context of `n_ctx` positions is longer than the model `name` was trained for, beyond
    which it writes nonsense."""
    trained = trained_positions(header)
    if n_ctx is not None and trained is not None and n_ctx > trained:
        raise InvalidOption(
            f"A context of {n_ctx} tokens is asked for, and {name} was trained for {trained}.",
            f"Give a --ctx-size (n_ctx) of at most {trained}.",
        )


def positions_of(file: ModelFile, asked: int | None) -> int:
    """Return how many tokens of prompt and reply a context of a model has room for: `asked`, by default `LEAST_CONTEXT`
    or as many as the model was trained for. Raises InvalidOption if `asked` exceeds these."""
    check_context(file.header, file.path.name, asked)
    return min(LEAST_CONTEXT, trained_positions(file.header) or LEAST_CONTEXT) if asked is None else asked


def default_context(
    header: GgufHeader, n_ctx_train: int, sessions: int = 1, free: int | None = None
) -> tuple[int, str]:
    """Return how many positions a context has by default, and why: as many as the model was trained for, up to 32,768,
    if the keys and values of `sessions` sequences take little of the `free` memory, in bytes; but 4,096 in any case."""
    per_token, free = sessions * header.cache_bytes_per_token, free_memory() if free is None else free
    n_ctx = _MOST_CONTEXT
    while n_ctx > LEAST_CONTEXT:
        if n_ctx <= n_ctx_train and n_ctx * per_token <= _CACHE_SHARE * free:
            return n_ctx, f"its keys and values take {n_ctx * per_token / 1e6:.0f} MB of {free / 1e9:.1f} GB free"
        n_ctx //= 2
    n_ctx = min(n_ctx_train, LEAST_CONTEXT)
    if n_ctx == n_ctx_train:
        return n_ctx, "the model was trained for no more"
    return n_ctx, f"more would take over a sixteenth of the {free / 1e9:.1f} GB that are free"


@dataclass(frozen=True, slots=True)
class Placed:
    """A model's file and where it goes: the layers on graphics cards, the positions of its contexts, and how many
    `sessions` these have are chosen, for these `reasons`. `eagle3`: the EAGLE-3 head that drafts beside it, if there is
    one. `verifies`: one context has all sessions, as a verifier's; otherwise each session has a context."""

    file: ModelFile
    hardware: Hardware
    reasons: tuple[str, ...] = ()
    eagle3: ModelFile | None = None
    sessions: int = 1
    verifies: bool = True

    @property
    def reason(self) -> str:
        """Return where the model goes, and why."""
        return f"{self.file.name}: {'; '.join(self.reasons)}"

    def contexts(self, model: Model) -> list[Context]:
        """Open its contexts."""
        n_seq, several = (self.sessions, 1) if self.verifies else (1, self.sessions)
        length, checked = self.hardware.n_ctx or LEAST_CONTEXT, self.verifies
        spec = ContextSpec(length, n_seq, unified=n_seq == 1, rolls_back=checked, speculates=checked)
        return [Context(model, spec) for _ in range(several)]

    def use(self) -> MemoryUse:
        """Return the memory that llama.cpp would take. Raises ModelUnsupported: it ends the process over the file."""
        faults, _ = faults_of(probe_of(self.file, LoadSpec(self.hardware, dry=True, eagle3=self.eagle3)))
        return reckon(self.file, self.hardware, self.contexts, self.eagle3, faults)

    def estimate(self) -> int:
        """Return the bytes that it takes on the processor, by its headers."""
        header, n = self.file.header, self.sessions
        headers = [header, *([] if self.eagle3 is None else [self.eagle3.header])]
        weights = sum(one.weight_bytes + one.vocabulary_bytes for one in headers)
        length = self.hardware.n_ctx or LEAST_CONTEXT
        states = n * header.recurrent_state_bytes * (1 + snapshots_that_fit(header, n))
        caches = n * length * sum(one.cache_bytes_per_token for one in headers)
        return weights + caches + states + checkpoint_bytes(header, length, n) + n * _window_bytes(self.eagle3)


def _window_bytes(eagle3: ModelFile | None) -> int:
    """Return the bytes of states that an EAGLE-3 head keeps of a session."""
    return 0 if eagle3 is None else int(speculator_module(EAGLE3).window_bytes(eagle3.header))


def place_model(
    file: ModelFile, hardware: Hardware, taken: Counter[str], *, verifies: bool, sessions: int = 1,
    eagle3: ModelFile | None = None,
) -> Placed:  # fmt: skip
    """Return where a model goes beside the bytes `taken` of each device, and add its own bytes to `taken`. Negative
    bytes stand for memory that will be given back. Raises MemoryShort, InvalidOption, and ModelUnsupported where the
    head `eagle3` does not fit the model."""
    if eagle3 is not None:
        speculator_module(EAGLE3).check_eagle3(eagle3, file)
    # Few of many sessions are long at once: a longer context is worth more than a further session.
    hardware, reasons = _with_context(file, hardware, min(sessions, 2))
    if eagle3 is not None:
        reasons = (f"the EAGLE-3 head {eagle3.path.name} drafts from its states", *reasons)
    return fit(Placed(file, hardware, reasons, eagle3, sessions, verifies), taken)


def place_sessions(
    file: ModelFile, hardware: Hardware, *, sessions: int, fewer: bool, eagle3: ModelFile | None = None
) -> Placed:
    """Return where a verifier of several `sessions` goes, like `place_model`; with `fewer`, as many sessions as fit.
    Otherwise raise MemoryShort, with the number that fits, unless all do."""
    hardware, reasons = _with_context(file, hardware, sessions)

    def placed(n: int) -> Placed:
        return place_model(file, hardware, Counter(), verifies=True, sessions=n, eagle3=eagle3)

    advice = "Ask for fewer sessions, {} fit, or for a shorter --ctx-size."
    most, found, short = as_many_as_fit(placed, sessions, fewer, advice)
    if short:
        reasons = (*reasons, f"{most} session{'s' * (most > 1)} at once, not {sessions}: {short.rstrip('.')}")
    return replace(found, reasons=(*found.reasons, *reasons))


def as_many_as_fit(placed: Callable[[int], T], wanted: int, fewer: bool, advice: str) -> tuple[int, T, str]:
    """Return how many can be `placed`, their placement, and what is short for those `wanted`; "" if they fit. Raises
    MemoryShort where 1 does not fit, and unless `fewer` will do, with the number that fits in the `advice`."""
    try:
        return wanted, placed(wanted), ""
    except MemoryShort as error:
        if wanted == 1:
            raise
        short = error.what
    most, found, too_many = 1, placed(1), wanted
    while too_many - most > 1:
        tried = (most + too_many) // 2
        try:
            most, found = tried, placed(tried)
        except MemoryShort:
            too_many = tried
    if not fewer:
        raise MemoryShort(short, advice.format(most))
    return most, found, short


def _with_context(file: ModelFile, hardware: Hardware, sessions: int) -> tuple[Hardware, tuple[str, ...]]:
    """Return `hardware` with the positions of a context, and the reason where they are chosen."""
    if hardware.n_ctx is not None:
        return hardware, ()
    n_ctx, why = default_context(file.header, trained_positions(file.header) or LEAST_CONTEXT, sessions)
    return replace(hardware, n_ctx=n_ctx), (f"a context of {n_ctx} tokens: {why}",)


def reckon(
    file: ModelFile, hardware: Hardware, contexts: Contexts, eagle3: ModelFile | None = None,
    faults: Sequence[str] = (), *, reserved: bool = False,
) -> MemoryUse:  # fmt: skip
    """Return the memory that llama.cpp would take for a model with these contexts, and for the EAGLE-3 head `eagle3`
    beside them; nothing is loaded. `faults` as for `Model.load`.

    llama.cpp reserves logits of all rows of a batch, but few are used. Unused rows count if some layers are on a
    graphics card, or with `reserved`: a processor's memory is taken as it is written to. Raises ModelUnsupported:
    llama.cpp cannot use the file; EngineFailed: a context cannot be opened.
    """
    few = not reserved and not hardware.gpu_layers
    spec = LoadSpec(hardware, dry=True, few_outputs=few, speculates=True, eagle3=eagle3)
    with native.log.listen() as lines, ExitStack() as closing:
        model = closing.enter_context(Model.load(file, spec, faults=faults))
        opened = [closing.enter_context(context) for context in contexts(model)]
        checkpoints = sum(checkpoint_bytes(file.header, context.n_ctx, context.n_seq) for context in opened)
        n_vocab = model.n_vocab

    def said(pattern: re.Pattern[str]) -> list[re.Match[str]]:
        return [found for line in lines if (found := pattern.search(line))]

    headers = [file.header] if eagle3 is None else [file.header, eagle3.header]
    overhead = sum(header.vocabulary_bytes for header in headers)
    for context in opened:  # llama.cpp begins with room for a row of logits for each sequence
        overhead += 4 * n_vocab * (output_rows(context.n_seq, context.n_batch) - context.n_seq)
        overhead += context.n_seq * _window_bytes(eagle3)
    assigned, device_of = said(_ASSIGNED), dict[int, str]()
    for found in assigned:
        device_of.setdefault(int(found[1]), found[2])
    weights, caches, compute = Counter[str](), Counter[str](), Counter[str]()
    if eagle3 is not None:
        its_own = assigned[len(device_of) :]  # the head's lines come behind the model's
        weights[its_own[-1][2] if its_own else "CPU"] += eagle3.header.weight_bytes
    for tensor in file.header.tensors:
        layer = tensor.layer
        if layer is None:
            layer = max(device_of, default=0) if tensor.name.startswith("output") else -1
        weights[device_of.get(layer, "CPU")] += tensor.nbytes
    cache = sum(float(found[1]) * _MIB for found in said(_CACHE))
    layers = Counter(device for layer, device in device_of.items() if layer < max(device_of))
    for device, count in layers.items():
        caches[device] += int(cache * count / layers.total())
    for found in said(_COMPUTE):
        buffer = found[1]  # pinned memory such as CUDA_Host is the machine's own
        device = "CPU" if buffer.startswith("CPU") or buffer.endswith("_Host") else buffer
        compute[device] += int(float(found[2]) * _MIB)
    return MemoryUse(weights, caches, compute, checkpoints, overhead)


def fit(placed: Placed, taken: Counter[str]) -> Placed:
    """Return how a model is loaded beside what is `taken` already, and why: with the layers on graphics cards that its
    hardware asks for, or as many as fit. Its own bytes are added to `taken`. Raises MemoryShort: the model does not
    fit; says what would; InvalidOption: there is no such device, or no graphics card at all."""
    hardware = placed.hardware
    cards = offload_devices(hardware.devices) if hardware.gpu_layers != 0 else []
    if cards:
        return _on_cards(placed, cards, taken)
    if hardware.gpu_layers:
        name = placed.file.path.name
        raise InvalidOption(
            f"{_layers(hardware.gpu_layers)} of {name} cannot be on a graphics card: llama.cpp finds none.",
            "Leave --gpu-layers out; edgellm doctor tells how llama.cpp is compiled for a graphics card.",
        )
    reason = "none asked for" if hardware.gpu_layers == 0 else "llama.cpp finds no graphics card that it can use"
    return _on_processor(placed, taken, f"on the processor: {reason}")


def _with_layers(placed: Placed, layers: int) -> Placed:
    return replace(placed, hardware=replace(placed.hardware, gpu_layers=layers))


def _on_cards(placed: Placed, cards: Sequence[ComputeDevice], taken: Counter[str]) -> Placed:
    room = {card.name: max(0, spare_memory(card) - taken[card.name]) for card in cards if card.total}
    asked, short = placed.hardware.gpu_layers, ""
    layers = asked or ALL_LAYERS
    while layers:
        chosen = _with_layers(placed, layers)
        use = chosen.use()
        lacking = (
            f"{use.on(name) / 1e9:.1f} GB of {name}, which can give {left / 1e9:.1f} GB"
            for name, left in room.items() if use.on(name) > left
        )  # fmt: skip
        short = next(lacking, "")
        if not short:
            _take(chosen, use, taken)
            where = ", ".join(f"{use.on(card.name) / 1e9:.1f} GB of {card.name}" for card in cards if use.on(card.name))
            return replace(chosen, reasons=(f"{_layers(layers)} on graphics cards: {where}", *placed.reasons))
        if asked is not None:
            raise MemoryShort(
                f"{placed.file.path.name} with {_layers(layers)} on graphics cards takes {short}.",
                "Give fewer layers, or leave --gpu-layers out: then as many go there as fit.",
            )
        needed = sum(use.on(name) for name in room)
        most = placed.file.header.number("block_count") + 1 if layers == ALL_LAYERS else layers
        layers = max(0, min(most - 1, int(most * sum(room.values()) / needed)))
    return _on_processor(placed, taken, f"on the processor: on graphics cards it takes {short}")


def _on_processor(placed: Placed, taken: Counter[str], reason: str) -> Placed:
    chosen = _with_layers(placed, 0)
    if (estimate := chosen.estimate()) < _PLENTY * (free_memory() - taken["CPU"]):
        taken["CPU"] += estimate
    else:
        _take(chosen, chosen.use(), taken)
    return replace(chosen, reasons=(reason, *placed.reasons))


def _take(placed: Placed, use: MemoryUse, taken: Counter[str]) -> None:
    """Add the bytes of a model. Raise MemoryShort where its part that is not on a graphics card does not fit into the
    memory."""
    free = free_memory() - taken["CPU"]
    if use.on("CPU") <= free:
        taken.update(use.by_device)
        return
    grows = max(1, use.caches["CPU"] + use.compute["CPU"])  # bytes that grow with the context
    fixed = use.weights["CPU"] + use.checkpoints + use.overhead
    length = int(0.9 * (placed.hardware.n_ctx or 0) * (free - fixed) / grows) // 256 * 256
    of = "the context" if placed.sessions == 1 else f"{placed.sessions} sessions of {placed.hardware.n_ctx} tokens"
    saved = f" and {use.checkpoints / 1e9:.1f} GB for checkpoints to roll back to" if use.checkpoints else ""
    raise MemoryShort(
        f"{placed.file.path.name} takes {use.on('CPU') / 1e9:.1f} GB of memory,"
        f" {use.caches['CPU'] / 1e9:.1f} GB of it for {of}{saved}, and {free / 1e9:.1f} GB are free.",
        f"Give a shorter --ctx-size: {length} tokens fit."
        if length > 0
        else "Take a smaller quantisation, close other programs, or use several devices: edgellm mesh plan.",
    )


def _layers(n: int) -> str:
    return "all layers" if n == ALL_LAYERS else f"{n} layers"
