"""A verifier on an f32 copy of the bundled one, and workers, served in this process."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model, Vocabulary, check_gguf
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.link import Timing
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer, WorkerServer
from edgellm.spec.types import Ids
from edgellm.verifier.in_process import LocalVerifier
from tests.decodes import greedy
from tests.mesh.conftest import verifier_cut, whole
from tests.mesh.household import Cut
from tests.rpc.conftest import guest, host
from tests.waiting import until

__all__ = ["guest", "host", "verifier_cut", "whole"]

ANYWHERE = Address("127.0.0.1", 0)
POSITIONS = 512
PATIENT = Timing(least=600.0, silent_beats=2400)  # what a busy machine delays is not lost

Alone = Callable[[Ids, int], list[int]]


@pytest.fixture(scope="session")
def exact(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The bundled verifier in f32, which never ends its turn here: how much it says is not what these tests are about.

    A logit of zero is not the highest of 2,560, so the head's row for the end of a turn is zeroed.
    """
    path = tmp_path_factory.mktemp("endless") / "verifier-f32.gguf"
    copyfile(f32_pair[1], path)
    with Model.load(path) as ending:
        ends = [token for token in range(ending.n_vocab) if ending.is_eog(token)]
    head = next(tensor for tensor in check_gguf(path).tensors if tensor.name == "output.weight")
    rows = np.memmap(path, np.float32, "r+", head.offset, head.shape[::-1])
    rows[ends] = 0.0
    rows.flush()
    with Model.load(path) as model:
        yield model


@pytest.fixture
def vocabulary(exact: Model) -> Vocabulary:
    return exact.vocabulary


@pytest.fixture
def events() -> list[str]:
    """What a server of the test has told."""
    return []


def wait_for(words: str, events: list[str]) -> None:
    """Wait for an event with these words."""
    until(lambda: any(words in event for event in events))


@pytest.fixture(scope="session")
def alone(exact: Model) -> Iterator[Alone]:
    """The verifier's own greedy text: `alone(prompt, n)` are the next `n` tokens."""
    with Context(exact, ContextSpec(n_ctx=POSITIONS, threads=1)) as context:
        yield partial(greedy, context)


@pytest.fixture(scope="module")
def server(exact: Model) -> Iterator[VerifierServer]:
    with VerifierServer(exact, ANYWHERE, sessions=3, context=POSITIONS, threads=1) as running:
        yield running


@pytest.fixture
def remote(server: VerifierServer) -> Iterator[RemoteVerifier]:
    verifier = RemoteVerifier(server.address, server.model.vocabulary, timing=PATIENT)
    yield verifier
    verifier.close()


@pytest.fixture
def local(exact: Model) -> Iterator[LocalVerifier]:
    verifier = LocalVerifier(exact, ContextSpec(n_ctx=POSITIONS, threads=1))
    yield verifier
    verifier.close()


@pytest.fixture(scope="session")
def prompt(exact: Model) -> Ids:
    return exact.tokenize("The red mug is on the cache in the kitchen. Where is the mug?")


@pytest.fixture
def workers(verifier_cut: Cut) -> Iterator[list[WorkerServer]]:
    """Three workers with all layers."""
    found = [WorkerServer(WeightCache(verifier_cut.layers), ANYWHERE) for _ in range(3)]
    for worker in found:
        worker.start()
    yield found
    for worker in found:
        worker.stop()
