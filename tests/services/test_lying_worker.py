"""A worker that lies or falls silent: the reply is written by the others, and no rows of it are passed on."""

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import pytest

from edgellm.errors import InvalidOption
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh import pipeline
from edgellm.mesh.coordinator import Mesh, MeshDevice
from edgellm.mesh.messages import Event, Failed, MicroBatch, StageAnswer
from edgellm.mesh.stage import InFlight, Stage
from edgellm.mesh.verifier import MeshVerifier
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.link import WORKER_TIMING, Endpoint
from edgellm.rpc.protos.mesh_pb2 import StageSpan, StageTimes
from edgellm.services.client.stage_client import RemoteDevice
from edgellm.services.server import mesh_service
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Verdict
from tests.mesh.conftest import verifier_cut, whole
from tests.mesh.household import NOTHING, Cut, Device, Whole, even
from tests.services.conftest import ANYWHERE
from tests.services.meshing import PROMPT

__all__ = ["verifier_cut", "whole"]

FLOOD = 2000
Lie = Callable[[Event], list[Event]]


def _verdict(change: Callable[[Verdict], Verdict]) -> Lie:
    return lambda event: [replace(event, verdict=change(event.verdict))] if isinstance(event, StageAnswer) else [event]


def _number(event: Event) -> int:
    return event.number if isinstance(event, MicroBatch | StageAnswer) else 0


def _tokens(*ids: int) -> Lie:
    return _verdict(lambda verdict: replace(verdict, tokens=np.array(ids, np.int32)))


MIDDLE: dict[str, Lie] = {
    "rows of NaN": lambda event: [
        replace(event, data=np.full_like(event.data, np.nan, np.float32)) if isinstance(event, MicroBatch) else event
    ],
    "nothing": lambda _event: [],
    "failures": lambda event: [Failed(_number(event), InvalidOption("It is broken.", "Mend it."))],
    "endless figures": lambda event: [StageTimes(spans=[StageSpan(kind="got", what=1)] * FLOOD)] * 20 + [event],
}
LAST: dict[str, Lie] = {"a token out of range": _tokens(10**6), "answers twice": lambda event: [event, event]}


EITHER = ("never loads", "works for ever")


class LyingStage(Stage):
    """A stage with one of the lies above."""

    lie = ""

    def _remove(self, moving: InFlight, event: Event | None) -> None:
        if self.lie == "works for ever":
            while not self._closed:
                self._steps += 1
                time.sleep(0.1)
        if event is None or self.lie in EITHER:
            super()._remove(moving, event)
            return
        super()._remove(moving, None)
        for lying in (MIDDLE | LAST).get(self.lie, lambda event: [event])(event):
            self._post(lying)

    def _load(self) -> None:
        while self.lie == "never loads" and not self._closed:
            self._share += 1e-6
            time.sleep(0.1)
        super()._load()


SILENT = (*EITHER, "nothing", "endless figures")


@pytest.mark.parametrize(
    ("lie", "last", "says"),
    [
        ("rows of NaN", False, "16 rows for 16 positions, or NaN"),
        ("nothing", False, "it has not answered in time"),
        ("works for ever", False, "it has not answered in time"),
        ("never loads", True, "it has not answered in time"),
        ("a token out of range", True, "violates the protocol"),
        ("failures", False, ""),  # not every lie is noticed
        ("endless figures", False, ""),
        ("answers twice", True, ""),
    ],
)
def test_the_others_take_over_from_one_that_lies(
    verifier_cut: Cut, whole: Whole, monkeypatch: pytest.MonkeyPatch, lie: str, last: bool, says: str
) -> None:
    for limit in ("ANSWER_SECONDS", "LOAD_SECONDS"):
        monkeypatch.setattr(pipeline, limit, 0.6 if lie in SILENT else 60.0)
    monkeypatch.setattr(mesh_service, "Stage", type("Liar", (LyingStage,), {"lie": lie}))
    told: list[str] = []
    with WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as worker:
        members: list[MeshDevice] = [
            RemoteDevice(Endpoint("liar", worker.address)), Device("here", verifier_cut.layers),
        ]  # fmt: skip
        shares = even(verifier_cut.work, ("here", "liar") if last else ("liar", "here"))
        mesh = Mesh(members, shares, verifier_cut.work, notify=told.append)
        verifier = MeshVerifier(mesh, lambda _token: False, rows=16)
        session = verifier.open(GenerationState())
        with suppress(InvalidOption) if lie.startswith("failures") else nullcontext():  # a reason, and no wrong text
            assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
        verifier.close()
    if says:
        assert [share.name for share in mesh.shares] == ["here"]
        assert says in told[0]


def test_who_gives_nothing_back_is_found_among_several(
    verifier_cut: Cut, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as honest:
        monkeypatch.setattr(mesh_service, "Stage", _stage_of({6: "nothing"}))
        with WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) as liar:
            places = {"a": honest, "liar": liar, "c": honest}
            timing = replace(WORKER_TIMING, beat=0.1, stall=1.5)
            members = [RemoteDevice(Endpoint(name, worker.address), timing) for name, worker in places.items()]
            shares = [
                StageShare("a", LayerRange(0, 6)),
                StageShare("liar", LayerRange(6, 9)),
                StageShare("c", LayerRange(9, 12)),
            ]
            mesh = Mesh(members, shares, verifier_cut.work)
            verifier = MeshVerifier(mesh, lambda _token: False, rows=16)
            session = verifier.open(GenerationState())
            assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
            assert "liar" not in [share.name for share in mesh.shares]
            verifier.close()


def _stage_of(lies: dict[int, str]) -> object:
    """Stages that begin with these layers lie."""

    def made(work, *words, **more):  # type: ignore[no-untyped-def]
        stage = LyingStage(work, *words, **more)
        stage.lie = lies.get(work.layers.start, "the truth")
        return stage

    return made
