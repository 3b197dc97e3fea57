"""The choice of the catalogue's pair for this machine: which models fit, where they would run, how fast."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple, Self

import numpy as np

from edgellm import system
from edgellm.engine.hardware import compute_devices
from edgellm.engine.memory_fit import spare_memory
from edgellm.errors import InvalidOption, MemoryShort, size
from edgellm.storage.catalog import Catalog, CatalogModel
from edgellm.storage.quants import MEMORY_SHARE

COMFORTABLE = 5.0
"""Tokens per second that a verifier should write alone: about the speed of reading."""
PROCESSOR = "the processor"
_CARD_SHARE = 0.9  # share of a card's free memory for weights; the rest is for the context
_WORTH = 0.5  # largest useful draft model, in shares of the verifier's bytes for a token
_MEMORY_BYTES = 256 * 2**20  # bytes read at once from memory: more than a processor's caches hold
_MEMORY_READS = 5


@dataclass(frozen=True, slots=True)
class ModelRoom:
    """The room for weights: bytes of memory and why no more, graphics cards and their total bytes, and the bytes per
    second at which memory is read, None where not measured. `host` computes models in the machine's memory."""

    memory: int
    reason: str
    cards: tuple[str, ...] = ()
    card_memory: int = 0
    read_speed: float | None = None
    host: str = PROCESSOR

    @classmethod
    def look(cls, *, measure: bool = False) -> Self:
        """Return this machine's room now. `measure` its memory's speed, too, which takes half a second."""
        free, bound = system.available_memory()
        share = int(MEMORY_SHARE * system.total_memory())
        reason = f"{bound}, {size(free)}" if free < share else f"three quarters of its memory, {size(share)}"
        cards = [card for card in compute_devices() if card.kind == "gpu"]
        host = PROCESSOR
        if sys.platform == "darwin" and cards:  # a Mac's cards share the machine's memory
            host, cards = cards[0].name, []
        return cls(
            min(free, share), reason, tuple(card.name for card in cards),
            int(_CARD_SHARE * sum(map(spare_memory, cards))), memory_speed() if measure else None, host,
        )  # fmt: skip

    @property
    def weights(self) -> int:
        """Return the bytes of weights that there is room for."""
        return self.memory + self.card_memory

    def place(self, size: int) -> "ModelPlace | None":
        """Return the place of a model of `size` bytes; None if it does not fit."""
        if size > self.weights:
            return None
        in_memory, named = max(0, size - self.card_memory), " and ".join(self.cards)
        on = " and ".join([*[named] * (in_memory < size), *[self.host] * (in_memory > 0)])
        left = replace(self, memory=self.memory - in_memory, card_memory=self.card_memory - (size - in_memory))
        return ModelPlace(on, in_memory, left)


class ModelPlace(NamedTuple):
    """The place of a model: its unit, its bytes in the machine's memory, and the room that is left."""

    on: str
    in_memory: int
    left: ModelRoom


@dataclass(frozen=True, slots=True)
class PairProposal:
    """A verifier and its place, and a draft model and its place, unless the verifier writes alone. `tokens_per_second`:
    an upper bound for the verifier alone, None where unknown. `reasons` explain the choice."""

    verifier: CatalogModel
    verifier_on: str
    draft: CatalogModel | None
    draft_on: str
    tokens_per_second: float | None
    reasons: tuple[str, ...]


def propose(catalog: Catalog, room: ModelRoom, wanted: str | None = None) -> PairProposal:
    """Return the pair of the verifier `wanted`; or the first fitting one that is fast enough, or else the fastest."""
    if wanted is not None:
        found = catalog.find(wanted)
        if found is None or found[1] != found[0].quant:
            raise InvalidOption(f"The catalogue has no {wanted!r}.", "See: edgellm catalog")
        if (proposal := _fitted(catalog, found[0], room)) is None:
            raise MemoryShort(
                f"{found[0].name} has {size(found[0].size)} of weights; there is room for {size(room.weights)}.",
                "Leave --verifier out for one that fits, or split it over several devices: edgellm mesh plan.",
            )
        return proposal
    fitting = [fitted for name in catalog.setup if (fitted := _fitted(catalog, catalog.models[name], room))]
    if not fitting:
        least = min((catalog.models[name] for name in catalog.setup), key=lambda model: model.size)
        raise MemoryShort(
            f"No pair of the catalogue fits: {least.name} has {size(least.size)} of weights, and there is room for"
            f" {size(room.weights)} ({room.reason}).",
            "Close other programs, or use the bundled pair: edgellm chat",
        )
    fast = (one for one in fitting if one.tokens_per_second is None or one.tokens_per_second >= COMFORTABLE)
    return next(fast, None) or max(fitting, key=lambda one: one.tokens_per_second or 0.0)


def _fitted(catalog: Catalog, verifier: CatalogModel, room: ModelRoom) -> PairProposal | None:
    if (place := room.place(verifier.size)) is None:
        return None
    reasons = [f"{size(verifier.size)} of weights, and there is room for {size(room.weights)} ({room.reason})"]
    speed = None
    if place.in_memory and room.read_speed is not None:
        read = verifier.bytes_per_token * place.in_memory // verifier.size
        speed = room.read_speed / read
        reasons.append(f"a token reads {size(read)} from memory, which gives {size(int(room.read_speed))} a second")
    draft, draft_on = None if verifier.draft is None else catalog.models[verifier.draft], ""
    if draft is None:
        reasons.append("no smaller model in the catalogue has its tokenizer")
    elif draft.bytes_per_token > _WORTH * verifier.bytes_per_token:
        share = draft.bytes_per_token / verifier.bytes_per_token
        reasons.append(f"its draft model {draft.name} reads {share:.0%} as much for a token, which is too much")
        draft = None
    elif (beside := place.left.place(draft.size)) is None:
        reasons.append(f"its draft model {draft.name} does not fit beside it")
        draft = None
    else:
        draft_on = beside.on
    return PairProposal(verifier, place.on, draft, draft_on, speed, tuple(reasons))


def memory_speed() -> float:
    """Return the bytes/s at which all performance cores together read memory: the best of some readings."""
    threads = system.performance_cores()
    blocks = np.array_split(np.ones(_MEMORY_BYTES // 8, np.int64), threads)
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_MEMORY_READS):
            began = perf_counter()
            list(pool.map(np.max, blocks))
            seconds.append(perf_counter() - began)
    return _MEMORY_BYTES / min(seconds)
