"""Conformance servers over the bundled verifier, in f32, and gateways to them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgellm.engine import Model
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.rpc.link import Endpoint, Timing
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.gateway_server import GatewayServer
from edgellm.spec.protocols import Elsewhere
from edgellm.spec.types import Notice, Source, Token
from edgellm.upstream.rows import Tier
from edgellm.upstream.verifier import UpstreamOptions
from testkit.upstream.dialects import Dialect, LlamaServer, Sglang, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer
from testkit.upstream.text_dialects import LlamaCppPython, LmStudio, MlxLm, Ollama, Tabby
from tests.spec.real import case, ids
from tests.waiting import until

NUMBERS = (2, 5)
MOST = 16
ANYWHERE = Address("127.0.0.1", 0)
UNVERIFIED = {Source.DRAFT, Source.PARALLEL}
PATIENT = UpstreamOptions(least=600.0)  # what a busy machine delays is not lost
DEVICE = Timing(least=600.0, silent_beats=2400)

Make: TypeAlias = Callable[[Engine], Dialect]
OpenPair: TypeAlias = Callable[..., tuple[LLM, UpstreamServer]]
SCORING: Make = partial(Vllm, scores=True, counts=True)
WAYS: dict[str, tuple[Make, Tier | None]] = {
    "vllm-score": (SCORING, None),
    "vllm-fan-out": (Vllm, None),
    "vllm-continue": (Vllm, Tier.CONTINUE),
    "llama-server": (LlamaServer, None),
    "llama-server-quiet": (partial(LlamaServer, quiet=True), None),
    "sglang-score": (Sglang, None),
    "sglang-fan-out": (Sglang, Tier.FAN_OUT),
    "ollama": (Ollama, None),
    "lm-studio": (LmStudio, None),
    "tabby": (Tabby, None),
    "mlx-lm": (MlxLm, None),
    "llama-cpp-python": (LlamaCppPython, None),
}


@pytest.fixture(scope="session")
def served(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[1]) as model:
        yield model


@pytest.fixture(scope="session")
def engine(served: Model) -> Iterator[Engine]:
    engine = Engine(served)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def wanted(f32_pair: tuple[Path, Path]) -> dict[int, list[int]]:
    """What the verifier writes alone."""
    with LLM.open("none", f32_pair[1], threads=1) as alone:
        return {number: ids(alone.reply(case(number), max_tokens=MOST)) for number in NUMBERS}


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair_opener(closing: ExitStack, engine: Engine, draft: Path) -> OpenPair:
    def opened(make: Make, tier: Tier | None = None, timing: UpstreamOptions = PATIENT) -> tuple[LLM, UpstreamServer]:
        server = closing.enter_context(UpstreamServer(make(engine)))
        pair = LLM.open(draft, server.url, threads=1, upstream=replace(timing, tier=tier))
        return closing.enter_context(pair), server

    return opened


@pytest.fixture
def open_pair(closing: ExitStack, engine: Engine, f32_pair: tuple[Path, Path]) -> OpenPair:
    """Return what opens a pair with a server of a dialect as its verifier."""
    return pair_opener(closing, engine, f32_pair[0])


def written(pair: LLM, number: int = 5, **more: Any) -> tuple[list[Token], list[Notice]]:
    """Return the tokens of a reply that is to be verified throughout, and its notices."""
    notices: list[Notice] = []
    reply = pair.reply(case(number), max_tokens=MOST, budget=1.0, **more)
    reply.listen(on_notice=notices.append)
    return list(reply), notices


@dataclass(frozen=True, slots=True)
class House:
    """Stock servers, a gateway to them, and devices that draft for it, by the model that they name."""

    servers: tuple[UpstreamServer, ...]
    gateway: GatewayServer
    devices: dict[str, LLM]

    def fail(self, fault: Fault | None) -> None:
        """Have every server fail like that."""
        for server in self.servers:
            server.fault = fault

    def mend(self) -> None:
        """End all faults, and wait until every server is used again."""
        for server in self.servers:
            server.heal()
        until(lambda: all(one.verifier.up() for backend in self.gateway.models for one in backend.servers))


def drafting(closing: ExitStack, draft: Model, gateway: GatewayServer, name: str = "") -> LLM:
    """Return a device that drafts for the model of that name behind a gateway."""
    remote = RemoteVerifier(Endpoint("", gateway.address, model=name), draft.vocabulary, timing=DEVICE)
    closing.callback(remote.close)
    remote.elsewhere, remote.extra = Elsewhere(lambda: remote.info.model_hash), 0  # many rounds
    return LLM(draft, draft, remote, history=False)
