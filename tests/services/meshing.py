"""A mesh over workers."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from edgellm.mesh.coordinator import Mesh, MeshDevice
from edgellm.mesh.messages import StageAnswer, StageSpec
from edgellm.mesh.pipeline import Pipeline, StageHost
from edgellm.mesh.verifier import MeshVerifier
from edgellm.rpc.link import Endpoint
from edgellm.services.client.stage_client import RemoteDevice
from edgellm.services.server.servers import WorkerServer
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import GREEDY
from tests.engine.logits import some_ids
from tests.mesh.household import NOTHING, even
from tests.verifier.asking import judged

PROMPT = some_ids(40, 2000, 5)


def meshed(workers: Sequence[WorkerServer], work: StageSpec, told: Callable[[str], None] | None = None) -> MeshVerifier:
    members = [RemoteDevice(Endpoint(name, worker.address)) for name, worker in zip("abc", workers, strict=False)]
    mesh = Mesh(members, even(work, [member.name for member in members]), work, notify=told)
    return MeshVerifier(mesh, lambda _token: False, rows=16)


@contextmanager
def replying(
    members: Sequence[MeshDevice], work: StageSpec, told: Callable[[str], None] | None = None
) -> Iterator[tuple[Mesh, Session]]:
    """A reply from a mesh over these members, each with as many layers."""
    mesh = Mesh(members, even(work, [member.name for member in members]), work, notify=told)
    yield mesh, MeshVerifier(mesh, lambda _token: False, rows=16).open(GenerationState())
    mesh.close()


def asked(*stages: tuple[StageHost, StageSpec]) -> tuple[Pipeline, Future[StageAnswer]]:
    """A pipeline, and its answer to the prompt."""
    pipeline = Pipeline(stages)
    return pipeline, pipeline.ask(0, 0, PROMPT, judged(NOTHING, GREEDY, len(PROMPT)))
