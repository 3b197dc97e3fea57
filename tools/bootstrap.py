"""Sets up .venv for ./start and start.cmd: makes it, installs edgellm into it, and shows how the compiling goes.

Only the standard library: this runs before anything is installed. Safe to interrupt and to run again, also twice at
once. The stamp is written last, so an unfinished environment is never taken for a finished one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "setup.log"
LOCKS = ROOT / "tools" / "locks"  # made by tools/lock.py
BY_HASH = ("--require-hashes", "--no-build-isolation")
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"  # see edgellm/engine/trial/probe.py
WITH_RPC = "-DGGML_RPC=on"  # devices of other processes, which the tests and the mesh use
CORE_MINUTES = 9.0  # llama.cpp took four and a half minutes on two cores
QUIET_SECONDS = 30.0  # between two lines of progress if the screen cannot be rewritten

NINJA = re.compile(r"\[(\d+)/(\d+)\] ")
COLLECTING = re.compile(r"Collecting ([A-Za-z0-9_.-]+)")


class SetupFailed(Exception):
    """Setting up failed; the message says what is wrong and what to do."""


def main(arguments: Sequence[str]) -> int:
    """Set up for `arguments`: `run` or `dev`, the fingerprint of the stamp ("-" for one made here), one of `BACKENDS`,
    `auto` or `cpu`, and one of `EXTRAS`. Return the exit code."""
    kind, fingerprint, backend, extra = (*arguments, *(CPU, NOTHING)[len(arguments) - 2 :])
    if fingerprint == "-":
        fingerprint = f"gpu={backend} {fingerprint_of_requirements()}"
    try:
        with locked(ROOT / ".venv.lock"):
            if not is_ready(kind, fingerprint):
                if backend not in (AUTO, CPU, *BACKENDS):
                    raise SetupFailed(f"--gpu is {backend}. Give one of {', '.join((AUTO, *BACKENDS, CPU))}.")
                if extra not in EXTRAS:
                    raise SetupFailed(f"--with is {extra}. Give one of {', '.join(EXTRAS)}.")
                set_up(kind)
                built = build_for(backend)
                (VENV / "gpu").write_text(built, encoding="utf-8")
                if extra == RPC:
                    build_with_rpc(built)
                (VENV / "with").write_text(extra, encoding="utf-8")
                if backend == AUTO:
                    fingerprint = fingerprint.replace(f"gpu={AUTO}", f"gpu={built}", 1)
                if built == backend or backend == AUTO:  # otherwise the same line tries again
                    (VENV / f"ready-{kind}").write_text(fingerprint, encoding="utf-8")
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


def set_up(kind: str) -> None:
    needs_compiler = not has_llama()
    if needs_compiler and (missing := missing_compiler()):
        raise SetupFailed(missing)
    make_venv()
    minutes = max(1, round(CORE_MINUTES / (os.cpu_count() or 1)))
    say("Setting up edgellm in .venv. This happens once.")
    if needs_compiler:
        say(f"llama.cpp is compiled on {os.cpu_count()} cores, about {minutes} min, unless pip has kept it.")
    pip = [str(program("python")), "-m", "pip", "install", "-v", "--no-input", "--no-deps"]
    # Build tools come first, since pip's isolated builds would fetch them again without checking hashes.
    for lock in ("build", "dev" if kind == "dev" else "run"):
        if lock == "dev":
            forget_wheels_without_rpc()
        watch([*pip, *BY_HASH, "-r", str(LOCKS / f"{lock}.txt")], compiler_environment())
    if kind == "dev" and not has_rpc():
        say("The installed llama.cpp lacks the RPC backend, which the tests need: it is installed once more.")
        install_llama()
    watch([*pip, "--no-build-isolation", "--no-index", "-e", str(ROOT)])
    watch([str(program("python")), "-c", "import llama_cpp, edgellm.cli"])


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
EXTRAS = NOTHING, RPC = "none", "rpc"
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


def build_for(wanted: str) -> str:
    """Compile llama.cpp for graphics cards, or for none; return what it is compiled for now.

    A build that fails leaves one for the processor, with the reason and what to do.
    """
    name, reason = detect() if wanted == AUTO else (wanted, "as asked for")
    before = (VENV / "gpu").read_text(encoding="utf-8") if (VENV / "gpu").exists() else CPU
    if name == before:
        return name
    say(f"llama.cpp is compiled for {name}: {reason}.")
    backend = BACKENDS.get(name)
    if backend is None:
        install_llama()
        return CPU
    if shutil.which(backend.compiler) is None:
        say(f"warning: {backend.compiler} is missing, which compiles for {name}. {packages_hint(backend)}")
        say("edgellm uses the processor until then.")
        return before
    say("This takes 10 to 40 min, once.")
    try:
        install_llama(f"-D{backend.option}=on", backend.header)
        if not works([str(program("python")), "-c", _OFFLOADS]):
            raise SetupFailed(f"It finds no way to use a card. See {LOG}.")
    except SetupFailed as error:
        say(f"warning: it could not be compiled for {name}, so the processor is used. {error}")
        install_llama()
        return CPU
    return name


def build_with_rpc(built: str) -> None:
    """Compile llama.cpp again if it lacks its RPC backend, for the cards that it is `built` for."""
    if has_rpc():
        return
    say("llama.cpp is compiled with its RPC backend, once.")
    forget_wheels_without_rpc()
    backend = BACKENDS.get(built)
    install_llama(*(() if backend is None else (f"-D{backend.option}=on", backend.header)))
    if not has_rpc():
        raise SetupFailed(f"It has no RPC backend after that. See {LOG}.")


_HAS_RPC = """
import ctypes, sys
from llama_cpp.llama_cpp import _lib as library
library.ggml_backend_reg_by_name.restype = ctypes.c_void_p
sys.exit(not library.ggml_backend_reg_by_name(b"RPC"))
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


