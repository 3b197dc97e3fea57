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

import hashlib
import os
import platform
import string
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

from edgellm import system
from edgellm.engine.gguf.header import TensorInfo
from edgellm.engine.gguf.reader import ModelFile, is_index
from edgellm.engine.gguf.writer import copied
from edgellm.engine.hardware import DEFAULT_CACHE, ON_PROCESSOR, Hardware, offload_devices
from edgellm.engine.native import LIBRARY, backends, commit, features
from edgellm.errors import EdgeError, EngineFailed, ModelUnsupported
from edgellm.isolation.child import Child, ChildFailed, ChildKind, Limits
from edgellm.state import from_json, read_cached, write_cached

INSTRUCTION = "AMX_INT8"
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
"""The options with which GCC and Clang compile llama.cpp without AMX."""
AGAIN = "Try again; if it fails again, install edgellm once more."
"""The next step after a failed trial that says nothing of the file."""
MTP, EAGLE3 = "mtp", "eagle3"
"""The kinds of speculators: a model's layer that predicts further tokens, and a head in a file of its own. They are
also names of faults of a model from whose states such a speculator must not draft."""
_FORMAT = 8  # raise this when the child tries more than before, or kept verdicts may be wrong
TRIED = ("gpu_layers", "devices", "tensor_split", "cache_type", "flash_attn")
"""Fields of the hardware that the child is told: all that decides what is computed how."""
_KIND = ChildKind("edgellm.engine.trial.self_test", "tries a model", keeps_words=True)
_BUNDLED = ("draft.gguf", "verifier.gguf", "smollm2/draft.gguf")


@cache
def amx_failure() -> str:
    """Return why AMX must not be used, such as "it ends the process with SIGSEGV"; "" where it works or is not there.

    The first call with a build on a machine takes about a second; its verdict is kept for later processes.
    """
    if INSTRUCTION not in features().instructions:
        return ""
    if (chosen := os.environ.get("EDGELLM_AMX")) in ("on", "off"):
        return "" if chosen == "on" else "EDGELLM_AMX is off"
    kept = system.cache_dir() / "probed" / f"amx-{_build()}.json"
    verdict = _read_verdict(kept)
    if verdict is None:
        package, checkout = system.bundled_dirs()
        try:
            model = ModelFile.open((package if package.is_dir() else checkout) / "draft.gguf")
            verdict = try_in_child(Probe(model), EDGELLM_AMX="on")
        except EdgeError:  # the child was ended from outside, or memory is short
            return "it could not be tested"
        write_cached(kept, asdict(verdict))
    return f"it ends the process with {verdict.fatal}" if verdict.fatal else ""


