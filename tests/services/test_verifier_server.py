"""A server's life: it starts, refuses what it may not do, and stops without losing what is in flight."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from edgellm import errors
from edgellm.engine import Model, ModelFile, memory_fit
from edgellm.engine.hardware import Hardware
from edgellm.engine.memory_fit import place_model
from edgellm.engine.model import LoadSpec
from edgellm.errors import EngineFailed, InvalidOption, MemoryShort, PortTaken, Stopped, VerifierLost
from edgellm.llm.cost_curves import estimated_curve
from edgellm.rpc.address import Address
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.listener import Listening
from edgellm.services.server.servers import VerifierServer, serve_verifier
from edgellm.services.verification_codec import write_open
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Ids
from testkit import free_port
from tests.conftest import Architectures, Heads
from tests.programs import run_python
from tests.services.conftest import ANYWHERE, PATIENT, POSITIONS, Alone, wait_for
from tests.services.test_verification_service import Device, verify
from tests.waiting import until

NEVER = replace(PATIENT, retry=60.0, retry_most=60.0)


FREE, SMALL = Listening(port=0), Hardware(threads=1, n_ctx=256)


@pytest.fixture
def own(exact: Model, events: list[str]) -> Iterator[VerifierServer]:
    """A server that the test may stop."""
    with VerifierServer(exact, ANYWHERE, sessions=2, context=POSITIONS, threads=1, on_event=events.append) as server:
        yield server


def until_it_computes(server: VerifierServer) -> None:
    until(lambda: server.counters.batches > 3)


def test_a_device_waits_for_a_verifier_that_is_measured_yet(exact: Model) -> None:
    said, go = list[str](), threading.Event()

    def measure(model: Model) -> CostCurve:
        assert go.wait(60)
        return estimated_curve(model)

    def on_wait(doing: str) -> None:
        said.append(doing)
        if doing.startswith("measuring"):
            go.set()

    where = Listening(port=free_port())
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve_verifier, exact.path, where, 1, hardware=SMALL, measure=measure)
        while True:
            with suppress(errors.VerifierUnreachable):  # it does not listen yet
                address = Address.of(where.host, where.port)
                remote = RemoteVerifier(address, exact.vocabulary, timing=NEVER, on_wait=on_wait)
                break
        assert said[-1] == f"measuring {remote.capabilities.name}"
        remote.close()
        serving.result().stop(0.0)
        serving.result().close()


def test_who_waits_for_a_verifier_may_leave(exact: Model) -> None:
    def leave(doing: str) -> None:
        assert doing == "loading a model"
        raise Stopped

    server = VerifierServer(None, ANYWHERE)
    server.prepare("loading a model")
    with server, pytest.raises(Stopped):
        RemoteVerifier(server.address, exact.vocabulary, timing=NEVER, on_wait=leave)


def test_stopping_finishes_what_is_in_flight_and_takes_nothing_new(
    own: VerifierServer, events: list[str], prompt: Ids, alone: Alone
) -> None:
    remote = RemoteVerifier(own.address, own.model.vocabulary, timing=NEVER)
    busy, idle, late = (remote.open(GenerationState()) for _ in range(3))
    idle.submit(prompt, Chunk()).result()
    pending = busy.submit(prompt, Chunk(), extra=150)
    until_it_computes(own)
    own.request_stop(grace=300)
    wait_for("accepts no new ones", events)
    with pytest.raises(VerifierLost):
        late.submit(prompt, Chunk()).result()
    assert pending.result().tokens.tolist() == alone(prompt, 151)
    assert own.wait(60)  # the idle session does not keep it
    assert events[-1] == "The verifier has stopped."
    for session in (busy, idle):
        with pytest.raises(VerifierLost):
            session.submit(prompt, Chunk()).result()
        assert not session.ready()
    remote.close()


def test_an_idle_session_is_told_that_the_verifier_goes(own: VerifierServer, prompt: Ids) -> None:
    with grpc.insecure_channel(str(own.address)) as channel:
        device = Device(channel)
        device.say(write_open(GREEDY, own.model.vocabulary.fingerprint), verify(prefix=tuple(prompt.tolist())))
        assert device.hear().WhichOneof("frame") == "verdict"
        own.request_stop(grace=300)
        assert device.hear().WhichOneof("frame") == "draining"
        device.finish()


@pytest.mark.parametrize("forced", [False, True])
def test_grace_is_a_deadline_and_a_second_wish_forces_the_end(
    own: VerifierServer, events: list[str], prompt: Ids, forced: bool
) -> None:
    remote = RemoteVerifier(own.address, own.model.vocabulary, timing=NEVER)
    pending = remote.open(GenerationState()).submit(prompt, Chunk(), extra=POSITIONS - len(prompt))
    until_it_computes(own)
    own.request_stop(grace=60 if forced else 0.02)
    wait_for("accepts no new ones", events)
    if forced:
        own.request_stop(grace=0)
    with pytest.raises(VerifierLost):
        pending.result()
    assert own.wait(120)
    remote.close()


def test_the_same_port_can_be_served_again_at_once(exact: Model, prompt: Ids) -> None:
    with VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1) as first:
        address = first.address
        remote = RemoteVerifier(address, exact.vocabulary, timing=replace(PATIENT, retry=0.02, retry_most=0.05))
        session = remote.open(GenerationState())
        before = session.submit(prompt, Chunk()).result()
    until(lambda: not session.ready())  # also while nothing is asked
    with VerifierServer(exact, address, sessions=1, context=POSITIONS, threads=1):
        until(session.ready)
        after = session.submit(np.concatenate((prompt, before.tokens)), Chunk()).result()
        assert after.bytes_up > before.bytes_up  # a new verifier needs all tokens, and has none of the old
    remote.close()


@pytest.mark.parametrize(("n_batch", "passes"), [(None, 0), (8, 12), (2, 49)])
def test_a_prompt_is_read_in_the_hardwares_batches(exact: Model, prompt: Ids, n_batch: int | None, passes: int) -> None:
    """Batches have room for a chunk, and for a row of each session, whatever the hardware's have."""
    long = np.resize(prompt, 100)
    with (
        Model.load(exact.path, LoadSpec(Hardware(n_batch=n_batch, threads=1))) as model,
        VerifierServer(model, ANYWHERE, sessions=4, context=POSITIONS) as server,
    ):
        remote = RemoteVerifier(server.address, model.vocabulary, timing=NEVER)
        remote.open(GenerationState()).submit(long, Chunk(prompt[:8])).result()
        assert server.counters.prefills == passes
        remote.close()


