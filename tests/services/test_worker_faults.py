"""What a worker refuses, lacks, forgets or does not say; and one that lies: the reply is written by the others."""

import asyncio
import queue
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.cli.server_options import WorkerOptions
from edgellm.cli.serving import start_worker
from edgellm.engine import ModelFile, check_gguf
from edgellm.errors import DeviceLost, InvalidOption, MemoryShort
from edgellm.layer_range import LayerRange
from edgellm.mesh import pipeline as pipelines
from edgellm.mesh.coordinator import MeshDevice
from edgellm.mesh.messages import Event, Failed, MicroBatch, StageAnswer, StageLost, StageSpec
from edgellm.mesh.pipeline import LocalStageHost, Pipeline, StageHost
from edgellm.mesh.stage import InFlight, Stage
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel, run_in_network_loop
from edgellm.rpc.link import WORKER_TIMING, Endpoint, Timing
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.services.client.stage_client import RemoteDevice
from edgellm.services.mesh_codec import WORK, write_work
from edgellm.services.server import listener, mesh_service
from edgellm.services.server.servers import WorkerServer
from edgellm.storage.fingerprint import fingerprint
from tests.mesh.household import NOTHING, Cut, Device, Whole, even
from tests.mesh.test_stages import SlowLayers
from tests.rpc.doors import ended
from tests.services.conftest import ANYWHERE
from tests.services.meshing import PROMPT, asked, replying
from tests.waiting import until
from tests.watching import calls_of


def test_an_idle_stage_gives_its_memory_back_and_comes_back_when_asked(verifier_cut: Cut, whole: Whole) -> None:
    told: list[str] = []
    with (
        WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as worker,
        replying([RemoteDevice(Endpoint("a", worker.address))], verifier_cut.work, told.append) as (_, session),
    ):
        own, keep = whole.text(PROMPT, 2), worker.cache.keep
        assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == own[:1]
        worker.cache.keep = 0.0
        until(lambda: not worker.cache.size)
        worker.cache.keep = keep
        text = np.append(PROMPT, own[:1]).astype(np.int32)
        assert session.submit(text, NOTHING).result().tokens.tolist() == own[1:]
        assert told == []


