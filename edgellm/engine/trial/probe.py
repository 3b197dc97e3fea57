"""A model whose header has not been loaded on this machine before is loaded in a child process first.

llama.cpp ends the process over some files. `engine/gguf/reader.py` refuses those that are known; any other ends the
child instead. The verdict is kept by a hash of the header: types, shapes and hyperparameters decide what is fatal,
while weights are numbers in any case, and hashing gigabytes would take longer than the loading. So copies of a file
share a verdict, and so do equal blocks of layers. `EDGELLM_PROBE=off` loads without a trial.
"""

import hashlib
import os
import string
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial

from edgellm import system
from edgellm.engine.gguf.reader import ModelFile, is_index
from edgellm.engine.gguf.writer import copied
from edgellm.engine.hardware import DEFAULT_CACHE, ON_PROCESSOR, Hardware, offload_devices
from edgellm.engine.native import backends, commit
from edgellm.errors import EngineFailed, ModelUnsupported
from edgellm.isolation.child import Child, ChildFailed, ChildKind, Limits
from edgellm.state import from_json, read_cached, write_cached

AGAIN = "Try again; if it fails again, install edgellm once more."
"""The next step after a failed trial that says nothing of the file."""
MTP, EAGLE3 = "mtp", "eagle3"
"""The kinds of speculators: a model's layer that predicts further tokens, and a head in a file of its own. They are
also names of faults of a model over which such a speculator ends the process."""
TRIED = ("gpu_layers", "devices", "tensor_split", "cache_type", "flash_attn")
"""Fields of the hardware that the child is told: all that decides what is computed how."""
_KIND = ChildKind("edgellm.engine.trial.first_load", "tries a model", keeps_words=True)
_BUNDLED = ("draft.gguf", "verifier.gguf", "smollm2/draft.gguf")


@dataclass(frozen=True, slots=True)
class Probe:
    """A model to try, and the `hardware` to load it on; also its MTP layer (`mtp`), or the EAGLE-3 head `eagle3` beside
    it. `dry` as for `LoadSpec`."""

    file: ModelFile
    hardware: Hardware = ON_PROCESSOR
    text_only: bool = False
    mtp: bool = False
    eagle3: ModelFile | None = None
    dry: bool = False

    @property
    def speculator(self) -> str:
        """The kind of the model's speculator; "" without one."""
        return EAGLE3 if self.eagle3 is not None else MTP if self.mtp else ""

    @property
    def files(self) -> Iterator[ModelFile]:
        """Yield the model, and the head beside it."""
        yield self.file
        if self.eagle3 is not None:
            yield self.eagle3

    def key(self) -> str:
        """Return the SHA-256 of everything that decides whether the loading ends the process, in hex: of the files,
        of llama.cpp and its backends, of the devices, and of the cache. Raises OSError, ModelCorrupt: a file cannot be
        read; InvalidOption: there is no such device."""
        hardware = self.hardware
        # Which card of equal ones does not count: the number of layers that fit differs from day to day.
        cards = offload_devices(hardware.devices) if hardware.gpu_layers else []
        devices = [f"{card.kind} {card.name.rstrip(string.digits)} {card.description}" for card in cards]
        built = sorted({name.partition("[")[0] for name in backends()})  # without addresses of RPC servers
        ways = (self.text_only, self.speculator, self.dry)
        cache = hardware.cache_type or DEFAULT_CACHE, hardware.flash_attn
        digest = hashlib.sha256(repr((commit(), built, devices, ways, cache)).encode())
        parts = (part for one in self.files for part in zip(one.paths, one.parts, strict=True))
        for path, header in parts:
            digest.update(f" {header.file_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(header.data_offset))
                for tensor in filter(lambda tensor: is_index(tensor.name), header.tensors):
                    for portion in copied(file, tensor):
                        digest.update(portion)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial: the cause of the child's end, "" if it survived; and the kinds of speculators of which it
    survives only what is tried without them."""

    fatal: str = ""
    faults: tuple[str, ...] = ()


def faults_of(probe: Probe, progress: Callable[[float], None] | None = None) -> tuple[tuple[str, ...], bool]:
    """Return the faults of a model, and whether it was tried now: then the verdict is kept, and `progress` was called
    with shares from 0 to 1. Where models are not tried, there are no faults.

    Raises ModelUnsupported: the file cannot be read, loading ends the process, or llama.cpp refuses it; EngineFailed:
    the child could not be started, failed before it had touched the file or with an error of Python's, or was ended
    from outside; no verdict is kept.
    """
    if not _is_tried(probe):
        return (), False
    try:
        kept = system.cache_dir() / "probed" / f"{probe.key()}.json"
    except OSError as error:
        what = f"{probe.file.path} cannot be read: {error.strerror}."
        raise ModelUnsupported(what, "Check its permissions.") from error
    verdict = read_cached(kept, partial(from_json, TrialOutcome))
    if is_new := verdict is None:
        verdict = try_in_child(probe, progress)
        if verdict.fatal and (speculator := probe.speculator):
            without = try_in_child(replace(probe, mtp=False, eagle3=None), progress)
            verdict = replace(without, faults=(speculator,))
        write_cached(kept, asdict(verdict))
    if verdict.fatal:
        raise ModelUnsupported(
            f"{probe.file.path} ends the process that loads it: {verdict.fatal}.",
            "Use another file of this model; this one will not be loaded again.",
        )
    return verdict.faults, is_new


def _is_tried(probe: Probe) -> bool:
    real = probe.file.path.resolve()
    bundled = any(real == folder.resolve() / name for folder in system.bundled_dirs() for name in _BUNDLED)
    return os.environ.get("EDGELLM_PROBE") != "off" and bool(sys.executable) and not bundled


def try_in_child(probe: Probe, progress: Callable[[float], None] | None = None) -> TrialOutcome:
    """Load the model in a child; return the verdict. `progress` is called with shares from 0 to 1. Raise the EdgeError
    that loading raised in the child, or as `faults_of`."""
    eagle3 = probe.eagle3
    with closing(Child(_KIND, environment={**os.environ, "GGML_NO_BACKTRACE": "1"})) as child:
        child.start()
        trial = child.submit(
            "try_model", Limits(), path=str(probe.file.path), eagle3="" if eagle3 is None else str(eagle3.path),
            size=sum(file.header.file_size for file in probe.files),
            hardware={name: getattr(probe.hardware, name) for name in TRIED},
            ways={name: getattr(probe, name) for name in ("text_only", "mtp", "dry")},
        )  # fmt: skip
        try:
            trial.result(progress=progress)
            return TrialOutcome()
        except BrokenPipeError:
            cause = "it exits at once"
        except ChildFailed as error:
            cause = error.cause
        words = child.last_words()
        if not trial.began:
            raise EngineFailed(f"The process that tries a model does not start: {words or cause}.", AGAIN)
        return TrialOutcome(f"{cause}, {words}" if words else cause)