def has_rpc() -> bool:
    """Return whether the installed llama.cpp has the RPC backend."""
    return works([str(program("python")), "-c", _HAS_RPC])


def forget_wheels_without_rpc() -> None:
    """Remove kept wheels of llama-cpp-python without the RPC backend: pip does not know how it compiled a wheel."""
    command = [str(program("python")), "-m", "pip", "cache", "list", "--format=abspath", "llama_cpp_python"]
    try:
        kept_wheels = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):  # pip keeps nothing
        return
    for path in map(Path, kept_wheels):
        with suppress(OSError, zipfile.BadZipFile):
            with zipfile.ZipFile(path) as wheel:
                kept = any("ggml-rpc." in name for name in wheel.namelist())
            if not kept:
                say("pip has kept a llama.cpp without the RPC backend, which is needed: it is compiled once more.")
                path.unlink()


def compiler_environment(option: str = "", header: str = "") -> dict[str, str]:
    """Return the environment in which llama.cpp is compiled: with its RPC backend, one more of CMake's options, and a
    `header` of this folder that every C++ file includes first, if it is named."""
    arguments = f"{os.environ.get('CMAKE_ARGS', '')} {WITH_RPC} {option}".strip()
    environment = {**os.environ, **compiler_flags(), "CMAKE_ARGS": arguments}
    if header and os.name != "nt":  # the SDK for Windows has newer headers
        flags = environment.get("CXXFLAGS", "")
        environment["CXXFLAGS"] = f'{flags} -include "{ROOT / "tools" / header}"'.strip()
    return environment


def install_llama(option: str = "", header: str = "") -> None:
    """Install llama-cpp-python again; with one of CMake's options it is compiled, and pip does not keep the wheel."""
    locked_lines = re.findall(
        r"^llama-cpp-python==.*?(?=^\S|\Z)", (LOCKS / "run.txt").read_text(), re.MULTILINE | re.DOTALL
    )
    requirement = VENV / "llama.txt"
    requirement.write_text("".join(locked_lines), encoding="utf-8")
    pip = [str(program("python")), "-m", "pip", "install", "-v", "--no-input", "--no-deps", "--force-reinstall"]
    cache = ["--no-cache-dir"] if option else []
    watch([*pip, *cache, *BY_HASH, "-r", str(requirement)], compiler_environment(option, header))


def packages_hint(backend: Backend) -> str:
    if shutil.which("apt-get") and backend.packages:
        return f"Install it with: sudo apt-get install -y {backend.packages}; then run the same line again."
    return "Install it, then run the same line again."


