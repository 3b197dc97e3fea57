"""A model whose header has not been loaded on this machine before is loaded in a child process first.

llama.cpp ends the process over some files. `engine/gguf/reader.py` refuses those that are known; any other ends the
child instead. The verdict is kept by a hash of the header: types, shapes and hyperparameters decide what is fatal,
while weights are numbers in any case, and hashing gigabytes would take longer than the loading. So copies of a file
share a verdict, and so do equal blocks of layers. `EDGELLM_PROBE=off` loads without a trial.

Many builds end the process with SIGSEGV at the first decode on a processor that has AMX. GCC 12's
`_tile_loadconfig` tells its optimiser of 8 of the 64 bytes that it reads, so the configuration is never written whole;
and no thread but the first asks the kernel for the tiles (llama.cpp's issue 20824 and pull request 26954). Weights are
then loaded as the file lays them out, for the other instructions. `EDGELLM_AMX=on` and `off` override the trial.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import string
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from edgellm import places
from edgellm.engine.gguf.reader import GgufHeader, ModelFile, check_gguf, is_index
from edgellm.engine.hardware import DEFAULT_CACHE, ON_PROCESSOR, Hardware, offload_devices
from edgellm.engine.native import LIBRARY, backends, commit, features
from edgellm.errors import EdgeError, EngineFailed, ModelUnsupported
from edgellm.isolation.child import Child, ChildFailed, ChildKind, Limits

INSTRUCTION = "AMX_INT8"
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
"""The options with which GCC and Clang compile llama.cpp without AMX."""


@functools.cache
def amx_failure() -> str:
    """Return why AMX must not be used, such as "it ends the process with SIGSEGV"; "" where it works or is not there.

    The first call with a build on a machine takes about a second; its verdict is kept for later processes.
    """
    if INSTRUCTION not in features().instructions:
        return ""
    if (chosen := os.environ.get("EDGELLM_AMX")) in ("on", "off"):
        return "" if chosen == "on" else "EDGELLM_AMX is off"
    kept = places.cache_dir() / "probed" / f"amx-{_build()}.json"
    verdict = read_verdict(kept)
    if verdict is None and (verdict := _amx_trial()) is not None:
        write_verdict(kept, verdict)
    if verdict is None:
        return "it could not be tested"
    return f"it ends the process with {verdict.fatal}" if verdict.fatal else ""


def _amx_trial() -> LoadTrial | None:
    """Return the verdict on AMX, None if it could not be tested."""
    model = next((path for folder in places.bundled_dirs() if (path := folder / "draft.gguf").is_file()), None)
    if model is None or not sys.executable:
        return None
    try:
        return try_in_child(Probe((model,), (check_gguf(model),)), EDGELLM_AMX="on")
    except EdgeError:  # the child was ended from outside, or memory is short
        return None


def _build() -> str:
    """Return a hash of the library for the processor and of the kernel that grants the tiles, 16 hex digits."""
    digest = hashlib.sha256(f"{commit()} {platform.release()}".encode())
    for path in (path for folder in LIBRARY.folders for path in sorted(folder.glob("*ggml-cpu*"))):
        found = path.stat()
        digest.update(f" {path} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


MTP, EAGLE3 = "mtp", "eagle3"
"""Faults of a model from whose states its MTP layer, or an EAGLE-3 head, must not draft."""
AGAIN = "Try again; if it fails again, install edgellm once more."
"""The next step after a failed trial that says nothing of the file."""
_FORMAT = 7  # raise this when the child tries more than before, or kept verdicts may be wrong
TRIED = ("gpu_layers", "devices", "tensor_split", "cache_type", "flash_attn")
"""Fields of the hardware that the child is told: all that decides what is computed how."""
_MOST_KEPT = 1_000  # verdicts
_PORTION = 2**20
_KIND = ChildKind("edgellm.engine.trial.load_trial", "tries a model", keeps_words=True)
_BUNDLED = ("draft.gguf", "verifier.gguf", "smollm2/draft.gguf")


@dataclass(frozen=True, slots=True)
class Probe:
    """A model to try: a file with its other parts, and the `hardware` to load it on; also its MTP layer (`mtp`), or the
    EAGLE-3 head `eagle3` beside it. With `embeds` it embeds a text instead of generating. `over_rpc`: its layers are on
    other machines' devices, whatever devices are here."""

    paths: Sequence[Path]
    headers: Sequence[GgufHeader]
    hardware: Hardware = ON_PROCESSOR
    text_only: bool = False
    mtp: bool = False
    embeds: bool = False
    eagle3: ModelFile | None = None
    over_rpc: bool = False

    @property
    def tests(self) -> bool:
        """Return whether the trial has the self-test, which a model on record does not need."""
        return bool(self.speculator) or self.over_rpc or not is_proven(self.headers[0], self.hardware)

    @property
    def speculator(self) -> str:
        """The kind of the model's speculator; "" without one."""
        return EAGLE3 if self.eagle3 is not None else MTP if self.mtp else ""

    def key(self) -> str:
        """Return the SHA-256 of everything that decides whether the loading ends the process and what the self-test
        finds, in hex: of the files, of llama.cpp and its backends, of the devices, and of the cache.

        Raises:
            OSError: a file cannot be read.
            InvalidOption: there is no such device.
        """
        hardware = self.hardware
        built = f"{commit()} {_backends()}"
        digest = hashlib.sha256(f"{_FORMAT} {built} {self._devices()} {self.text_only} {self.tests}".encode())
        digest.update(f" {hardware.cache_type or DEFAULT_CACHE} {hardware.flash_attn}".encode())
        digest.update(b" mtp" if self.mtp else b"")
        digest.update(b" embeds" if self.embeds else b"")
        files = list(zip(self.paths, self.headers, strict=True))
        if self.eagle3 is not None:
            digest.update(b" eagle3")
            files += zip(self.eagle3.paths, self.eagle3.parts, strict=True)
        for path, header in files:
            digest.update(f" {header.file_size}".encode())
            with path.open("rb", buffering=0) as file:
                for offset, n in _checked_parts(header):
                    for portion in _portions(file, offset, n):
                        digest.update(portion)
        return digest.hexdigest()

    def _devices(self) -> list[str]:
        """Return the kinds and names of the graphics cards for layers, but not which card of equal ones: the number of
        layers that fit differs from day to day."""
        cards = offload_devices(self.hardware.devices) if self.hardware.gpu_layers else []
        found = [f"{card.kind} {card.name.rstrip(string.digits)} {card.description}" for card in cards]
        return ["RPC", *found] if self.over_rpc else found