def test_a_taken_port_is_said_before_a_model_is_loaded(own: VerifierServer, tmp_path: Path) -> None:
    with pytest.raises(PortTaken):
        serve_verifier(tmp_path / "nothing.gguf", Listening(port=own.address.port))
    RemoteVerifier(own.address, own.model.vocabulary).close()  # the first one is still there
    with pytest.raises(errors.ModelNotFound):
        serve_verifier(tmp_path / "nothing.gguf", Listening(port=0))


@pytest.mark.parametrize("wrong", [{"sessions": 0}, {"context": 0}, {"context": 10**6}])
def test_sizes_that_cannot_be_meant(exact: Model, wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        VerifierServer(exact, ANYWHERE, **wrong)  # type: ignore[arg-type]


def test_a_failing_engine_costs_one_round(own: VerifierServer, prompt: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteVerifier(own.address, own.model.vocabulary, timing=replace(PATIENT, retry=0.01))
    session = remote.open(GenerationState())

    def broken(*_args: object, **_more: object) -> None:
        raise EngineFailed("It is broken.", "Mend it.")

    with monkeypatch.context() as patch:
        patch.setattr("edgellm.spec.verification.judge", broken)
        with pytest.raises(VerifierLost, match="It is broken"):
            session.submit(prompt, Chunk()).result()
    session.submit(prompt, Chunk()).result()
    remote.close()


def test_a_verifier_has_the_sessions_that_fit(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    path = architectures("qwen35")
    monkeypatch.setattr(memory_fit, "_PLENTY", 0.0)
    taken = Counter[str]()
    place_model(ModelFile.open(path), Hardware(n_ctx=256), taken, verifies=True, sessions=5)
    monkeypatch.setattr(memory_fit, "free_memory", lambda: taken["CPU"])
    server = serve_verifier(path, FREE, hardware=SMALL)
    try:
        assert server.sessions == 5
        assert "5 sessions at once, not 8: " in server.placement
    finally:
        server.stop()
        server.close()
    with pytest.raises(MemoryShort, match="fewer sessions, 5 fit"):
        serve_verifier(path, FREE, 6, hardware=SMALL)
    with pytest.raises(InvalidOption, match="was trained for 1024"):  # no matter how much fits
        serve_verifier(path, FREE, hardware=replace(SMALL, n_ctx=2_048))


def test_a_head_is_served_with_its_verifier(architectures: Architectures, heads: Heads) -> None:
    head = ModelFile.open(heads("llama", own=True))
    server = serve_verifier(architectures("llama"), FREE, 2, hardware=SMALL, eagle3=head)
    try:
        assert server.model.speculator is not None
        assert f"the EAGLE-3 head {head.path.name} drafts from its states" in server.placement
    finally:
        server.stop()
        server.close()
    with pytest.raises(errors.ModelUnsupported, match="does not fit the verifier"):
        serve_verifier(architectures("qwen2"), FREE, 2, hardware=SMALL, eagle3=head)


def test_a_device_that_never_closes_can_still_leave(own: VerifierServer) -> None:
    """No thread of ours keeps a program from ending, and none complains."""
    code = (
        "import sys, pathlib; from edgellm.engine import Model\n"
        "from edgellm.services.client.verifier_client import RemoteVerifier\n"
        "from edgellm.spec.types import *; from edgellm.spec.protocols import GenerationState\n"
        "model = Model.load(pathlib.Path(sys.argv[1]))\n"
        "session = RemoteVerifier(sys.argv[2], model.vocabulary).open(GenerationState())\n"
        "print(len(session.submit(model.tokenize('Hello.'), Chunk()).result().tokens))"
    )
    done = run_python(code, own.model.path, own.address)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)
