"""Cost curves on disk, which are measured while no reply is written, as files are hashed; no reply waits for either."""

import hashlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import Model, Stop
from edgellm.engine.cores import BUSY, CpuWait
from edgellm.errors import Stopped
from edgellm.llm import LLM, cost_curves
from edgellm.llm.cost_curves import IdleWork, ModelCurve, estimated_curve, read_curve
from edgellm.spec.drafting.cost_curve import CostCurve, DecodeCost
from edgellm.state import MONTH
from edgellm.storage.fingerprint import FileHash, _PartHash
from tests.spec.real import prompts

KEPT = CostCurve((1, 2, 4), (0.5, 0.75, 1.25), (1e-6, 2e-6), True)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another chip"}, {"taken": time.time() + 3600.0}, {"taken": time.time() - MONTH - 1.0},
        {"curve": {"rows": [1, "x"], "seconds": [1.0, 2.0]}}, {"curve": {"rows": [1, 2]}},
    ],
)  # fmt: skip
def test_a_curve_that_is_not_of_this_device_and_time_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "new" / "curve.json"
    cost_curves.write_curve(path, KEPT)
    assert read_curve(path) == KEPT
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert read_curve(path) is None


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves of a busy machine are told apart, as outside the tests."""
    monkeypatch.setattr(cost_curves, "BUSY", BUSY)


def waits(monkeypatch: pytest.MonkeyPatch, *shares: float) -> list[float]:
    """Let the next measurements have waited for a processor for these shares of their times."""
    left = list(shares)
    monkeypatch.setattr(CpuWait, "share", lambda _self: left.pop(0))
    return left


@pytest.mark.usefixtures("strict")
def test_what_is_measured_while_others_compute_is_not_kept(
    draft_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, 0.5, 0.0)
    with Model.load(draft_path, faults=()) as model:
        curve = ModelCurve(model, 1, FileHash(draft_path))
        curve.measure()
        assert not curve.measured
        assert not list((home / "cache" / "curves").glob("*"))
        assert curve.current() == estimated_curve(model), "nor used by replies"
        found = curve.measure()
        assert curve.measured
        assert curve.current() == found
        assert ModelCurve(model, 1, FileHash(draft_path)).measure() == found, "but read from the disk"


@pytest.mark.usefixtures("strict")
def test_what_is_not_kept_is_measured_again(draft_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, idle = waits(monkeypatch, 0.5, 0.0), IdleWork()
    with Model.load(draft_path, faults=()) as model:
        curve = ModelCurve(model, 1, FileHash(draft_path), idle)
        for _ in range(2):  # the second time at once
            curve.current()
            idle.wait()
        assert not curve.measured
        monkeypatch.setattr(cost_curves, "AGAIN", 0.0)
        shares.insert(0, 0.5)
        curve.measure()
        curve.current()
        idle.wait()
        assert curve.measured
    assert shares == []


def test_a_curve_far_from_what_decodes_take_is_measured_again(draft_path: Path, home: Path) -> None:
    with Model.load(draft_path, faults=()) as model:
        curve = ModelCurve(model, 1, FileHash(draft_path))
        cost = DecodeCost(curve.measure())
        for _ in range(15):
            cost.observe(0, 1, 3.0 * cost.given.table()[1])
        curve.correct(cost, shared=True)
        assert curve.measured, "the cores were shared"
        curve.correct(cost, shared=False)
        assert not curve.measured
        assert not list((home / "cache" / "curves").glob("*"))


# --- work while no reply is written -----------------------------------------------------------------------------------


HASHING = sys.modules[FileHash.__module__]
WAIT = 60.0  # seconds, after which a test has failed


@pytest.mark.usefixtures("home")
def test_first_replies_wait_for_no_hash_or_curve(f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both block until the reply is written: a reply that asked for them would never end."""
    written, measured, hashed = threading.Event(), threading.Event(), threading.Event()
    run, compute = cost_curves.measure_curve, _PartHash.compute

    def slow_run(*arguments: object) -> object:
        assert written.is_set()
        measured.set()
        return run(*arguments)  # type: ignore[arg-type]

    def slow_hash(*arguments: object) -> str:
        assert written.wait(WAIT)
        hashed.set()
        return compute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cost_curves, "measure_curve", slow_run)
    monkeypatch.setattr(_PartHash, "compute", slow_hash)
    monkeypatch.setattr(HASHING, "QUICK_BYTES", 0)
    with LLM.open(*f32_pair, threads=1) as pair:
        reply = pair.reply(prompts(2002)[0], max_tokens=24)
        before = [token.id for token in reply]
        assert not measured.is_set()
        assert not hashed.is_set()
        written.set()
        assert measured.wait(WAIT)
        assert hashed.is_set()
        pair.curve()
        assert [token.id for token in pair.reply(prompts(2002)[0], max_tokens=24)] == before


