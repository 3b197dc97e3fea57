"""A mesh over workers."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from edgellm.layer_range import StageShare
from edgellm.mesh.coordinator import Mesh, MeshDevice
from edgellm.mesh.messages import StageAnswer, StageSpec
from edgellm.mesh.pipeline import Pipeline, StageHost
from edgellm.mesh.verifier import MeshVerifier
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import GREEDY
from tests.engine.logits import some_ids
from tests.mesh.household import NOTHING, even, home_of
from tests.verifier.asking import judged

PROMPT = some_ids(40, 2000, 5)


@contextmanager
def replying(
    members: Sequence[MeshDevice], work: StageSpec, told: Callable[[str], None] | None = None,
    shares: Sequence[StageShare] = (),
) -> Iterator[tuple[Mesh, Session]]:  # fmt: skip
    """A reply from a mesh over these members, each with as many layers if there are no `shares`."""
    mesh = Mesh(members, shares or even(work, [member.name for member in members]), work, home_of(work), told)
    yield mesh, MeshVerifier(mesh, lambda _token: False, rows=16).open(GenerationState())
    mesh.close()


def asked(*stages: tuple[StageHost, StageSpec]) -> tuple[Pipeline, Future[StageAnswer]]:
    """A pipeline, and its answer to the prompt."""
    pipeline = Pipeline(stages)
    return pipeline, pipeline.ask(0, 0, PROMPT, judged(NOTHING, GREEDY, len(PROMPT)))
