"""Access to llama.cpp's memory: its import, its log, its pointers' lifetime, its functions' addresses.

A thread ends its OpenMP team (see `edgellm/engine/library.py`) when it closes a context and when it has written a reply
(`release_threads`): a single team that nobody uses halves the speed of a model of 135 million parameters. OpenMP knows
nothing of other processes, whose threads take cores away from threads that are waited for: `edgellm/engine/cores.py`
handles that.
"""

import atexit
import ctypes
import functools
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeAlias

from edgellm import system
from edgellm.engine import library

LIBRARY, binding = library.load()
"""The llama.cpp of this process, and the binding's module that declares its functions."""
# Any, because its declarations are functions without bodies, from which a type checker infers wrong types
lib: Any = binding
VERSION = version(library.BINDING)
"""The version of llama-cpp-python."""


ShouldStop: TypeAlias = Callable[[], bool]
"""A function, polled between steps, that returns whether to cancel."""


def release_threads() -> None:
    """End the team of threads with which the calling thread has decoded; its next decode makes another, in 0.1 ms."""
    if sys.platform == "linux":  # elsewhere OpenMP is another, which does not count teams
        with suppress(AttributeError):
            LIBRARY.function("omp_pause_resource_all")(1)  # omp_pause_soft


def never() -> bool:
    """Return False: the default for computations that can be stopped."""
    return False


class Stop:
    """A flag that any thread may set, once; calling it returns whether it is set.

    llama.cpp asks between any two steps of a computation, hundreds of times per pass. A Python function would need
    Python's lock each time, and wait for other threads. So llama.cpp calls the C library's `strlen` instead, on a text
    that is empty until the flag is set.
    """

    __slots__ = ("_flag", "address")

    def __init__(self) -> None:
        self._flag = ctypes.create_string_buffer(2)
        self.address = ctypes.addressof(self._flag)
        """The address to give `abort_if_set`; valid as long as this object lives."""

    def set(self) -> None:
        self._flag[0] = b"\1"

    def __call__(self) -> bool:
        return self._flag[0] != b"\0"


# The 1 that strlen returns is also a true bool: the lowest byte of the same register.
abort_if_set: Any = ctypes.cast(ctypes.CDLL("msvcrt" if os.name == "nt" else None).strlen, lib.ggml_abort_callback)
no_abort: Any = lib.ggml_abort_callback()


@dataclass(frozen=True, slots=True)
class Features:
    """A library's features: `instructions` such as AVX2 or NEON, `backends` such as CPU and CUDA."""

    instructions: tuple[str, ...]
    backends: tuple[str, ...]

    @property
    def gpu(self) -> bool:
        """True if layers can be put on a graphics card."""
        # An RPC server's backend has its address in its name.
        return any(not name.startswith(("CPU", "BLAS", "RPC", "ZenDNN")) for name in self.backends)


