"""What computes a device's layers, the processor or graphics cards, and the memory that it has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from edgellm import system
from edgellm.engine.hardware import ALL_LAYERS, ON_PROCESSOR, ComputeDevice, Hardware, offload_devices
from edgellm.engine.memory_fit import spare_memory
from edgellm.errors import InvalidOption

_SPARE = 0.1  # of what is free is left to others


def free_memory() -> tuple[int, str]:
    """Return the bytes that are free for layers on the processor, and what bounds them."""
    free, reason = system.available_memory()
    return int(free * (1.0 - _SPARE)), f"{reason}, less a tenth"


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """What computes layers on a device: the graphics cards called `name`, such as CUDA0 or CUDA0/CUDA1, or without a
    name the processor; and the `reason`. Models are loaded there as `hardware` says."""

    hardware: Hardware = ON_PROCESSOR
    name: str = ""
    reason: str = ""

    @classmethod
    def choose(cls, hardware: Hardware) -> Self:
        """Return what computes layers as `hardware` asks: by default the graphics cards, if there are any.

        Raises:
            InvalidOption: there is no such card; or some layers would be on cards and others not, while a plan knows
                one speed for all of them.
        """
        if hardware.gpu_layers not in (None, 0, ALL_LAYERS):
            raise InvalidOption(
                f"--gpu-layers is {hardware.gpu_layers}, but a device computes all its layers of a mesh in one place.",
                "Give auto, all or 0. For both, run two workers here, one of them with --gpu-layers 0.",
            )
        if hardware.gpu_layers == 0:
            return cls(hardware, "", "--gpu-layers is 0")
        cards = offload_devices(hardware.devices)
        if not cards:
            if hardware.gpu_layers == ALL_LAYERS:
                raise InvalidOption(
                    "--gpu-layers is all, but llama.cpp finds no graphics card.",
                    "Leave it out; edgellm doctor tells how llama.cpp is compiled for a graphics card.",
                )
            return cls(replace(hardware, gpu_layers=0), "", "llama.cpp finds no graphics card that it can use")
        if not hardware.devices:  # llama.cpp leaves out integrated ones where there are others
            cards = [card for card in cards if card.kind == "gpu"] or cards[:1]
        reason = "--device names it" if hardware.devices else "graphics cards compute unless --gpu-layers is 0"
        names = tuple(card.name for card in cards)
        return cls(replace(hardware, gpu_layers=ALL_LAYERS, devices=names), "/".join(names), reason)

    @property
    def description(self) -> str:
        """The name of the processor, or the names of the cards, by their makers."""
        return " and ".join(card.description for card in self._cards())[:100] if self.name else system.processor()

    @property
    def devices(self) -> tuple[str, ...]:
        """The names by which llama.cpp knows what computes."""
        return self.hardware.devices if self.name else ("CPU",)

    def available(self) -> tuple[int, str]:
        """Return the bytes that are free for layers, and what bounds them."""
        free, reason = free_memory()
        cards = self._cards()
        if not cards or not all(card.total for card in cards):  # the latter do not say
            return free, reason
        spare = sum(map(spare_memory, cards))
        if any(card.kind == "igpu" for card in cards) and free < spare:  # it shares the machine's memory
            return free, reason
        return spare, f"the free memory of {self.name}, less what its driver needs"

    def _cards(self) -> Sequence[ComputeDevice]:
        return offload_devices(self.hardware.devices) if self.name else ()