def test_a_stage_that_waits_for_another_is_in_use(verifier_cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    now, touched = [0.0], calls_of(monkeypatch, Stage, "touch")
    monkeypatch.setattr("edgellm.mesh.stage.perf_counter", lambda: now[0])
    slow, work = SlowLayers(verifier_cut.layers, 11), verifier_cut.work
    with WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as worker:
        hosts: list[StageHost] = [
            RemoteDevice(Endpoint("a", worker.address)).stage_host(), LocalStageHost("here", WeightCache(slow)),
        ]  # fmt: skip
        shares = even(work, ["a", "here"])
        pipeline, future = asked(
            *((host, replace(work, layers=share.layers)) for host, share in zip(hosts, shares, strict=True))
        )
        until(lambda: touched)
        ((stage,), *_), now[0] = touched, 100.0
        until(lambda: stage.idle == 0.0)
        slow.go.set()
        assert future.result(120).verdict.accepted == 0
        pipeline.close()


def test_who_says_nothing_is_lost(workers: list[WorkerServer], verifier_cut: Cut, whole: Whole) -> None:
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as dead:  # the system takes calls for it, and nobody answers
        members = [
            RemoteDevice(Endpoint("dead", Address(*dead.getsockname())), Timing(beat=0.02, silent_beats=5)),
            RemoteDevice(Endpoint("a", workers[0].address)),
        ]
        with replying(members, verifier_cut.work, told.append) as (_, session):
            assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
    assert "dead: it has stopped responding" in told[0]


def frames(address: Address, *orders: pb.Order | bytes) -> str:
    """What a worker ends a stage with that begins with these orders."""

    async def talk() -> str:
        async with open_channel(address) as channel:
            return await ended(channel, WORK, *orders)

    return run_in_network_loop(talk()).result()


def test_what_breaks_the_contract_is_refused(workers: list[WorkerServer], verifier_cut: Cut) -> None:
    address, good = workers[0].address, write_work(verifier_cut.work)

    def changed(**fields: object) -> pb.Order:
        prepare = pb.Prepare.FromString(good.SerializeToString())
        for name, value in fields.items():
            setattr(prepare, name, value)
        return pb.Order(prepare=prepare)

    cases: list[tuple[pb.Order | bytes, str]] = [
        (b"\xff\xff", "cannot be parsed"),
        (pb.Order(waiting=pb.Waiting()), "first order is not Prepare"),
        (changed(protocol=99), "protocol version 99"),
        (changed(version="0.0.1"), "llama-cpp-python 0.0.1"),
        (changed(model=b"x"), "has no model"),
        (changed(last=12), "layers 0 to 12 of 12"),
        (changed(n_vocab=0), "dimensions are invalid"),
        (changed(sessions=1000), "1000 sessions"),
        (changed(sessions=64, context=2**20), "64 sessions of 1048576 positions"),
        (changed(model=bytes(32)), "are not on this device"),
    ]
    for order, says in cases:
        assert says in frames(address, order), says
    assert "prepared twice" in frames(address, changed(), changed())
    assert frames(address, changed()).startswith("OK")


@pytest.mark.parametrize("side", ["edgellm.mesh.stage.Judgement", "edgellm.services.client.stage_client.read_event"])
def test_an_error_of_python_at_either_end_fails_the_request_with_its_text(
    verifier_cut: Cut, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(side, fail)
    with WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as worker:
        pipeline, future = asked((RemoteDevice(Endpoint("a", worker.address)).stage_host(), verifier_cut.work))
        with pytest.raises(DeviceLost, match=r"a was lost: .*: KeyError\('a bug'\)"):
            future.result(60)
        pipeline.close()


def test_nothing_is_sent_to_a_worker_that_may_still_refuse(verifier_cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent while it refuses would hide the reason."""

    async def refused(*_: object, **_undo: object) -> None:
        await asyncio.sleep(0.2)
        raise MemoryShort("There is no room.", "Make some.")

    monkeypatch.setattr(listener, "in_thread", refused)
    posted: queue.Queue[object] = queue.Queue()
    with WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as worker:
        host = RemoteDevice(Endpoint("a", worker.address)).stage_host()
        host.begin(verifier_cut.work, posted.put, Pipeline([]))
        for number in range(3):
            host.send(MicroBatch(0, number, 0, PROMPT))
        lost = posted.get(timeout=60)
        assert isinstance(lost, StageLost)
        assert "There is no room." in lost.error.what


def test_a_worker_served_without_a_limit_takes_no_more_than_the_memory_that_is_free(
    verifier_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may have layers computed says how long a session is, up to a million positions."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    monkeypatch.setattr("edgellm.mesh.weight_cache.free_memory", lambda: 100_000_000)
    worker = start_worker(ModelFile.open(verifier_path), WorkerOptions(port=0, keep=1.0))
    try:
        n_vocab = next(t.shape[-1] for t in check_gguf(verifier_path).tensors if t.name == "token_embd.weight")
        work = StageSpec(fingerprint(verifier_path), "v", LayerRange(0, 12), 12, 192, n_vocab, 2**20, 1)
        pipeline, future = asked((RemoteDevice(Endpoint("a", worker.address)).stage_host(), work))
        with pytest.raises(DeviceLost, match=r"of 1048576 tokens, and 100 MB are left"):
            future.result(30)
        pipeline.close()
    finally:
        worker.stop()
        worker.close()


# --- lies -------------------------------------------------------------------------------------------------------------


LIES: dict[str, Callable[[Event], list[Event]]] = {
    "rows of NaN": lambda event: [
        replace(event, data=np.full_like(event.data, np.nan, np.float32)) if isinstance(event, MicroBatch) else event
    ],
    "nothing": lambda _event: [],
    "failures": lambda event: [
        Failed(event.number, InvalidOption("It is broken.", "Mend it.")) if isinstance(event, MicroBatch) else event
    ],
    "a token out of range": lambda event: [
        replace(event, verdict=replace(event.verdict, tokens=np.array([10**6], np.int32)))
        if isinstance(event, StageAnswer)
        else event
    ],
    "answers twice": lambda event: [event, event],
}
"""What a stage says in the place of an event."""
STUCK = ("never loads", "works for ever")
SILENT = (*STUCK, "nothing")


class LyingStage(Stage):
    """A stage that may tell one of the lies above."""

    lie = ""

    def _remove(self, moving: InFlight, event: Event | None) -> None:
        if self.lie == "works for ever":
            while not self._closed:
                self._steps += 1
                time.sleep(0.1)
        if event is None or self.lie not in LIES:
            super()._remove(moving, event)
            return
        super()._remove(moving, None)
        for lying in LIES[self.lie](event):
            self._post(lying)

    def _load(self) -> None:
        while self.lie == "never loads" and not self._closed:
            self._share += 1e-6
            time.sleep(0.1)
        super()._load()


def lying(monkeypatch: pytest.MonkeyPatch, lie: str, first: int) -> None:
    """Have workers' stages lie that begin with the layer `first`."""

    def made(work: StageSpec, *words: Any) -> LyingStage:
        stage = LyingStage(work, *words)
        stage.lie = lie if work.layers.start == first else ""
        return stage

    monkeypatch.setattr(mesh_service, "Stage", made)


@pytest.mark.parametrize(
    ("lie", "last", "says"),
    [
        ("rows of NaN", False, "16 rows for 16 positions, or NaN"),
        ("nothing", False, "it has not answered in time"),
        ("works for ever", False, "it has not answered in time"),
        ("never loads", True, "it has not answered in time"),
        ("a token out of range", True, "violates the protocol"),
        ("failures", False, ""),  # not every lie is noticed
        ("answers twice", True, ""),
    ],
)
def test_the_others_take_over_from_one_that_lies(
    verifier_cut: Cut, whole: Whole, monkeypatch: pytest.MonkeyPatch, lie: str, last: bool, says: str
) -> None:
    monkeypatch.setattr(pipelines, "ANSWER_SECONDS", 0.6 if lie in SILENT else 60.0)
    lying(monkeypatch, lie, 6 if last else 0)
    told: list[str] = []
    with WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as worker:
        members: list[MeshDevice] = [
            RemoteDevice(Endpoint("liar", worker.address)), Device("here", verifier_cut.layers),
        ]  # fmt: skip
        with (
            replying(members[::-1] if last else members, verifier_cut.work, told.append) as (mesh, session),
            suppress(InvalidOption) if lie == "failures" else nullcontext(),  # a reason, and no wrong text
        ):
            assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
    if says:
        assert [share.name for share in mesh.shares] == ["here"]
        assert says in told[0]


def test_who_gives_nothing_back_is_found_among_several(
    workers: list[WorkerServer], verifier_cut: Cut, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, "nothing", 4)
    timing = replace(WORKER_TIMING, beat=0.1, stall=1.5)
    members = [RemoteDevice(Endpoint(name, one.address), timing) for name, one in zip("abc", workers, strict=True)]
    with replying(members, verifier_cut.work) as (mesh, session):
        assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
        assert "b" not in [share.name for share in mesh.shares]
