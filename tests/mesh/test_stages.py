"""Stages in a row compute what the whole model does, also while they load; and what is not taken from their word."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Block, cut
from edgellm.errors import DeviceLost, InvalidOption, LayersMissing, ProtocolError
from edgellm.layer_range import LayerRange, ranges
from edgellm.mesh import pipeline
from edgellm.mesh.messages import Event, MicroBatch, StageAnswer, StageLost, StageSpec, Took
from edgellm.mesh.pipeline import LocalStageHost, Pipeline, Post, StageHost
from edgellm.mesh.stage import Stage, check
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.protos.mesh_pb2 import StageLoaded
from edgellm.spec.types import GREEDY, Chunk, Verdict
from tests.engine.logits import some_ids
from tests.mesh.folder import FolderLayers, warm
from tests.mesh.household import NOTHING, Cut, Whole, even, logits_of
from tests.verifier.asking import judged

CLOSE = 1e-4


def opened(cut: Cut, n: int) -> Pipeline:
    shares = even(cut.work, [f"device {at}" for at in range(n)])
    stages: list[tuple[StageHost, StageSpec]] = [
        (LocalStageHost(share.name, WeightCache(cut.layers)), replace(cut.work, layers=share.layers))
        for share in shares
    ]
    return Pipeline(stages)


@pytest.mark.parametrize("n", [1, 3])
def test_logits_are_those_of_the_whole_model(verifier_cut: Cut, whole: Whole, n: int) -> None:
    pipeline = opened(verifier_cut, n)
    whole.context.clear()
    ids = some_ids(80, 2000)
    expected = whole.context.decode(ids[:40], outputs=8)
    assert np.abs(logits_of(pipeline, 0, 0, ids[:40], 8, rows=16) - expected).max() < CLOSE
    for at in range(40, 80):
        row = whole.context.decode(ids[at : at + 1])
        assert np.abs(logits_of(pipeline, 0, at, ids[at : at + 1], 1) - row).max() < CLOSE
    whole.context.rollback(60)  # what a rejected draft leaves is dropped
    other = ids[::-1][:7].copy()
    expected = whole.context.decode(other, outputs=7)
    assert np.abs(logits_of(pipeline, 0, 60, other, 7) - expected).max() < CLOSE
    pipeline.close()


class SlowLayers(FolderLayers):
    """Layers, the last of which are there only when they are let go."""

    def __init__(self, layers: FolderLayers, slow: int) -> None:
        super().__init__(layers.folder, layers.per_file, self._wait)
        self._slow = slow
        self.go = threading.Event()
        self.asked = threading.Event()

    def _wait(self, layers: LayerRange) -> None:
        if layers.start >= self._slow:
            self.asked.set()
            assert self.go.wait(60)


class Posted:
    """What a stage posts."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait(self, wanted: Callable[[Event], bool]) -> Event:
        with self._news:
            assert self._news.wait_for(lambda: any(map(wanted, self.events)), 60), self.events
        return next(filter(wanted, self.events))


def test_the_first_layers_compute_while_the_last_ones_load(verifier_cut: Cut) -> None:
    slow, posted = SlowLayers(verifier_cut.layers, 8), Posted()
    stage = Stage(verifier_cut.work, WeightCache(slow), posted)
    stage.start()
    ids = some_ids(64, 2000)
    for at in range(0, 64, 16):
        ask = judged(NOTHING, GREEDY, 64) if at == 48 else None
        stage.put(MicroBatch(0, at, at, ids[at : at + 16], ask))
    assert slow.asked.wait(60)
    moved = threading.Event()
    for _ in range(600):  # all four micro-batches go through the eight layers that are there, and wait before the ninth
        if stage.progress[1] == 32:
            break
        moved.wait(0.05)
    loaded, steps = stage.progress
    assert (int(loaded), steps) == (8, 32)
    slow.go.set()
    posted.wait(lambda event: not isinstance(event, StageLoaded))
    stage.close()


def test_a_piece_may_hold_several_layers(verifier_cut: Cut, whole: Whole, tmp_path: Path) -> None:
    work, layers = verifier_cut.work, FolderLayers(tmp_path, 2)
    layers.cut(verifier_cut.path)
    cache = WeightCache(layers)
    stages: list[tuple[StageHost, StageSpec]] = [
        (LocalStageHost(str(first), cache), replace(work, layers=LayerRange(first, last + 1)))
        for first, last in ((0, 3), (4, 11))
    ]
    pipeline, ids = Pipeline(stages), some_ids(20, 2000)
    whole.context.clear()
    assert np.abs(logits_of(pipeline, 0, 0, ids, 1) - whole.context.decode(ids)).max() < CLOSE
    assert [record.loaded for record in pipeline.records] == [4, 8]
    assert warm(cache, work.model) == set(range(12))
    pipeline.close()
    with pytest.raises(
        LayersMissing, match=r"Layers 1-5 of .* do not match the boundaries of the pieces on this device: 1-2, 3-4, 5-6"
    ):
        Stage(replace(work, layers=LayerRange(0, 5)), cache, lambda _: None)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_that_is_not_what_it_says_ends_the_stage(verifier_cut: Cut, tmp_path: Path, damaged: bool) -> None:
    layers, posted = FolderLayers(tmp_path, 2), Posted()
    layers.cut(verifier_cut.path)
    path = layers.path(verifier_cut.work.model, 4)
    if damaged:
        path.write_bytes(b"nothing")
    else:
        cut(verifier_cut.path, path, 4, 6, head=False)
    stage = Stage(verifier_cut.work, WeightCache(layers), posted)
    stage.start()
    gone = posted.wait(lambda event: isinstance(event, StageLost))
    assert isinstance(gone, StageLost)
    assert damaged or "The file with layers 5-6" in gone.error.what
    stage.close()