def _backends() -> list[str]:
    """Return the names of the compiled-in backends, without addresses of RPC servers."""
    return sorted({name.partition("[")[0] for name in backends()})


@dataclass(frozen=True, slots=True)
class LoadTrial:
    """The outcome of a trial: the cause of the child's end, "" if it survived; and which of `self_test.TRIALS` fail.

    `new`: the trial was made just now.
    """

    fatal: str = ""
    faults: tuple[str, ...] = ()
    new: bool = False


def require_loadable(
    probe: Probe, progress: Callable[[float], None] | None = None, child: TrialChild | None = None
) -> LoadTrial:
    """Make sure that loading the model does not end the process; return the verdict of the trial, now or earlier.

    `progress` is called with shares from 0 to 1, if there is a trial now; `child` is a trial that runs already.

    Raises:
        ModelUnsupported: loading ends the process, or llama.cpp refuses the file.
        EngineFailed: the child could not be started, failed before it had touched the file or with an error of
            Python's, or was ended from outside; no verdict is kept.
    """
    if not _is_tried(probe):
        return LoadTrial()
    kept = _kept(probe)
    known = read_verdict(kept)
    verdict = known or (try_in_child(probe, progress) if child is None else child.outcome(progress))
    if verdict.fatal and (speculator := probe.speculator) and known is None:
        without = try_in_child(replace(probe, mtp=False, eagle3=None), progress)
        verdict = replace(without, faults=(*without.faults, speculator))
    if known is None:
        write_verdict(kept, verdict)
    if verdict.fatal:
        raise _fatal(probe.paths[0], verdict)
    return verdict


def start_trial(probe: Probe) -> TrialChild | None:
    """Start a child that tries the model, for `require_loadable`, and return it; None where the verdict is known."""
    if not _is_tried(probe) or read_verdict(_kept(probe)) is not None:
        return None
    return TrialChild(probe)


def _is_tried(probe: Probe) -> bool:
    return os.environ.get("EDGELLM_PROBE") != "off" and bool(sys.executable) and not _is_bundled(probe.paths[0])


def known_faults(probe: Probe) -> tuple[str, ...] | None:
    """Return the faults of an earlier trial, none where models are not tried; None for an untried model.

    Raises:
        ModelUnsupported: the file cannot be read, or ended the process of an earlier trial.
    """
    if not _is_tried(probe):
        return ()
    verdict = read_verdict(_kept(probe))
    if verdict is not None and verdict.fatal:
        raise _fatal(probe.paths[0], verdict)
    return None if verdict is None else verdict.faults


def keep_faults(probe: Probe, faults: Sequence[str]) -> None:
    """Save the outcome of a trial that was made elsewhere."""
    write_verdict(_kept(probe), LoadTrial("", tuple(faults)))


