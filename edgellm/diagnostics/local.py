"""The checks of `edgellm doctor` that need no network: llama.cpp, memory, disks, the clock, the identity."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import psutil

from edgellm import system
from edgellm.errors import TrustUnusable
from edgellm.mesh import ENGINES, part_of
from edgellm.places import data_dir
from edgellm.rpc.trust.identity import Identity, trust_folder
from edgellm.rpc.trust.peer_store import Peers
from edgellm.storage.model_files import hub_cache


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `topic` is a stable word for scripts; `next_step` is empty if all is well."""

    topic: str
    state: Literal["ok", "note", "problem"]
    what: str
    next_step: str = ""


def fine(topic: str, what: str) -> Finding:
    return Finding(topic, "ok", what)


def note(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, "note", what, next_step)


def problem(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, "problem", what, next_step)


GIB = 2**30
_EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)  # no recorded time is earlier than edgellm
_FAST = {
    "avx512_vnni": "AVX512_VNNI", "avx512f": "AVX512", "avx_vnni": "AVX_VNNI", "avx2": "AVX2",
    "i8mm": "MATMUL_INT8", "asimddp": "DOTPROD",
}  # fmt: skip
"""Linux's and llama.cpp's names of instructions for products, the fastest first; AMX has a trial of its own."""
_DRIVERS = {"nvidia-smi": "CUDA", "rocminfo": "HIP"}
_VULKAN_CARD = re.compile(r"deviceType\s*= PHYSICAL_DEVICE_TYPE_\w+_GPU")  # a driver for the processor is no card
_VULKAN_SECONDS = 10.0


def examine_machine() -> Iterator[Finding]:
    """Yield the findings as they come."""
    yield from _library()
    free, bound = system.available_memory()
    if free < GIB:
        next_step = "Close programs, or use a smaller model; see: edgellm ls"
        yield problem("memory", f"Only {_size(free)} of memory is free: {bound}.", next_step)
    else:
        yield fine("memory", f"{_size(free)} are {bound}; a model must be smaller than that.")
    yield from _disks()
    yield clock(datetime.now(UTC))
    if not (trust_folder() / "identity.pem").exists():
        yield note("identity", "This device has no identity yet; pairing creates one.", "Pair a device: edgellm pair")
        return
    try:
        short, peers = Identity.load().id.short, len(Peers().all())
        yield fine("identity", f"The ID of this device is {short}; {peers} device{'s' * (peers != 1)} paired.")
    except TrustUnusable as error:
        yield problem("identity", error.what, error.next_step)


def _library() -> Iterator[Finding]:
    from edgellm.engine.library import how_to_compile
    from edgellm.engine.native import available_threads, description, features
    from edgellm.engine.trial.probe import WITHOUT_AMX, amx_failure

    found, flags = features(), system.processor_flags()
    yield fine("llama.cpp", f"{description()}.")
    unused = [name for flag, name in _FAST.items() if flag in flags and name not in found.instructions]
    if unused:
        faster = "Compiled for this machine it does, which reads prompts of a Q4_0 model half again as fast:"
        what = f"It makes no use of this processor's {unused[0]}."
        yield note("llama.cpp", what, f"{faster} {how_to_compile()}")
    yield processor(available_threads(), psutil.cpu_count() or 1)
    if failure := amx_failure():
        flags_off = f'CFLAGS="{WITHOUT_AMX}" CXXFLAGS="{WITHOUT_AMX}"'
        what = f"Its code for this processor's matrix extension (AMX) is not used: {failure}."
        yield note("llama.cpp", what, f"For more speed, compile it without AMX: {flags_off} {how_to_compile()}")
    yield from _graphics_cards(found.gpu)
    if "rpc" in ENGINES:
        yield rpc_engine()
    if not found.mmap:
        yield note("llama.cpp", "It was compiled without mmap, so models load slowly.", "Compile it with mmap support.")


def _graphics_cards(offloads: bool) -> Iterator[Finding]:
    """Yield the usable graphics cards, and the cards that llama.cpp is not compiled for."""
    from edgellm.engine.hardware import compute_devices
    from edgellm.engine.library import how_to_compile

    topic = "graphics card"
    cards = [device for device in compute_devices() if device.offloads]
    for card in cards:
        free = f"{_size(card.free)} of {_size(card.total)} is free, and layers go there first."
        yield fine(topic, f"{card.name} ({card.description}): {free}")
    if offloads and not cards:
        what = "llama.cpp was compiled for graphics cards, but finds none: everything runs on the CPU."
        drivers = "Install the card's driver; nvidia-smi, rocminfo or vulkaninfo show whether it is there."
        yield note(topic, what, drivers)
    if not offloads and (kind := _unused_card()) is not None:
        compile_it = how_to_compile(f"-DGGML_{kind}=on", f"--gpu {kind.lower()}")
        what = "There is a graphics card, but llama.cpp has no backend for it."
        yield note(topic, what, f"Compile it for the card: {compile_it}")


def _unused_card() -> str | None:
    """Return the backend that llama.cpp would need for this machine's graphics card; None without a card."""
    for program, kind in _DRIVERS.items():
        if shutil.which(program):
            return kind
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["vulkaninfo", "--summary"], capture_output=True, text=True, errors="replace", check=True,
            timeout=_VULKAN_SECONDS,
        )  # fmt: skip
        return "VULKAN" if _VULKAN_CARD.search(shown.stdout) else None
    return None


def rpc_engine() -> Finding:
    """Report the server of llama.cpp's RPC here, by which devices hold models that cannot be cut into layers."""
    backend = part_of("rpc", "backend")
    what, program = backend.server_kind()
    if what and program is None:
        return fine("rpc engine", f"Served by {what}.")
    if what:
        what = f"Served by {what}; this device computes for others by it, and cannot ask others."
        next_step = "To run models over other devices, compile llama.cpp with it:"
    else:
        what = "Nothing here serves llama.cpp's RPC, by which devices share uncut models."
        next_step = "If you need it, compile llama.cpp with it:"
    return note("rpc engine", what, f"{next_step} {backend.how_to_compile()}")


def processor(threads: int, processors: int) -> Finding:
    """Say how many of this machine's processors decode, and how many stay idle."""
    idle = processors - threads
    rest = f"; {idle} of {processors} processors stay idle, as they would slow these down" if idle > 0 else ""
    return fine("processor", f"Decodes use {threads} threads, one for each performance core they may use{rest}.")


def _disks() -> Iterator[Finding]:
    next_step = "Free some space, or set EDGELLM_HOME and HF_HOME to folders on another disk."
    devices: set[int] = set()
    for name, place in {"edgellm's data": data_dir(), "models": hub_cache()}.items():
        folder = next(one for one in (place, *place.parents) if one.exists())
        device = folder.stat().st_dev
        if device in devices:
            continue
        devices.add(device)
        free = shutil.disk_usage(folder).free
        what = f"{_size(free)} is free for {name}, at {folder}."
        if free < GIB // 4:
            yield problem("disk", what, next_step)
        elif free < 4 * GIB:
            yield note("disk", what, f"This is enough for small models. {next_step}")
        else:
            yield fine("disk", what)


def clock(now: datetime) -> Finding:
    """Check the clock. Recorded times depend on it; trust does not."""
    what = f"The clock says {now:%Y-%m-%d %H:%M} UTC."
    return fine("clock", what) if now >= _EARLIEST else problem("clock", what, "Set it, or turn on network time.")


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