def test_layers_that_are_missing_are_named(verifier_cut: Cut, tmp_path: Path) -> None:
    layers = FolderLayers(tmp_path)
    layers.cut(verifier_cut.path, [0, 1, 2, 5])
    with pytest.raises(LayersMissing, match=r"Layers 4-5, 7-12 of .* are not on this device"):
        Stage(verifier_cut.work, WeightCache(layers), lambda _: None)
    assert ranges([]) == "none"


def test_no_more_rows_wait_than_all_sessions_can_use(verifier_cut: Cut) -> None:
    stage, batch = (
        Stage(verifier_cut.work, WeightCache(verifier_cut.layers), Posted()),
        MicroBatch(0, 1, 0, some_ids(200)),
    )
    for _ in range(10):  # of 2048 rows
        stage.put(batch)
    with pytest.raises(ProtocolError, match="more micro-batches than"):
        stage.put(batch)
    stage.close()


def test_what_fails_fails_the_question_that_it_belongs_to_and_no_other(verifier_cut: Cut) -> None:
    pipeline, ids = opened(verifier_cut, 2), some_ids(30, 2000)
    lost = pipeline.ask(
        0, 9, ids, judged(NOTHING, GREEDY, 39), rows=8
    )  # four micro-batches, none of which can be placed
    good = pipeline.ask(1, 0, ids, judged(NOTHING, GREEDY, 30), rows=8)
    with pytest.raises(InvalidOption):
        lost.result(60)
    assert good.result(60).verdict.accepted == 0
    pipeline.close()