_STRONGEST = ("AMX_INT8", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2", "AVX", "MATMUL_INT8", "DOTPROD", "NEON")


def backends() -> tuple[str, ...]:
    """Return the names of llama.cpp's backends that it was compiled with or has loaded, such as CPU and CUDA."""
    found = (ggml.ggml_backend_reg_get(at) for at in range(ggml.ggml_backend_reg_count()))
    return tuple(ggml.ggml_backend_reg_name(one).decode("utf-8", "replace") for one in found)


@functools.cache
def commit() -> str:
    """Return the abbreviated commit of llama.cpp that the library was built from: findings and files of one commit may
    not hold for another."""
    return str(ggml.ggml_commit().decode("utf-8", "replace").partition("-")[0])


def features() -> Features:
    """Return the features of the library that this process has loaded."""
    start()
    system_info = lib.llama_print_system_info().decode("utf-8", "replace")
    return Features(tuple(re.findall(r"(\w+) = 1", system_info)), backends())


def description() -> str:
    """Return the llama.cpp of this process, its features, and the reason for it, in words."""
    found, sought = features(), ("RPC",) if sys.platform == "darwin" else ("RPC", "CUDA")
    strongest = next((name for name in _STRONGEST if name in found.instructions), "plain instructions")
    parts = f"{LIBRARY.source}, commit {commit()}, {strongest}, backends: {', '.join(found.backends)}"
    lacking = "".join(f", no {name}" for name in sought if name not in found.backends)
    return f"{LIBRARY.kind} ({parts}{lacking}) because {LIBRARY.reason}"


_TINY = 4_000_000  # parameters
_SMALL = 50_000_000
_TILE = 64  # rows that flash attention computes together
_WARN, _CONTINUED = 3, 5
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class NativeLog:
    """A sink for llama.cpp's log that keeps the last warnings and errors, so that our messages can quote them."""

    def __init__(self, keep: int = 32) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=keep)
        self._lock = threading.Lock()
        self.count = self._level = 0
        self._listeners: dict[int, list[str]] = {}
        self.callback = _Log(self._write)

    def since(self, mark: int) -> str:
        """Return the warnings and errors written since `count` was `mark`, in one line; empty where there were none."""
        return "; ".join(line for number, line in list(self._lines) if number > mark)

    @contextmanager
    def listen(self) -> Iterator[list[str]]:
        """Yield a list that gets every line of this thread, also below warnings, while the `with` lasts."""
        lines: list[str] = []
        self._listeners[threading.get_ident()] = lines
        try:
            yield lines
        finally:
            del self._listeners[threading.get_ident()]

    def _write(self, level: int, text: bytes | None, _user: int | None) -> None:
        if level != _CONTINUED:
            self._level = level
        listener = self._listeners.get(threading.get_ident()) if self._listeners else None
        if self._level < _WARN and listener is None:
            return
        line = (text or b"").decode("utf-8", "replace").strip()
        if listener is not None:
            listener.append(line)
        if line and self._level >= _WARN:
            with self._lock:
                self.count += 1
                self._lines.append((self.count, line))


log = NativeLog()


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C to the end of the `with`, and yield whether it was pressed.

    Python handles a signal at the first Python function that C calls, before any of its lines: an exception of the
    handler is lost there, as nothing may be raised through C.
    """
    number = signal.SIGINT
    if threading.current_thread() is not threading.main_thread() or not callable(signal.getsignal(number)):
        yield lambda: False
        return
    pressed: list[int] = []
    before = signal.signal(number, lambda number, _frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(number, before)
        if pressed:
            signal.raise_signal(number)


@functools.cache
def start() -> None:
    """Initialise llama.cpp once per process, and take over its log."""
    with deferred_interrupt():
        lib.llama_log_set(log.callback, ctypes.c_void_p(0))  # first: backends log which cards they find
        _load_backends()
        lib.llama_backend_init()
    atexit.register(_detach_log)
    # The first finalizer registers the function that frees all at exit; the last registered function runs first.
    weakref.finalize(process_exit, process_exit.begin).detach()
    atexit.register(process_exit.begin)


def _load_backends() -> None:
    """Load the backends where the library has each in a file of its own; backends of cards only where a card may be,
    as they start drivers that compute on the processor, too."""
    if ggml.ggml_backend_reg_count():
        return
    cpu = LIBRARY.find("ggml-cpu")
    if cpu is not None and not (system.may_have_card() or os.environ.get("GGML_VK_VISIBLE_DEVICES")):
        ggml.ggml_backend_load(os.fsencode(cpu))
        return
    for folder in LIBRARY.folders:
        ggml.ggml_backend_load_all_from_path(os.fsencode(folder))


def _detach_log() -> None:
    # Backends may still log while the process unloads, when no Python is left to answer; and no callback at all would
    # mean stderr. So the last callback is a function of llama.cpp's that ignores its arguments.
    lib.llama_log_set(ctypes.cast(lib.llama_time_us, lib.llama_log_callback), ctypes.c_void_p(0))


def bind(function: Any, result: Any, *arguments: Any, prototype: Any = ctypes.CFUNCTYPE) -> Any:
    """Return the same native function with another signature, for example to get an address as a plain int."""
    return prototype(result, *arguments)(ctypes.cast(function, ctypes.c_void_p).value)


bind_nonblocking = functools.partial(bind, prototype=ctypes.PYFUNCTYPE)
"""Binds like `bind` a function that returns at once, so that Python's lock is kept during the call."""


