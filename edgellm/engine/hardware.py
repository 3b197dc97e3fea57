"""The settings with which a model is loaded and computed, and the devices that llama.cpp can compute on."""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.engine import native
from edgellm.engine.native import ggml, lib
from edgellm.errors import InvalidOption

ALL_LAYERS = -1
CACHE_TYPES = {
    "f32": lib.GGML_TYPE_F32, "f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q4_0": lib.GGML_TYPE_Q4_0,
}  # fmt: skip
"""Types of keys and values by name."""
QUANTISED = ("q8_0", "q4_0")
DEFAULT_CACHE = "f16"
"""The type by default, except of models in float32."""
N_BATCH = 512
"""Rows of a batch by default."""
_KINDS = ("cpu", "gpu", "igpu", "accel")  # ggml_backend_dev_type


@dataclass(frozen=True, slots=True)
class Hardware:
    """The settings with which a model is loaded and computed; None leaves the choice to edgellm.

    `gpu_layers`: layers on graphics cards, `ALL_LAYERS` for all. `devices`: the names of the cards to use; empty for
    all. `tensor_split`: shares of the model for each device. `threads`: of a decode on the processor. `n_ctx`:
    positions of a context. `n_batch`: rows of a batch. `cache_type`: of keys and values, a key of `CACHE_TYPES`.
    `flash_attn`: whether flash attention is used. `mlock`: keep the weights in memory. `reproducible`: a text does not
    depend on how its tokens are batched.
    """

    gpu_layers: int | None = None
    devices: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] = ()
    threads: int | None = None
    n_ctx: int | None = None
    n_batch: int | None = None
    cache_type: str | None = None
    flash_attn: bool | None = None
    mlock: bool = False
    reproducible: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidOption for a value that llama.cpp cannot use."""
        for name, least in (("gpu_layers", ALL_LAYERS), ("threads", 1), ("n_ctx", 1), ("n_batch", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidOption(f"{name} is {value}.", f"Give a whole number of at least {least}.")
        if self.cache_type is not None and self.cache_type not in CACHE_TYPES:
            raise InvalidOption(f"The cache type is {self.cache_type!r}.", f"Choose one of {', '.join(CACHE_TYPES)}.")
        if any(not 0 <= share < float("inf") for share in self.tensor_split) or (
            self.tensor_split and not sum(self.tensor_split)
        ):
            raise InvalidOption(
                f"The tensor split is {'/'.join(map(str, self.tensor_split))}.", "Give shares from 0 on, such as 3/1."
            )
        if self.cache_type in QUANTISED and self.flash_attn is False:
            raise InvalidOption(
                f"A cache of type {self.cache_type} needs flash attention.", "Leave --flash-attn on, or use f16."
            )
        if self.reproducible and (self.cache_type in QUANTISED or self.flash_attn):
            raise InvalidOption(
                "Replies are reproducible without flash attention only.", "Leave out --flash-attn and --cache-type."
            )


ON_PROCESSOR = Hardware()
"""The defaults; graphics cards are used only if `fit` chooses them."""


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """A device of llama.cpp's: its name, such as CUDA0, description and kind (cpu, gpu, igpu, accel), and bytes of
    memory, free and in all; 0 where it does not say."""

    name: str
    description: str
    kind: str
    free: int
    total: int


def compute_devices() -> list[ComputeDevice]:
    """Return all devices that the compiled llama.cpp finds on this machine, with their memory as it is now."""
    native.start()
    found = []
    for at in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(at)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        texts = (ggml.ggml_backend_dev_name(device), ggml.ggml_backend_dev_description(device))
        name, description = (text.decode("utf-8", "replace") for text in texts)
        kind = ggml.ggml_backend_dev_type(device)
        kind_name = _KINDS[kind] if kind < len(_KINDS) else "meta"
        found.append(ComputeDevice(name, description, kind_name, free.value, total.value))
    return found


def offload_devices(names: Sequence[str] = ()) -> list[ComputeDevice]:
    """Return the devices that layers can be put on, if `names` are given only these. Raises InvalidOption: there is no
    such device."""
    known = [device for device in compute_devices() if device.kind in ("gpu", "igpu")]
    if not names:
        return known
    by_name = {device.name.lower(): device for device in known}
    for name in names:
        if name.lower() not in by_name:
            raise InvalidOption(
                f"There is no device {name} that layers can be put on.",
                f"Choose from {', '.join(device.name for device in known)}." if known else
                "edgellm doctor shows how llama.cpp is compiled for a graphics card.",
            )  # fmt: skip
    return [by_name[name.lower()] for name in names]


def placement(hardware: Hardware) -> str:
    """Return a name for the devices that compute a model and their layers, as part of a file's name; "" for the
    processor alone.

    Measurements hold for one placement only.
    """
    if not hardware.gpu_layers:
        return "reproducible" if hardware.reproducible else ""
    names = "+".join(device.name for device in offload_devices(hardware.devices))
    layers = "all" if hardware.gpu_layers == ALL_LAYERS else str(hardware.gpu_layers)
    return re.sub(r"[^\w+-]", "_", f"{layers}-on-{names}") if names else ""


def apply(hardware: Hardware, params: Any) -> list[Any]:
    """Write the settings for loading into llama.cpp's parameters; return the objects that must outlive their use.
    Raises InvalidOption: a device that does not exist."""
    params.n_gpu_layers = hardware.gpu_layers or 0
    if hardware.mlock:
        params.load_mode = lib.LLAMA_LOAD_MODE_MMAP_MLOCK
    kept: list[Any] = []
    if hardware.devices:
        names = [device.name.encode() for device in offload_devices(hardware.devices)]
        chosen = [ggml.ggml_backend_dev_by_name(name) for name in names]
        devices = (ctypes.c_void_p * (len(chosen) + 1))(*chosen, None)
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        kept.append(devices)
    if hardware.tensor_split:
        most = lib.llama_max_devices()
        if len(hardware.tensor_split) > most:
            raise InvalidOption(f"The tensor split has {len(hardware.tensor_split)} shares.", f"Give at most {most}.")
        split = (ctypes.c_float * most)(*hardware.tensor_split)
        params.tensor_split = ctypes.cast(split, ctypes.POINTER(ctypes.c_float))
        kept.append(split)
    return kept