@pytest.mark.parametrize(("where", "name"), [(Block, "forward"), (WeightCache, "acquire")])
def test_an_error_of_python_ends_the_stage_and_not_its_thread_alone(
    verifier_cut: Cut, monkeypatch: pytest.MonkeyPatch, where: type, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the thread that loads, and in the one that computes."""

    def fail(*_: object, **_more: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(where, name, fail)
    pipeline, ids = opened(verifier_cut, 2), some_ids(5, 2000)
    with pytest.raises(DeviceLost, match=r"device \d was lost: The stage has failed: KeyError\('a bug'\)"):
        pipeline.ask(0, 0, ids, judged(NOTHING, GREEDY, 5)).result(60)
    pipeline.close()
    assert "Traceback" in caplog.text


ROWS = np.zeros((3, 192), dtype=np.float32)


@pytest.mark.parametrize(
    ("first", "batch", "says"),
    [
        (0, MicroBatch(2, 1, 0, some_ids(3)), "no session 2"),
        (0, MicroBatch(0, 1, 254, some_ids(3)), "3 positions from 254"),
        (0, MicroBatch(0, 1, 0, some_ids(0)), "0 positions"),
        (0, MicroBatch(0, 1, 0, np.array([2560], np.int32)), "ids of the vocabulary"),
        (0, MicroBatch(0, 1, 0, np.array([-1], np.int32)), "ids of the vocabulary"),
        (0, MicroBatch(0, 1, 0, ROWS), "ids of the vocabulary"),
        (4, MicroBatch(0, 1, 0, ROWS[:, :191]), "have the shape"),
        (4, MicroBatch(0, 1, 0, np.full_like(ROWS, np.nan)), "NaN or infinity"),
        (4, MicroBatch(0, 1, 0, np.full_like(ROWS, np.inf)), "NaN or infinity"),
        (4, MicroBatch(0, 1, 0, ROWS, judged(Chunk(some_ids(3)), GREEDY, 1)), "4 of 3 positions"),
    ],
)
def test_what_no_stage_before_would_send(verifier_cut: Cut, first: int, batch: MicroBatch, says: str) -> None:
    work = replace(verifier_cut.work, layers=LayerRange(first, verifier_cut.work.n_layers))
    with pytest.raises(ProtocolError, match=says):
        check(batch, work)


IDS = np.arange(3, dtype=np.int32)
FORWARDED = np.ones((3, 8), np.float32)


class SilentHost:
    """A host whose stage reports what a test has it report."""

    def __init__(self, name: str) -> None:
        self.name, self.sent = name, list[MicroBatch]()

    def begin(self, work: StageSpec, post: Post, pipeline: Pipeline) -> None:
        self.post = post

    def send(self, batch: MicroBatch) -> None:
        self.sent.append(batch)

    def close(self) -> None: ...


def silent(work: StageSpec, n: int) -> tuple[Pipeline, list[SilentHost]]:
    """Return a pipeline over `n` such hosts, which was asked for a verdict behind three tokens."""
    hosts = [SilentHost(str(at)) for at in range(n)]
    pipeline = Pipeline([(host, work) for host in hosts])
    pipeline.ask(1, 0, IDS, judged(Chunk(), GREEDY, 3))
    return pipeline, hosts


def lost(pipeline: Pipeline) -> str:
    return "" if pipeline.lost is None else pipeline.lost[1].error.what


@pytest.fixture
def some_work() -> StageSpec:
    return StageSpec("ab" * 32, "big", LayerRange(0, 1), 1, 8, 300, 64)


def test_rows_are_passed_on_once_in_order_and_with_the_question_that_was_asked(some_work: StageSpec) -> None:
    lie = MicroBatch(0, 1, 5, FORWARDED, judged(Chunk(IDS), GREEDY, 9, logits=True))
    pipeline, hosts = silent(some_work, 3)
    hosts[0].post(lie)
    (passed,) = hosts[1].sent
    assert (passed.session, passed.number, passed.start) == (1, 1, 0)
    assert passed.request is pipeline.judged(1)
    np.testing.assert_array_equal(passed.data, FORWARDED)
    hosts[1].post(lie)
    assert (len(hosts[2].sent), lost(pipeline)) == (1, "")
    hosts[2].post(lie)  # the last stage has none behind it
    assert "not sent to that stage" in lost(pipeline)
    for number, says in ((1, "twice"), (2, "not sent")):
        pipeline, hosts = silent(some_work, 3)
        hosts[0].post(lie)
        hosts[0].post(replace(lie, number=number))
        assert says in lost(pipeline)
    pipeline, hosts = silent(some_work, 2)
    hosts[1].post(StageAnswer(1, Verdict(0, IDS[:1])))
    hosts[0].post(lie)  # it is too late
    assert (hosts[1].sent, lost(pipeline), pipeline.judged(1)) == ([], "", None)
    with pytest.raises(ProtocolError, match="but not requested"):
        pipeline.judged(2)


@pytest.mark.parametrize(
    "rows",
    [
        FORWARDED[:2], np.ones((4, 8), np.float32), IDS, np.full((3, 8), np.nan, np.float32),
        np.full((3, 8), np.inf, "f4"),
    ],
    ids=["fewer", "more", "ids", "nan", "inf"],
)  # fmt: skip
def test_rows_that_cannot_be_those_of_a_micro_batch_are_not_passed_on(some_work: StageSpec, rows: np.ndarray) -> None:
    pipeline, hosts = silent(some_work, 2)
    hosts[0].post(MicroBatch(0, 1, 0, rows))
    assert "rows for 3 positions" in lost(pipeline)
    assert hosts[1].sent == []


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pipeline, "perf_counter", lambda: now[0])
    return now


def test_a_question_is_overdue_whatever_the_devices_say(now: list[float], some_work: StageSpec) -> None:
    made, hosts = silent(some_work, 2)
    for host in hosts:
        host.post(StageLoaded(layers=1))
    now[0] += pipeline.ANSWER_SECONDS
    assert (made.waiting(), lost(made)) == (True, "")
    now[0] += 1.0
    assert (made.waiting(), lost(made)[:27]) == (True, "it has not answered in time")


def test_a_stage_owes_an_answer_while_it_has_rows_or_loads(some_work: StageSpec) -> None:
    pipeline, hosts = silent(some_work, 2)
    assert [pipeline.owes(host) for host in hosts] == [True, True]
    for host in hosts:
        host.post(StageLoaded(layers=1))
    assert [pipeline.owes(host) for host in hosts] == [True, False]
    hosts[0].post(MicroBatch(0, 1, 0, FORWARDED))
    assert [pipeline.owes(host) for host in hosts] == [False, True]


def test_a_crossing_is_timed_from_both_sides(now: list[float], some_work: StageSpec) -> None:
    made, hosts = silent(some_work, 2)
    now[0] += 3.0
    hosts[0].post(MicroBatch(0, 1, 0, FORWARDED, took=Took(2.0, 1.5)))
    assert made.records[0].crossing == (100.5, 102.5, 1.5)
    now[0] += 1.0
    hosts[1].post(StageAnswer(1, Verdict(0, IDS[:1]), took=Took(9.0, 0.5)))  # longer than it can have had them
    assert made.records[1].crossing == (103.0, 104.0, 0.5)
    made.measure()
    assert made.records[0].crossing is None