def test_work_stops_when_a_reply_begins_and_goes_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.llm.cost_curves.STOPPING", WAIT)
    idle, began, stopped, done = IdleWork(), threading.Event(), threading.Event(), threading.Event()

    def task(stop: Stop) -> None:
        if stopped.is_set():
            done.set()
            return
        began.set()
        while not stop():
            pass
        stopped.set()
        raise Stopped

    idle.add(task)
    assert began.wait(WAIT)
    with idle.suspended():
        assert stopped.is_set(), "it has stopped before the reply begins"
        assert not done.is_set()
    assert done.wait(WAIT)
    idle.close()


def test_work_that_fails_does_not_end_the_rest() -> None:
    idle, done = IdleWork(), threading.Event()

    def fail(_stop: Stop) -> None:
        raise ValueError

    idle.add(fail)
    idle.add(lambda _stop: done.set())
    assert done.wait(WAIT)
    idle.close()
    idle.add(fail)  # closed: nothing is run any more


def test_a_hash_continues_where_it_was_stopped(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HASHING, "_PORTION", 1000)
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(250)) * 40)
    found, portions = FileHash(path), iter(range(100))
    shares: list[float] = []
    with pytest.raises(Stopped):
        found.compute(lambda: next(portions) == 3, shares.append)
    assert shares == [0.1, 0.2, 0.3, 0.4]
    assert found.compute(progress=shares.append) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert shares[4:] == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


def test_a_hash_of_a_file_that_changes_meanwhile_begins_again(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"before")
    found = FileHash(path)
    with pytest.raises(Stopped):
        found.compute(lambda: True)
    path.write_bytes(b"after that")
    assert found.compute() == hashlib.sha256(b"after that").hexdigest()


def test_a_reply_that_never_lets_it_be_measured_leaves_what_it_learned(
    f32_pair: tuple[Path, Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that writes one reply ends before anything is measured."""
    monkeypatch.setattr("edgellm.llm.cost_curves.BANDWIDTH", 1e3)  # a guess that is far off
    with LLM.open("none", f32_pair[1], threads=1) as pair:
        list(pair.reply("Where is my mug?", max_tokens=40, retrieval="history"))
    (path,) = (home / "cache" / "curves").glob(f"{FileHash(f32_pair[1]).compute()[:16]}-*.json")
    kept = read_curve(path)
    assert kept is not None
    assert not kept.filled  # an estimate
    assert kept.seconds[0] < f32_pair[1].stat().st_size / 1e3 / 10.0
    with LLM.open("none", f32_pair[1], threads=1) as pair:
        assert pair.engine.drafting.curve().seconds == kept.seconds
        assert pair.curve().filled


def test_the_curve_is_measured_before_the_first_reply_where_there_is_time(f32_pair: tuple[Path, Path]) -> None:
    with LLM.open("none", f32_pair[1], threads=1) as pair:
        pair.wait_until_measured()
        assert pair.engine.drafting.curve().filled
