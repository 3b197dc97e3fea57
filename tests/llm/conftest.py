"""The bundled pair with a small profile of its own, and a served verifier."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgellm.engine import Model
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import VerifierServer
from testkit.retokenized import PAIRS, Change, write
from tests.once import once

Retokenized = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def profiled(f32_pair: tuple[Path, Path], profile_path: Path) -> Iterator[LLM]:
    """The pair, with a profile."""
    with LLM.open(*f32_pair, profile=profile_path, threads=1) as opened:
        yield opened


@contextmanager
def verifying(path: Path, sessions: int = 1, trust: Trust | None = None) -> Iterator[VerifierServer]:
    """Serve a model on loopback."""
    with (
        Model.load(path) as model,
        VerifierServer(
            model, Address("127.0.0.1", 0), context=512, sessions=sessions, threads=1, trust=trust
        ) as running,
    ):
        yield running


@pytest.fixture(scope="session")
def server(f32_pair: tuple[Path, Path]) -> Iterator[VerifierServer]:
    with verifying(f32_pair[1], 3) as running:
        yield running


@pytest.fixture(scope="module")
def inside(server: VerifierServer) -> Iterator[LLM]:
    """The server's own replies, which share its worker with devices."""
    with LLM(server.model, verifier=server.inside(), threads=1, history=False) as opened:
        yield opened


@pytest.fixture
def address(server: VerifierServer) -> str:
    return str(server.address)


@pytest.fixture(scope="module")
def served(f32_pair: tuple[Path, Path], server: VerifierServer) -> Iterator[LLM]:
    """The draft model, with the verifier across a link."""
    with LLM.open(f32_pair[0], str(server.address), threads=1, history=False) as opened:
        yield opened


@pytest.fixture(scope="session")
def retokenized(tmp_path_factory: pytest.TempPathFactory, f32_pair: tuple[Path, Path]) -> Retokenized:
    """Returns draft and verifier of one of `PAIRS`."""

    def changed(name: str, source: Path, change: Change | None) -> Path:
        file = f"{name.replace(' ', '-')}-{source.name}"
        if change is None:
            return source
        return once(tmp_path_factory, file, lambda folder: write(source, folder / file, change)) / file

    def made(name: str) -> tuple[Path, Path]:
        draft, verifier = PAIRS[name]
        return changed(name, f32_pair[0], draft), changed(name, f32_pair[1], verifier)

    return made