class ProcessExit:
    """The end of the process: it waits until no daemon thread is inside llama.cpp, whose buffers go, and blocks any
    that comes later."""

    def __init__(self) -> None:
        self._by: int | None = None
        self._guards: weakref.WeakSet[NativeGuard] = weakref.WeakSet()

    def register(self, guard: "NativeGuard") -> None:
        """Let the exit wait for `guard`."""
        self._guards.add(guard)

    @property
    def in_other_thread(self) -> bool:
        """Return whether another thread is ending the process."""
        return self._by is not None and self._by != threading.get_ident()

    def block_if_exiting(self) -> None:
        """Return at once while the process lives; block for ever in a thread other than the exiting one."""
        if self.in_other_thread:
            threading.Event().wait()

    def begin(self, timeout: float = 2.0) -> None:
        """Block all other threads at their next native call; wait up to `timeout` seconds for calls under way."""
        self._by = threading.get_ident()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(guard.busy for guard in list(self._guards)):
            time.sleep(0.001)


process_exit = ProcessExit()


class NativeGuard:
    """`with guard:` marks a native object as at work, so that it is not freed."""

    __slots__ = ("__weakref__", "busy")

    def __init__(self) -> None:
        self.busy = False
        process_exit.register(self)

    def __enter__(self) -> None:
        self.busy = True  # set before the end is looked for: the end, which looks in the other order, cannot miss it
        if process_exit.in_other_thread:
            self.busy = False
            process_exit.block_if_exiting()

    def __exit__(self, *_: object) -> None:
        self.busy = False

    def keep(self) -> None:
        """Never free the object."""
        self.busy = True


class Owned:
    """A pointer from llama.cpp that is freed once: with its last reference, or at interpreter exit.

    A child (a context) keeps its parent (the model) alive. At exit children are freed first, and objects on which a
    daemon thread still computes are left to the operating system.
    """

    __slots__ = ("__weakref__", "guard", "pointer")

    def __init__(self, pointer: int, free: Callable[[int], None], parent: "Owned | None" = None) -> None:
        self.pointer = pointer
        self.guard = NativeGuard()
        weakref.finalize(self, _free, free, pointer, self.guard, parent)


def _free(free: Callable[[int], None], pointer: int, guard: NativeGuard, parent: Owned | None) -> None:
    if guard.busy:
        if parent is not None:
            parent.guard.keep()
        return
    with guard:
        free(pointer)


class _Ggml:
    """The functions of `library.FUNCTIONS` by name, bound when they are first used."""

    def __getattr__(self, name: str) -> Any:
        prototype = ctypes.PYFUNCTYPE if name == "ggml_get_name" else ctypes.CFUNCTYPE  # asked hundreds of times
        found = bind(LIBRARY.function(name), *library.FUNCTIONS[name], prototype=prototype)
        setattr(self, name, found)
        return found


ggml: Any = _Ggml()


def default_threads(n_params: int) -> int:
    """Return the threads for a model of that size: one for a tiny model, which computes a token in less time than
    threads need to meet (1.2 M parameters: 0.16 ms with one thread, 0.18 ms with two), else all cores."""
    return 1 if n_params < _TINY else available_threads()


def flash_pays(n_params: int, rows: int, offloaded: bool = False) -> bool:
    """Return whether flash attention is faster for a model of that size, decoding up to `rows` rows at once.
    `offloaded`: some of its layers are on a graphics card.

    On a processor it takes the rows of a batch of fewer than 64 one by one: verification then takes several times as
    long in a small model, and a tenth longer in a model of 0.5 billion parameters, whose prefill is a tenth faster.
    """
    return offloaded or (rows >= _TILE and n_params >= _SMALL)


def available_threads() -> int:
    """Return the number of physical cores on which a computation of this process runs best.

    Counts the performance cores among the processors of the affinity mask, at most the cgroup's processor quota:
    threads beyond that wait for each other in every layer, and so they do for a core that saves power.
    """
    cores = system.performance_cores()
    return max(1, min(cores, system.processor_quota() or cores))
