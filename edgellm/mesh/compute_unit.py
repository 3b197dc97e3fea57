"""What computes a device's layers, the processor or graphics cards, and the memory that it has for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import psutil

from edgellm.engine.hardware import ALL_LAYERS, ON_PROCESSOR, ComputeDevice, Hardware, offload_devices
from edgellm.engine.memory_fit import spare_memory
from edgellm.errors import InvalidOption
from edgellm.storage.device_speed import processor

_SPARE = 0.1  # of what is free is left to others
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = ("memory.max", "memory.current")


def free_memory(proc: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Return the free bytes, and what bounds them: the machine's free memory, or this process's control groups."""
    free, reason = psutil.virtual_memory().available, "the machine's free memory, less a tenth"
    with suppress(OSError, ValueError):
        for line in proc.read_text(encoding="utf-8").splitlines():
            _number, controllers, place = line.split(":", 2)
            if controllers in ("", "memory"):
                root, names = (mounts / "memory", _V1) if controllers else (mounts, _V2)
                left = _cgroup_free(root, place, names)
                if left is not None and left < free:
                    free, reason = left, "the free memory of its control group, less a tenth"
    return int(max(0, free) * (1.0 - _SPARE)), reason


def _cgroup_free(root: Path, place: str, names: tuple[str, str]) -> int | None:
    """Return the least memory that a control group or one above it leaves; None without a limit."""
    least: int | None = None
    folder = root / place.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(root):
            break
        with suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((group / name).read_text(encoding="utf-8")) for name in names)
            least = min(limit - used, least if least is not None else limit)
    return least


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
        return " and ".join(card.description for card in self._cards())[:100] if self.name else processor()

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
