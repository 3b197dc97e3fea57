"""Workers over real sockets, most of them in processes of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from bench.kill_worker import Worker, run
from edgellm.engine import Floats, Ids
from edgellm.errors import DeviceLost, EdgeError, MeshBroken, PlanImpossible
from edgellm.link import mesh_pb2 as pb
from edgellm.link.address import Address
from edgellm.link.channel import open_channel
from edgellm.link.loop import run_there
from edgellm.link.rights import Right
from edgellm.link.trust import Trust
from edgellm.mesh.cover import Share
from edgellm.mesh.holding import FolderLayers
from edgellm.mesh.pipeline import LocalSeat, Pipeline, Seat
from edgellm.mesh.records import Ask, Work
from edgellm.mesh.recovery import Mesh
from edgellm.mesh.shelf import Shelf
from edgellm.mesh.verifier import MeshVerifier
from edgellm.serve import onward
from edgellm.serve.mesh_service import WORK
from edgellm.serve.mesh_wire import write_work
from edgellm.serve.seat import Patience, Place, RemoteMember
from edgellm.serve.worker import WorkerServer
from edgellm.spec.records import GREEDY, Chunk
from tests.engine.logits import some_ids
from tests.mesh.conftest import verifier_cut, whole
from tests.mesh.household import NOTHING, Cut, Whole, even, logits_of, write
from tests.mesh.test_stages import SlowLayers
from tests.serve.conftest import ANYWHERE

__all__ = ["verifier_cut", "whole"]

PROMPT = some_ids(40, 2000, 5)


@pytest.fixture(scope="module")
def processes(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    workers = [Worker(f32_pair[1], tmp_path_factory.mktemp("worker")) for _ in range(4)]
    for worker in workers:
        worker.wait()
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture
def workers(verifier_cut: Cut) -> Iterator[list[WorkerServer]]:
    """Three in this process."""
    found = [WorkerServer(Shelf(verifier_cut.layers), ANYWHERE, threads=1) for _ in range(3)]
    for worker in found:
        worker.start()
    yield found
    for worker in found:
        worker.stop()


def opened(members: Sequence[RemoteMember], work: Work) -> Pipeline:
    shares = even(work, [member.name for member in members])
    return Pipeline(
        [(m.seat(), replace(work, first=s.first, last=s.last)) for m, s in zip(members, shares, strict=True)]
    )


def meshed(workers: Sequence[WorkerServer], work: Work, told: Callable[[str], None] | None = None) -> MeshVerifier:
    members = [RemoteMember(Place(name, worker.address)) for name, worker in zip("abc", workers, strict=False)]
    mesh = Mesh(members, even(work, [member.name for member in members]), work, tell=told)
    return MeshVerifier(mesh, lambda _token: False, rows=16)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_logits_through_processes_are_those_of_the_whole_model(
    processes: list[Worker], verifier_cut: Cut, whole: Whole, n: int
) -> None:
    pipeline = opened([worker.member(str(at)) for at, worker in enumerate(processes[:n])], verifier_cut.work)
    ids = some_ids(140, 2000)
    whole.context.clear()
    expected = whole.context.decode(ids[:40], outputs=8)
    worst = np.abs(logits_of(pipeline, 0, 0, ids[:40], 8, rows=16) - expected).max()
    for at in range(40, 140):
        row = whole.context.decode(ids[at : at + 1])
        worst = max(worst, np.abs(logits_of(pipeline, 0, at, ids[at : at + 1], 1) - row).max())
    pipeline.close()
    assert worst < 1e-4


def test_rows_of_sixteen_bits_give_nearly_the_same(processes: list[Worker], verifier_cut: Cut, whole: Whole) -> None:
    work = replace(verifier_cut.work, wide=False)
    pipeline = opened([worker.member(str(at)) for at, worker in enumerate(processes[:3])], work)
    whole.context.clear()
    expected = whole.context.decode(PROMPT, outputs=8)
    found = np.abs(logits_of(pipeline, 0, 0, PROMPT, 8) - expected).max()
    pipeline.close()
    assert 0.0 < found < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_replies_are_complete_and_the_same_when_workers_die_or_hang(f32_pair: tuple[Path, Path]) -> None:
    outcomes = run(*f32_pair, replies=5, seed=2)  # four kills and one hang
    assert [outcome.problems for outcome in outcomes] == [()] * 5
    assert sum(outcome.recovered > 0 for outcome in outcomes) >= 2


def test_the_stages_are_met_directly_and_rows_do_not_cross_the_coordinator(
    workers: list[WorkerServer], verifier_cut: Cut, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[object] = []
    happened = Pipeline._happened

    def watching(self: Pipeline, at: int, event: object) -> None:
        passed.append(type(event).__name__)
        happened(self, at, event)  # type: ignore[arg-type]

    monkeypatch.setattr(Pipeline, "_happened", watching)
    verifier = meshed(workers, verifier_cut.work)
    session = verifier.open(GREEDY)
    assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
    verifier.close()
    assert "Answer" in passed
    assert "Onward" not in passed


def test_where_the_next_stage_cannot_be_reached_the_coordinator_passes_on(
    workers: list[WorkerServer], verifier_cut: Cut, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(_line: onward.Line) -> bool:
        return False

    monkeypatch.setattr(onward.Line, "met", nobody)
    verifier = meshed(workers, verifier_cut.work)
    session = verifier.open(GREEDY)

    def ask(text: Ids) -> int:
        return int(session.submit(text, NOTHING).result().tokens[0])

    assert write(ask, PROMPT, 6) == whole.text(PROMPT, 6)
    verifier.close()


def test_this_process_may_be_a_stage_too(workers: list[WorkerServer], verifier_cut: Cut, whole: Whole) -> None:
    work = verifier_cut.work
    for places in ("here first", "here between", "here last"):
        seats: list[Seat] = [RemoteMember(Place(str(at), workers[at].address)).seat() for at in range(2)]
        at = ("here first", "here between", "here last").index(places)
        seats.insert(at, LocalSeat("here", Shelf(verifier_cut.layers), 1))
        shares = even(work, ["1", "2", "3"])
        stages = [(seat, replace(work, first=s.first, last=s.last)) for seat, s in zip(seats, shares, strict=True)]
        pipeline = Pipeline(stages)
        whole.context.clear()
        expected = whole.context.decode(PROMPT)
        assert np.abs(logits_of(pipeline, 0, 0, PROMPT, 1, rows=8) - expected).max() < 1e-4, places
        pipeline.close()


def test_a_worker_that_stops_is_replaced(workers: list[WorkerServer], verifier_cut: Cut, whole: Whole) -> None:
    told: list[str] = []
    verifier = meshed(workers, verifier_cut.work, told.append)
    session = verifier.open(GREEDY)
    own, text = whole.text(PROMPT, 12), PROMPT
    for at in range(12):
        if at == 4:
            workers[1].stop()
        token = session.submit(text, NOTHING).result().tokens
        assert int(token[0]) == own[at]
        text = np.append(text, token).astype(np.int32)
    assert [share.name for share in verifier.mesh.shares] == ["a", "c"]
    assert "b: nobody answers, or no longer" in told[0]
    verifier.close()


def test_what_a_worker_lacks_is_said(verifier_cut: Cut, tmp_path: Path) -> None:
    few = FolderLayers(tmp_path)
    few.cut(verifier_cut.path, range(4))
    with WorkerServer(Shelf(few), ANYWHERE, threads=1) as worker:
        member = RemoteMember(Place("a", worker.address))
        assert member.able(verifier_cut.work.model).holds == frozenset(range(4))
        assert member.able("0" * 64).holds == frozenset()
        mesh = Mesh([member], [Share("a", 0, 11)], verifier_cut.work)
        session = MeshVerifier(mesh, lambda _token: False).open(GREEDY)
        with pytest.raises(MeshBroken, match=r"Layers 5-12 of .* are on no device that is left"):
            session.submit(PROMPT, NOTHING).result()
        mesh.close()


def test_memory_that_is_short_is_said(verifier_cut: Cut) -> None:
    with WorkerServer(Shelf(verifier_cut.layers, memory=2_000_000), ANYWHERE, threads=1) as worker:
        mesh = Mesh([RemoteMember(Place("a", worker.address))], [Share("a", 0, 11)], verifier_cut.work)
        session = MeshVerifier(mesh, lambda _token: False).open(GREEDY)
        with pytest.raises(MeshBroken):
            session.submit(PROMPT, NOTHING).result()
        mesh.close()


def test_an_idle_stage_gives_its_memory_back_and_comes_back_when_asked(verifier_cut: Cut, whole: Whole) -> None:
    with WorkerServer(Shelf(verifier_cut.layers, keep=0.3), ANYWHERE, threads=1) as worker:
        told: list[str] = []
        mesh = Mesh(
            [RemoteMember(Place("a", worker.address))], [Share("a", 0, 11)], verifier_cut.work, tell=told.append
        )
        session = MeshVerifier(mesh, lambda _token: False).open(GREEDY)
        own = whole.text(PROMPT, 2)
        assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == own[:1]
        end = time.monotonic() + 30
        while worker.shelf.size and time.monotonic() < end:
            time.sleep(0.05)
        assert worker.shelf.size == 0
        text = np.append(PROMPT, own[:1]).astype(np.int32)
        assert session.submit(text, NOTHING).result().tokens.tolist() == own[1:]
        assert told == []
        mesh.close()


def test_a_stage_that_waits_for_a_slower_one_is_not_idle(verifier_cut: Cut) -> None:
    slow, work = SlowLayers(verifier_cut.layers, 11), verifier_cut.work
    with WorkerServer(Shelf(verifier_cut.layers, keep=0.4), ANYWHERE, threads=1) as worker:
        seats: list[Seat] = [RemoteMember(Place("a", worker.address)).seat(), LocalSeat("here", Shelf(slow), 1)]
        stages = [
            (seat, replace(work, first=share.first, last=share.last))
            for seat, share in zip(seats, even(work, ["a", "here"]), strict=True)
        ]
        pipeline = Pipeline(stages)
        future = pipeline.ask(0, 0, PROMPT, Ask(NOTHING, GREEDY, len(PROMPT)))
        with pytest.raises(TimeoutError):
            future.result(1.5)
        slow.go.set()
        assert future.result(30).verdict.accepted == 0
        assert pipeline.gone is None
        pipeline.close()


def test_weights_stay_warm_for_the_next_coordinator(workers: list[WorkerServer], verifier_cut: Cut) -> None:
    verifier = meshed(workers[:1], verifier_cut.work)
    verifier.open(GREEDY).submit(PROMPT, NOTHING).result()
    verifier.close()
    member = RemoteMember(Place("a", workers[0].address))
    assert member.able(verifier_cut.work.model).warm == frozenset(range(12))


class Dead:
    """A worker that takes calls and says nothing."""

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None

    def start(self) -> Address:
        async def listen() -> int:
            self._server = await asyncio.start_server(lambda _reader, _writer: asyncio.sleep(60), "127.0.0.1", 0)
            return int(self._server.sockets[0].getsockname()[1])

        return Address("127.0.0.1", run_there(listen()).result())

    def stop(self) -> None:
        async def close() -> None:
            if self._server is not None:
                self._server.close()

        run_there(close()).result()


def test_who_says_nothing_is_lost(workers: list[WorkerServer], verifier_cut: Cut, whole: Whole) -> None:
    dead = Dead()
    told: list[str] = []
    members = [
        RemoteMember(Place("dead", dead.start()), Patience(beat=0.02, silent_beats=5)),
        RemoteMember(Place("a", workers[0].address)),
    ]
    mesh = Mesh(members, even(verifier_cut.work, ["dead", "a"]), verifier_cut.work, tell=told.append)
    session = MeshVerifier(mesh, lambda _token: False).open(GREEDY)
    assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
    assert "dead: it gives no sign of life" in told[0]
    mesh.close()
    dead.stop()


def frames(address: Address, *orders: pb.Order | bytes) -> str:
    """What a worker ends a stage with that begins with these orders."""

    async def talk() -> str:
        channel = open_channel(address)
        try:
            call = channel.stream_stream(WORK, bytes, bytes)()  # type: ignore[call-arg]
            with suppress(grpc.aio.AioRpcError):
                for order in orders:
                    await call.write(order if isinstance(order, bytes) else order.SerializeToString())
                await call.done_writing()
                async with asyncio.timeout(30):
                    while isinstance(await call.read(), bytes):
                        pass
            return f"{(await call.code()).name}: {await call.details()}"
        finally:
            await channel.close(None)

    return run_there(talk()).result()


def test_what_breaks_the_contract_is_refused(workers: list[WorkerServer], verifier_cut: Cut) -> None:
    address, good = workers[0].address, write_work(verifier_cut.work, bytes(16))

    def changed(**fields: object) -> pb.Order:
        prepare = pb.Prepare.FromString(good.SerializeToString())
        for name, value in fields.items():
            setattr(prepare, name, value)
        return pb.Order(prepare=prepare)

    cases: list[tuple[pb.Order | bytes, str]] = [
        (b"\xff\xff", "not what the contract describes"),
        (pb.Order(tell=pb.Tell()), "something else than Prepare"),
        (changed(protocol=9), "version 9 of the mesh"),
        (changed(version="0.0.1"), "llama-cpp-python 0.0.1"),
        (changed(model=b"x"), "without a model"),
        (changed(last=12), "Layers 0 to 12 of 12"),
        (changed(n_vocab=0), "measures cannot be meant"),
        (changed(sessions=1000), "1000 sessions"),
        (changed(sessions=64, context=2**20), "64 sessions of 1048576 positions"),
        (changed(model=bytes(32)), "are not on this device"),
    ]
    for order, says in cases:
        assert says in frames(address, order), says
    assert "prepared twice" in frames(address, changed(), changed())
    assert frames(address, changed()).startswith("OK")


@pytest.fixture
def paired_worker(host: Trust, guest: Trust, verifier_cut: Cut) -> Iterator[WorkerServer]:
    with WorkerServer(Shelf(verifier_cut.layers), ANYWHERE, threads=1, trust=host) as worker:
        yield worker


def test_over_a_link_only_who_may_compute_is_answered(
    host: Trust, guest: Trust, paired_worker: WorkerServer, verifier_cut: Cut, whole: Whole
) -> None:
    member = RemoteMember(Place("host", paired_worker.address, guest))
    host.peers.grant(guest.identity.id, [Right.COMPUTE])
    mesh = Mesh([member], [Share("host", 0, 11)], verifier_cut.work)
    session = MeshVerifier(mesh, lambda _token: False).open(GREEDY)
    assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
    host.peers.revoke(guest.identity.id, [Right.COMPUTE])
    end = time.monotonic() + 30
    with suppress(MeshBroken):  # also in the middle of a reply
        while time.monotonic() < end:
            session.submit(PROMPT, NOTHING).result()
            time.sleep(0.05)
    assert time.monotonic() < end
    with pytest.raises(DeviceLost, match="no right to compute"):
        member.able(verifier_cut.work.model)
    mesh.close()
    with pytest.raises(EdgeError):  # nobody who shows no certificate
        RemoteMember(Place("host", paired_worker.address)).able(verifier_cut.work.model)


def test_a_plan_that_names_nobody(verifier_cut: Cut) -> None:
    with pytest.raises(PlanImpossible, match="Nobody is called"):
        Mesh([], [Share("a", 0, 11)], verifier_cut.work)


def test_drafts_cross_the_mesh_in_blocks(workers: list[WorkerServer], verifier_cut: Cut, whole: Whole) -> None:
    verifier = meshed(workers, verifier_cut.work)
    session = verifier.open(GREEDY)
    own = whole.text(PROMPT, 9)
    verdict = session.submit(PROMPT, Chunk(np.array(own[:8], np.int32))).result()
    assert (verdict.accepted, verdict.tokens.tolist()) == (8, own[8:])
    verifier.close()


def test_rows_beyond_sixteen_bits_travel_wide(verifier_cut: Cut) -> None:
    from edgellm.mesh.records import Parcel
    from edgellm.serve.mesh_wire import read_parcel, write_parcel

    rows: Floats = np.zeros((2, 192), np.float32)
    work = replace(verifier_cut.work, first=4)
    for largest, wide in ((1e4, False), (1e5, True)):
        rows[1, 3] = largest
        message = write_parcel(Parcel(0, 1, 0, rows), wide=False)
        assert message.wide is wide
        np.testing.assert_array_equal(read_parcel(message, work).data, rows)