def _build() -> str:
    """Return a hash of the library for the processor and of the kernel that grants the tiles, 16 hex digits."""
    digest = hashlib.sha256(f"{commit()} {platform.release()}".encode())
    for path in (path for folder in LIBRARY.folders for path in sorted(folder.glob("*ggml-cpu*"))):
        found = path.stat()
        digest.update(f" {path} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Probe:
    """A model to try, and the `hardware` to load it on; also its MTP layer (`mtp`), or the EAGLE-3 head `eagle3` beside
    it. With `embeds` it embeds a text instead of generating. `over_rpc`: its layers are on other machines' devices,
    whatever devices are here."""

    file: ModelFile
    hardware: Hardware = ON_PROCESSOR
    text_only: bool = False
    mtp: bool = False
    embeds: bool = False
    eagle3: ModelFile | None = None
    over_rpc: bool = False

    @property
    def tests(self) -> bool:
        """True if the trial has the self-test. A model on record needs none: of its architecture, as it is computed
        here, with this llama.cpp, on a processor, without a card for long batches, and with the default cache."""
        hardware = self.hardware
        known = commit() in PROVEN_COMMITS and self.file.header.architecture in PROVEN
        default = hardware.cache_type in (None, DEFAULT_CACHE) and hardware.flash_attn is None
        proven = known and default and not hardware.gpu_layers and not offload_devices()
        return bool(self.speculator) or self.over_rpc or not proven

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
        """Return the SHA-256 of everything that decides whether the loading ends the process and what the self-test
        finds, in hex: of the files, of llama.cpp and its backends, of the devices, and of the cache. Raises OSError,
        ModelCorrupt: a file cannot be read; InvalidOption: there is no such device."""
        hardware = self.hardware
        # Which card of equal ones does not count: the number of layers that fit differs from day to day.
        cards = offload_devices(hardware.devices) if hardware.gpu_layers else []
        devices = [f"{card.kind} {card.name.rstrip(string.digits)} {card.description}" for card in cards]
        built = sorted({name.partition("[")[0] for name in backends()})  # without addresses of RPC servers
        ways = (self.text_only, self.tests, self.over_rpc, self.speculator, self.embeds)
        cache = hardware.cache_type or DEFAULT_CACHE, hardware.flash_attn
        digest = hashlib.sha256(repr((_FORMAT, commit(), built, devices, ways, cache)).encode())
        parts = (part for one in self.files for part in zip(one.paths, one.parts, strict=True))
        for path, header in parts:
            digest.update(f" {header.file_size}".encode())
            whole_header = TensorInfo("header", (), 0, 0, header.data_offset)
            with path.open("rb") as file:
                for part in (whole_header, *(tensor for tensor in header.tensors if is_index(tensor.name))):
                    for portion in copied(file, part):
                        digest.update(portion)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial: the cause of the child's end, "" if it survived; and which trials of `self_test` fail."""

    fatal: str = ""
    faults: tuple[str, ...] = ()


def known_faults(probe: Probe) -> tuple[str, ...] | None:
    """Return the faults of an earlier trial, none where models are not tried; None for an untried model. Raise
    ModelUnsupported where the file cannot be read, or ended the process of an earlier trial."""
    if not _is_tried(probe):
        return ()
    verdict = _read_verdict(_kept(probe))
    return None if verdict is None else _survived(probe, verdict)


def find_faults(probe: Probe, progress: Callable[[float], None] | None = None) -> tuple[str, ...]:
    """Try an untried model, and keep the verdict; return its faults. `progress` is called with shares from 0 to 1.

    Raises ModelUnsupported: loading ends the process, or llama.cpp refuses the file; EngineFailed: the child could not
    be started, failed before it had touched the file or with an error of Python's, or was ended from outside; no
    verdict is kept.
    """
    verdict = try_in_child(probe, progress)
    if verdict.fatal and (speculator := probe.speculator):
        without = try_in_child(replace(probe, mtp=False, eagle3=None), progress)
        verdict = replace(without, faults=(*without.faults, speculator))
    write_cached(_kept(probe), asdict(verdict))
    return _survived(probe, verdict)


def keep_faults(probe: Probe, faults: Sequence[str]) -> None:
    """Save the outcome of a trial that was made elsewhere."""
    write_cached(_kept(probe), asdict(TrialOutcome("", tuple(faults))))


def _is_tried(probe: Probe) -> bool:
    real = probe.file.path.resolve()
    bundled = any(real == folder.resolve() / name for folder in system.bundled_dirs() for name in _BUNDLED)
    return os.environ.get("EDGELLM_PROBE") != "off" and bool(sys.executable) and not bundled


def _kept(probe: Probe) -> Path:
    try:
        return system.cache_dir() / "probed" / f"{probe.key()}.json"
    except OSError as error:
        what = f"{probe.file.path} cannot be read: {error.strerror}."
        raise ModelUnsupported(what, "Check its permissions.") from error


def _survived(probe: Probe, verdict: TrialOutcome) -> tuple[str, ...]:
    if verdict.fatal:
        raise ModelUnsupported(
            f"{probe.file.path} ends the process that loads it: {verdict.fatal}.",
            "Use another file of this model; this one will not be loaded again.",
        )
    return verdict.faults


def try_in_child(probe: Probe, progress: Callable[[float], None] | None = None, **environment: str) -> TrialOutcome:
    """Load and test the model in a child with these environment variables; return the verdict. `progress` is called
    with shares from 0 to 1. Raise the EdgeError that loading raised in the child, or as `find_faults`."""
    eagle3 = probe.eagle3
    with closing(Child(_KIND, environment={**os.environ, "GGML_NO_BACKTRACE": "1", **environment})) as child:
        child.start()
        trial = child.submit(
            "try_model", Limits(), path=str(probe.file.path), eagle3="" if eagle3 is None else str(eagle3.path),
            size=sum(file.header.file_size for file in probe.files),
            hardware={name: getattr(probe.hardware, name) for name in TRIED},
            ways={name: getattr(probe, name) for name in ("text_only", "mtp", "embeds", "tests")},
        )  # fmt: skip
        try:
            return TrialOutcome("", _texts(trial.result(progress=progress).value))
        except BrokenPipeError:
            cause = "it exits at once"
        except ChildFailed as error:
            cause = error.cause
        words = child.last_words()
        if not trial.began:
            raise EngineFailed(f"The process that tries a model does not start: {words or cause}.", AGAIN)
        return TrialOutcome(f"{cause}, {words}" if words else cause)


def _texts(found: object) -> tuple[str, ...]:
    return tuple(text for text in found if isinstance(text, str)) if isinstance(found, list) else ()


def _read_verdict(kept: Path) -> TrialOutcome | None:
    return read_cached(kept, partial(from_json, TrialOutcome))


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
