"""The checks of `edgellm doctor` that need no network: llama.cpp, memory, disks, the clock, the identity."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import psutil

from edgellm import system
from edgellm.errors import TrustUnusable
from edgellm.places import data_dir
from edgellm.rpc.trust.identity import Identity, trust_folder
from edgellm.rpc.trust.peer_store import Peers
from edgellm.storage.model_files import hub_cache


class State(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `topic` is a stable word for scripts; `next_step` is empty if all is well."""

    topic: str
    state: State
    what: str
    next_step: str = ""


def fine(topic: str, what: str) -> Finding:
    return Finding(topic, State.OK, what)


def note(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, State.NOTE, what, next_step)


def problem(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, State.PROBLEM, what, next_step)


GIB = 2**30
_LEAST_DISK, _LITTLE_DISK = GIB // 4, 4 * GIB
_LEAST_MEMORY = GIB
_EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)  # no recorded time is earlier than edgellm
_FAST = {
    "avx512_vnni": "AVX512_VNNI", "avx512f": "AVX512", "avx_vnni": "AVX_VNNI", "avx2": "AVX2",
    "i8mm": "MATMUL_INT8", "asimddp": "DOTPROD",
}  # fmt: skip
"""Linux's and llama.cpp's names of instructions for products, the fastest first; AMX has a trial of its own."""


def examine_machine() -> Iterator[Finding]:
    """Yield the findings as they come."""
    yield from _library()
    yield _memory(*system.available_memory())
    yield from _disks()
    yield clock(datetime.now(UTC))
    yield from _identity()


def _library() -> Iterator[Finding]:
    from edgellm.engine.library import how_to_compile
    from edgellm.engine.native import available_threads, description, features
    from edgellm.engine.trial.probe import WITHOUT_AMX, amx_failure

    found = features()
    yield fine("llama.cpp", f"{description()}.")
    if unused := unused_instructions(system.processor_flags(), found.instructions):
        yield note(
            "llama.cpp", f"It makes no use of this processor's {unused}.",
            "Compiled for this machine it does, which reads prompts of a Q4_0 model half again as fast: "
            f"{how_to_compile()}",
        )  # fmt: skip
    yield processor(available_threads(), psutil.cpu_count() or 1)
    if failure := amx_failure():
        yield note(
            "llama.cpp",
            f"Its code for this processor's matrix extension (AMX) is not used: {failure}.",
            f'For more speed, compile it without AMX: CFLAGS="{WITHOUT_AMX}" CXXFLAGS="{WITHOUT_AMX}" '
            f"{how_to_compile()}",
        )
    yield from _graphics_cards(found.gpu)
    yield rpc_engine()
    if not found.mmap:
        yield note("llama.cpp", "It was compiled without mmap, so models load slowly.", "Compile it with mmap support.")


def unused_instructions(flags: frozenset[str], used: tuple[str, ...]) -> str:
    """Return the first instructions of `_FAST` that a processor of these `flags` has and llama.cpp does not use; ""
    where there are none."""
    return next((name for flag, name in _FAST.items() if flag in flags and name not in used), "")


def _graphics_cards(offloads: bool) -> Iterator[Finding]:
    """Yield the usable graphics cards, and the cards that llama.cpp is not compiled for."""
    from edgellm.engine.hardware import compute_devices
    from edgellm.engine.library import how_to_compile

    cards = [device for device in compute_devices() if device.offloads]
    for card in cards:
        yield fine(
            "graphics card",
            f"{card.name} ({card.description}): {_size(card.free)} of {_size(card.total)} is free, "
            "and layers go there first.",
        )
    if offloads and not cards:
        yield note(
            "graphics card", "llama.cpp was compiled for graphics cards, but finds none: everything runs on the CPU.",
            "Install the card's driver; nvidia-smi, rocminfo or vulkaninfo show whether it is there.",
        )  # fmt: skip
    kind = None if offloads else _unused_card()
    if kind is not None:
        yield note(
            "graphics card", "There is a graphics card, but llama.cpp has no backend for it.",
            f"Compile it for the card: {how_to_compile(f'-DGGML_{kind}=on', f'--gpu {kind.lower()}')}",
        )  # fmt: skip


def rpc_engine() -> Finding:
    """Report the server of llama.cpp's RPC here, by which devices hold models that cannot be cut into layers."""
    from edgellm.engine.ggml_rpc.backend import how_to_compile, server_kind

    what, program = server_kind()
    if not what:
        return note("rpc engine", "Nothing here serves llama.cpp's RPC, by which devices share uncut models.",
                    f"If you need it, compile llama.cpp with it: {how_to_compile()}")  # fmt: skip
    if program is None:
        return fine("rpc engine", f"Served by {what}.")
    return note(
        "rpc engine", f"Served by {what}; this device computes for others by it, and cannot ask others.",
        f"To run models over other devices, compile llama.cpp with it: {how_to_compile()}",
    )  # fmt: skip


_DRIVERS = {"nvidia-smi": "CUDA", "rocminfo": "HIP"}
_VULKAN_CARD = re.compile(r"deviceType\s*= PHYSICAL_DEVICE_TYPE_\w+_GPU")  # a driver for the processor is no card
_VULKAN_SECONDS = 10.0


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


def processor(threads: int, processors: int) -> Finding:
    """Say how many of this machine's processors decode, and how many stay idle."""
    idle = processors - threads
    rest = f"; {idle} of {processors} processors stay idle, as they would slow these down" if idle > 0 else ""
    return fine("processor", f"Decodes use {threads} threads, one for each performance core they may use{rest}.")


def _memory(available: int, bound: str) -> Finding:
    if available < _LEAST_MEMORY:
        return problem(
            "memory",
            f"Only {_size(available)} of memory is free: {bound}.",
            "Close programs, or use a smaller model; see: edgellm ls",
        )
    return fine("memory", f"{_size(available)} are {bound}; a model must be smaller than that.")


def _disks() -> Iterator[Finding]:
    places = {"edgellm's data": data_dir(), "models": hub_cache()}
    devices: set[int] = set()
    for name, place in places.items():
        folder = _existing(place)
        device = folder.stat().st_dev
        if device not in devices:
            devices.add(device)
            yield _disk(name, folder, shutil.disk_usage(folder).free)


def _disk(name: str, place: Path, free: int) -> Finding:
    what = f"{_size(free)} is free for {name}, at {place}."
    next_step = "Free some space, or set EDGELLM_HOME and HF_HOME to folders on another disk."
    if free < _LEAST_DISK:
        return problem("disk", what, next_step)
    if free < _LITTLE_DISK:
        return note("disk", what, f"This is enough for small models. {next_step}")
    return fine("disk", what)


def clock(now: datetime) -> Finding:
    """Check the clock. Recorded times depend on it; trust does not."""
    if now < _EARLIEST:
        return problem("clock", f"The clock says {now:%Y-%m-%d %H:%M} UTC.", "Set it, or turn on network time.")
    return fine("clock", f"The clock says {now:%Y-%m-%d %H:%M} UTC.")


def _identity() -> Iterator[Finding]:
    if not (trust_folder() / "identity.pem").exists():
        yield note("identity", "This device has no identity yet; pairing creates one.", "Pair a device: edgellm pair")
        return
    try:
        identity = Identity.load()
        peers = Peers().all()
    except TrustUnusable as error:
        yield problem("identity", error.what, error.next_step)
        return
    yield fine(
        "identity",
        f"The ID of this device is {identity.id.short}; {len(peers)} device{'' if len(peers) == 1 else 's'} paired.",
    )


def _existing(place: Path) -> Path:
    while not place.exists():
        place = place.parent
    return place


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