def make_venv() -> None:
    """Make a virtual environment with pip, or keep one that works."""
    python = program("python")
    ours = (VENV / "pyvenv.cfg").exists() or LOG.exists()
    if VENV.exists() and not ours and any(VENV.iterdir()):
        raise SetupFailed(f"{VENV} exists and is not a virtual environment. Move it away, then run this again.")
    if works([str(python), "-c", "import sys, pip; sys.exit(sys.version_info < (3, 11))"]):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    if not works([sys.executable, "-c", "import venv"]):
        raise SetupFailed(f"This Python has no venv module. {install_hint('venv')}")
    if works([sys.executable, "-c", "import ensurepip"]):
        watch([sys.executable, "-m", "venv", str(VENV)])
    elif works([sys.executable, "-m", "pip", "--version"]):
        # Debian has ensurepip in a package of its own; an installed pip can fill the environment as well.
        watch([sys.executable, "-m", "venv", "--without-pip", str(VENV)])
        watch([sys.executable, "-m", "pip", "--python", str(python), "install", *BY_HASH, "--no-deps",
               "-r", str(LOCKS / "build.txt")])  # fmt: skip
    else:
        raise SetupFailed(f"This Python can make no virtual environment with pip. {install_hint('venv')}")


def has_llama() -> bool:
    return works([str(program("python")), "-c", "import llama_cpp"])


def missing_compiler() -> str | None:
    """Return what is missing to compile llama.cpp, with the command that installs it; None if nothing is."""
    if sys.platform == "darwin" and not works(["xcode-select", "-p"]):
        return "A C++ compiler is needed to build llama.cpp. Install it with: xcode-select --install"
    if os.name == "nt":  # CMake finds Visual Studio's, which is not on the path
        return None
    for language, variable, names in (("C", "CC", ("cc", "gcc", "clang")), ("C++", "CXX", ("c++", "g++", "clang++"))):
        chosen = shlex.split(os.environ.get(variable, ""))[:1]
        if not any(shutil.which(name) for name in (chosen or names)):
            return f"A {language} compiler is needed to build llama.cpp. {install_hint('compiler')}"
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


def works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def output_of(command: Sequence[str]) -> str | None:
    """Return what a command prints on standard output; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def watch(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run `command` with its output in the log, and show its progress. An interruption ends all of its processes."""
    VENV.mkdir(exist_ok=True)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        start = LOG.stat().st_size
        # A session of its own: pip, ninja and the compilers are one group, and end together.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    try:
        with LOG.open("rb") as output:
            output.seek(start)
            screen = Screen()
            progress = Progress()
            while process.poll() is None:
                progress.read(output.read().decode("utf-8", "replace"))
                screen.show(progress.text())
                time.sleep(0.5)
        screen.clear()
    except BaseException:
        stop_group(process)
        raise
    if process.returncode:
        raise SetupFailed(explain_failure())


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    if sys.platform == "win32":
        works(["taskkill", "/T", "/F", "/PID", str(process.pid)])
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def explain_failure() -> str:
    tail = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
    shown = "\n".join(f"  | {line}" for line in tail)
    return f"Setting up failed. The end of {LOG}:\n{shown}\nFix this, then run the same line again."


class Progress:
    """The progress of pip and ninja, read from their output."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.doing = "preparing"
        self.rest = ""

    def read(self, text: str) -> None:
        lines = (self.rest + text).split("\n")
        self.rest = lines.pop()
        for line in lines:
            self.read_line(line.strip())

    def read_line(self, line: str) -> None:
        if "Building wheel for llama" in line:
            self.doing = "compiling llama.cpp"
        elif self.doing.startswith("compiling") and (step := NINJA.match(line)):
            self.doing = f"compiling llama.cpp, step {step[1]} of {step[2]}"
        elif name := COLLECTING.match(line):
            self.doing = f"downloading {name[1]}"
        elif line.startswith("Installing collected packages"):
            self.doing = "installing"

    def text(self) -> str:
        seconds = int(time.monotonic() - self.started)
        elapsed = f"{seconds // 60} min {seconds % 60:02d} s" if seconds >= 60 else f"{seconds} s"
        return f"  {self.doing} ({elapsed})"


class Screen:
    """A line that is rewritten on a terminal; elsewhere a new line now and then."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.last = time.monotonic()

    def show(self, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[K{text[:width]}")
            sys.stderr.flush()
        elif time.monotonic() - self.last >= QUIET_SECONDS:
            self.last = time.monotonic()
            say(text)

    def clear(self) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


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


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