def _kept(probe: Probe) -> Path:
    path = probe.paths[0]
    try:
        return places.cache_dir() / "probed" / f"{probe.key()}.json"
    except OSError as error:
        raise ModelUnsupported(f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from error


def _fatal(path: Path, verdict: LoadTrial) -> ModelUnsupported:
    return ModelUnsupported(
        f"{path} ends the process that loads it: {verdict.fatal}.",
        "Use another file of this model; this one will not be loaded again.",
    )


def _checked_parts(header: GgufHeader) -> Iterator[tuple[int, int]]:
    """Yield offset and length of the parts of a file that can be fatal: the header, and tensors that hold indices."""
    yield 0, header.data_offset
    for tensor in header.tensors:
        if is_index(tensor.name):
            yield tensor.offset, tensor.nbytes


def _portions(file: FileIO, offset: int, n: int) -> Iterator[bytes]:
    file.seek(offset)
    while n > 0 and (portion := file.read(min(n, _PORTION))):
        n -= len(portion)
        yield portion


def _is_bundled(path: Path) -> bool:
    real = path.resolve()
    return real in [folder.resolve() / name for folder in places.bundled_dirs() for name in _BUNDLED]


def try_in_child(probe: Probe, progress: Callable[[float], None] | None = None, **environment: str) -> LoadTrial:
    """Load and test the model in a child with these environment variables; return the verdict."""
    return TrialChild(probe, **environment).outcome(progress)


class TrialChild:
    """A child process that loads and tests a model. Close it where its outcome is not asked for."""

    def __init__(self, probe: Probe, **environment: str) -> None:
        """Start it with these variables. Raises EngineFailed if that fails."""
        size = sum(header.file_size for header in probe.headers)
        size += 0 if probe.eagle3 is None else probe.eagle3.header.file_size
        self._child = Child(_KIND, environment={**os.environ, "GGML_NO_BACKTRACE": "1", **environment})
        self._child.start()
        self._call = self._child.submit(
            "try_model", Limits(), path=str(probe.paths[0]), size=size,
            eagle3="" if probe.eagle3 is None else str(probe.eagle3.path),
            hardware={name: getattr(probe.hardware, name) for name in TRIED},
            ways={name: getattr(probe, name) for name in ("text_only", "mtp", "embeds", "tests")},
        )  # fmt: skip

    def outcome(self, progress: Callable[[float], None] | None = None) -> LoadTrial:
        """Wait for its verdict; call `progress` with shares from 0 to 1.

        Raises:
            EdgeError: loading raised this error in the child, or as for `require_loadable`.
        """
        with closing(self._child):
            try:
                return LoadTrial("", _texts(self._call.result(progress=progress).value), new=True)
            except BrokenPipeError:
                cause = "it exits at once"
            except ChildFailed as error:
                cause = error.cause
            words = self._child.last_words()
            if not self._call.began:
                raise EngineFailed(f"The process that tries a model does not start: {words or cause}.", AGAIN)
            return LoadTrial(f"{cause}, {words}" if words else cause, new=True)

    def close(self) -> None:
        """End the child, if it still runs."""
        self._child.close()


def _texts(found: object) -> tuple[str, ...]:
    return tuple(text for text in found if isinstance(text, str)) if isinstance(found, list) else ()


def read_verdict(kept: Path) -> LoadTrial | None:
    """Return the verdict of an earlier trial, None without one."""
    try:
        if kept.is_symlink() or not kept.is_file():  # a pipe would be waited for
            return None
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    fatal = found.get("fatal") if isinstance(found, dict) else None
    if not isinstance(fatal, str):
        return None
    return LoadTrial(fatal, _texts(found.get("faults")))


def write_verdict(kept: Path, verdict: LoadTrial) -> None:
    """Save a verdict. If it cannot be written, the next load tries again."""
    found = {"fatal": verdict.fatal, "faults": verdict.faults}
    partial = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        others = sorted(kept.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in others[: max(0, len(others) - _MOST_KEPT + 1)]:
            old.unlink(missing_ok=True)
        partial.touch(mode=0o600)
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(kept)


PROVEN_COMMITS = ("0c1e570", "86a2835")
"""The commits of llama.cpp for which the record holds: of the compiled library, which made it, and of the prebuilt
library, with which each of these architectures passes the self-test (`tests/engine/test_self_test.py`). With any other
commit a model is tested before its first reply."""
PROVEN = frozenset({
    "afmoe", "bloom", "cohere2", "command-r", "deepseek2", "deepseek32", "deepseek4", "ernie4_5-moe", "exaone4",
    "falcon", "falcon-h1", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4", "glm4moe", "gpt-oss", "gpt2", "gptneox",
    "granite", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "llama", "mamba", "mamba2", "mimo2",
    "minimax-01", "mistral3", "mpt", "nemotron_h", "olmo2", "phi3", "qwen2", "qwen3", "qwen35", "qwen35moe",
    "qwen3moe", "qwen3next", "rwkv6", "rwkv7", "smollm3", "stablelm", "starcoder2", "step35",
})  # fmt: skip
"""Architectures of which 10,000 rollbacks and branches on a processor left no wrong state: `bench.models.architectures`
has recorded it."""


def is_proven(header: GgufHeader, hardware: Hardware) -> bool:
    """Return whether models of this architecture are on record as they are computed here: with this llama.cpp, on a
    processor, without a graphics card for long batches, and with the default cache."""
    known = commit() in PROVEN_COMMITS and header.architecture in PROVEN
    default = hardware.cache_type in (None, DEFAULT_CACHE) and hardware.flash_attn is None
    return known and default and not hardware.gpu_layers and not offload_devices()
