"""Fixtures on the real bundled pair. Everything heavy is made once a session."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import iscoroutinefunction, signature
from pathlib import Path
from shutil import copytree
from typing import Any, TypeAlias

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from edgellm.engine import Model
from edgellm.engine.hardware import ALL_LAYERS
from edgellm.engine.model import LoadSpec
from edgellm.engine.native import LIBRARY
from edgellm.llm import LLM
from edgellm.rpc_engine.backend import is_compiled_in
from edgellm.spec.drafting.cost_curve import CostCurve
from testkit.gguf.architectures import Mtp, write
from testkit.gguf.changed import to_f32
from testkit.processes.rpc_device import DEVICES, require_device
from testkit.speculators import eagle3
from tests.decodes import Watched, watch_decodes
from tests.once import once
from tests.spec.real import case

MODELS = Path(__file__).parent.parent / "models"
FIRST = ("tests/net/", "tests/test_other_device.py")
"""What waits for most of its minutes, while other processes have the processors, and what takes longest."""
APART = "tests/test_other_device.py"
"""Its tests share nothing, so each may run in a process of its own."""

Architectures: TypeAlias = Callable[..., Path]
Heads: TypeAlias = Callable[..., Path]

os.environ["EDGELLM_PAIR"] = "home"  # also of the processes that tests start: nothing is downloaded
os.environ["EDGELLM_MODELS"] = ""  # models of other programs on this machine are left alone
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of the hundreds of processes of tests compiles everything
sys.dont_write_bytecode = False
settings.register_profile("edgellm", deadline=None)  # the suite also passes on a machine that is busy otherwise
settings.load_profile("edgellm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=DEVICES,
        default="host",
        help="where models are: in this process, on a device of another process (llama.cpp's RPC backend on loopback),"
        " or on this machine's graphics cards",
    )
    parser.addoption("--nightly", action="store_true", help="also what takes minutes: other devices, planted faults")


def pytest_xdist_auto_num_workers() -> int:
    """Two processes more than there are processors, since tests also wait: for processes, timers and a browser."""
    return min((os.cpu_count() or 1) + 2, 6)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that all processes end at about the same time. What needs llama.cpp's RPC is
    skipped where it has none."""
    if not is_compiled_in():
        without = pytest.mark.skip(reason=f"this llama.cpp ({LIBRARY.kind}) has no RPC backend")
        for item in items:
            if item.get_closest_marker("rpc"):
                item.add_marker(without)
    left_out = {"processor"} if config.getoption("--device") != "host" else set()
    if not config.getoption("--nightly"):
        left_out.add("nightly")
    deselected = [item for item in items if left_out & {mark.name for mark in item.iter_markers()}]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    items.sort(key=lambda item: next((at for at, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))


def pytest_collection_finish() -> None:
    """What was imported and collected stays, so that pytest, which collects garbage five times in the end, need not go
    through it: that takes two seconds of each process."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An asynchronous test runs in the network loop."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    from edgellm.rpc.channel import run_in_network_loop

    given = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    run_in_network_loop(pyfuncitem.obj(**given)).result(60)
    return True


class _ByFile(LoadFileScheduling):  # type: ignore[misc]
    """Keeps the tests of a file together, except those of `APART`."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(APART) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile | None:
    return _ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _brief_curves() -> Iterator[None]:
    """What decodes cost is measured briefly, also in the background, and kept on a busy machine, too: few tests look at
    the figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgellm.llm.cost_curves._ROUNDS", 2)
        patch.setattr("edgellm.llm.cost_curves._MAX_SECONDS", 0.1)
        patch.setattr("edgellm.llm.cost_curves.BUSY", 1.0)
        yield


@pytest.fixture(scope="session")
def curves(tmp_path_factory: pytest.TempPathFactory, _brief_curves: None) -> Path:
    """The cost curves of the bundled pair, so that no process of a test measures them again."""

    def make(home: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EDGELLM_HOME", str(home))
            for names in (("edgellm-draft", None), (None, "edgellm-verifier")):
                with LLM.open(*names) as pair:
                    pair.curve()

    return once(tmp_path_factory, "curves", make) / "cache" / "curves"


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, curves: Path) -> Iterator[None]:
    """Profiles and caches of the user's own are neither read nor written, and the hundreds of models that tests make
    are loaded without trying each in a child process first; `tests/engine/test_probe.py` tests that."""
    home = tmp_path_factory.mktemp("home")
    copytree(curves, home / "cache" / "curves")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGELLM_PROBE", "off")
        patch.setenv("EDGELLM_HOME", str(home))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home of its own for the test."""
    path = tmp_path / "home"
    monkeypatch.setenv("EDGELLM_HOME", str(path))
    return path


@pytest.fixture(scope="session", autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--device`, all layers of every model that a test does not place itself are on that device."""
    device = request.config.getoption("--device")
    if device == "host":
        yield
        return
    require_device(device)
    load, offloaded = Model.load, []

    def loaded(source: Path, spec: LoadSpec = LoadSpec(), **given: Any) -> Model:
        if spec.hardware.gpu_layers is None:
            spec = replace(spec, hardware=replace(spec.hardware, gpu_layers=ALL_LAYERS))
        model = load(source, spec, **given)
        offloaded.append(model.offloaded)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "load", loaded)
        yield
    assert any(offloaded) or not offloaded, "no model was on the device"


@pytest.fixture(scope="session")
def draft_path() -> Path:
    return MODELS / "draft.gguf"


@pytest.fixture(scope="session")
def verifier_path() -> Path:
    return MODELS / "verifier.gguf"


@pytest.fixture(scope="session")
def f32_pair(draft_path: Path, verifier_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """F32 copies of draft model and verifier, for tests of exactness."""
    folder = tmp_path_factory.mktemp("f32")
    copies = (folder / "draft-f32.gguf", folder / "verifier-f32.gguf")
    for source, copy in zip((draft_path, verifier_path), copies, strict=True):
        to_f32(source, copy)
    return copies


@pytest.fixture(scope="session")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> Architectures:
    """Returns the path of a small random model of an architecture's name, with `noise` in its weights, and with an MTP
    layer if `mtp` says so."""

    def path(name: str, noise: float = 0.0, mtp: Mtp = "none") -> Path:
        file = f"{name}-{noise}-{mtp}.gguf"
        return once(tmp_path_factory, file, lambda folder: write(name, folder / file, noise=noise, mtp=mtp)) / file

    return path


@pytest.fixture(scope="session")
def heads(architectures: Architectures, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """Returns the path of a small EAGLE-3 head for the model that `architectures` makes of a name; `options` as for
    `testkit.speculators.eagle3.write`."""

    def path(verifier: str, **options: Any) -> Path:
        file = f"{verifier}-{'-'.join(f'{key}{value}' for key, value in sorted(options.items()))}-eagle3.gguf"
        model = architectures(verifier)
        return once(tmp_path_factory, file, lambda folder: eagle3.write(folder / file, model, **options)) / file

    return path


@pytest.fixture(scope="session")
def profile_path(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the f32 pair, in a file of its own."""

    def make(folder: Path) -> None:
        with LLM.open(*f32_pair, threads=1) as pair:
            pair.profile([case(number) for number in range(24)], max_tokens=40).save(folder / "profile.json")

    return once(tmp_path_factory, "profile", make) / "profile.json"


@pytest.fixture(scope="session")
def draft_model(draft_path: Path) -> Iterator[Model]:
    with Model.load(draft_path) as model:
        yield model


@pytest.fixture(scope="session")
def verifier_model(verifier_path: Path) -> Iterator[Model]:
    with Model.load(verifier_path) as model:
        yield model


@pytest.fixture(scope="module")
def pair(f32_pair: tuple[Path, Path]) -> Iterator[LLM]:
    """Draft model and verifier in f32."""
    with LLM.open(*f32_pair, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(f32_pair: tuple[Path, Path]) -> Iterator[LLM]:
    """The verifier alone, in f32."""
    with LLM.open("none", f32_pair[1], threads=1) as opened:
        yield opened


@pytest.fixture
def rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode of many rows costs little more than one of a single row, whatever this machine is busy with: so what can
    be copied is copied."""
    curve = CostCurve((1, 64), (1.0, 1.1))
    monkeypatch.setattr("edgellm.llm.cost_curves.ModelCurve.current", lambda _self: curve)
    monkeypatch.setattr("edgellm.spec.drafting.cost_curve.WITNESSES", 10**9)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return watch_decodes(monkeypatch)
