"""The real verifier for paired devices alone: replies over mutual TLS, and what becomes of them when trust ends."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from edgellm.engine import Model, Vocabulary
from edgellm.errors import EdgeError, NotPaired, NotPermitted, PairingRequired, VerifierLost, VerifierUnreachable
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO, SESSION, TOKENIZER, run_in_network_loop
from edgellm.rpc.discovery import interfaces
from edgellm.rpc.discovery.interfaces import NetworkCard
from edgellm.rpc.discovery.mdns import ServiceKind, announce
from edgellm.rpc.discovery.peer_probe import announced_addresses
from edgellm.rpc.layers import method
from edgellm.rpc.link import Endpoint, Timing
from edgellm.rpc.trust import handshake
from edgellm.rpc.trust.handshake import NothingListens, connect_authenticated
from edgellm.rpc.trust.trust import Right, Trust, trust_for
from edgellm.services.client import verifier_client, verifier_selection
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.client.verifier_selection import TokenizerFit, choose_verifier
from edgellm.services.mesh_codec import HOLDS, WORK
from edgellm.services.server.servers import VerifierServer, WorkerServer
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Ids
from edgellm.storage.layer_store import LayerStore
from tests.rpc.doors import ended
from tests.rpc.strangers import befriend, device
from tests.services.conftest import ANYWHERE, POSITIONS
from tests.services.test_verifier_client import different
from tests.waiting import until

SLOW = Timing(retry=600.0, retry_most=600.0)


@pytest.fixture
def server(exact: Model, host: Trust, guest: Trust, events: list[str]) -> Iterator[VerifierServer]:
    with VerifierServer(
        exact, ANYWHERE, sessions=2, context=POSITIONS, threads=1, trust=host, on_event=events.append
    ) as running:
        yield running


@pytest.fixture
def remote(server: VerifierServer, guest: Trust) -> Iterator[RemoteVerifier]:
    verifier = RemoteVerifier(Endpoint("", server.address, guest), server.model.vocabulary, timing=SLOW)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("end", "says", "then"),
    [
        (lambda host, guest: host.peers.remove(guest.identity.id), "refuses", NotPaired),
        (lambda host, guest: host.peers.revoke(guest.identity.id, [Right.VERIFY]), "refuses", NotPermitted),
        (lambda host, guest: guest.peers.remove(host.identity.id), None, PairingRequired),
    ],
    ids=["removed", "right taken away", "removed by the device"],
)
def test_when_trust_ends_a_reply_ends_in_the_middle(
    server: VerifierServer, remote: RemoteVerifier, host: Trust, guest: Trust, prompt: Ids, events: list[str],
    end: Callable[[Trust, Trust], object], says: str | None, then: type[EdgeError],
) -> None:  # fmt: skip
    session = remote.open(GenerationState())
    session.submit(prompt, Chunk()).result()
    end(host, guest)

    def go_on() -> None:
        while True:
            session.submit(prompt, Chunk(), extra=400).result()

    with pytest.raises(VerifierLost, match=says):
        go_on()
    assert not session.ready()
    assert any(event.startswith("Refused") for event in events) is bool(says)
    with pytest.raises(then):
        RemoteVerifier(Endpoint("", server.address, guest), server.model.vocabulary)


def test_a_verifier_that_has_moved_is_found_where_it_announces_itself(
    exact: Model, host: Trust, guest: Trust, prompt: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGELLM_INTERFACE", "127.0.0.1")
    looks: list[bool] = []
    looking = threading.Lock()

    def late(*asked: Any) -> list[Address]:
        looks.append(looking.acquire(blocking=False))
        found = announced_addresses(*asked)
        if looks[-1]:
            looking.release()
        return found if len(looks) > 2 else []

    monkeypatch.setattr(verifier_client, "announced_addresses", late)
    made = [VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1, trust=host) for _ in range(2)]
    with made[1] as moved:
        with made[0] as first:
            remote = RemoteVerifier(Endpoint("", first.address, guest), exact.vocabulary, timing=SLOW)
            session = remote.open(GenerationState())
            before = session.submit(prompt, Chunk()).result()
        for _ in range(100):  # replies in a hurry
            assert not remote.open(GenerationState()).ready()
            time.sleep(0.01)
        with announce(ServiceKind.DEVICE, host.identity.id.short, moved.address.port, ["127.0.0.1"]):
            until(session.ready)
        assert session.submit(prompt, Chunk()).result().tokens.tolist() == before.tokens.tolist()
        assert len(looks) < 10, "it is found as soon as it can be"
        assert all(looks), "one search at a time"
        remote.close()


def test_a_device_that_sleeps_is_woken_once_and_the_draft_model_begins(
    exact: Model, host: Trust, guest: Trust, prompt: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, here = (NetworkCard.parse(f"02:00:5e:10:00:0{one} 127.0.0.0/8") for one in (1, 2))
    monkeypatch.setattr(interfaces, "own_cards", lambda: {here: "127.0.0.1"})
    monkeypatch.setattr(handshake, "own_cards", lambda: [NetworkCard.parse("02:00:5e:10:00:01 10.0.0.0/24"), desk])
    with VerifierServer(exact, ANYWHERE, sessions=1, context=POSITIONS, threads=1, trust=host) as server:
        RemoteVerifier(Endpoint("", server.address, guest), exact.vocabulary).close()
    for wakes, error in ((False, VerifierUnreachable), (True, NothingListens), (True, VerifierUnreachable)):
        answer = guest.peers.wake(host.identity.id, wakes), error("No answer.", "Wait.")
        monkeypatch.setattr(verifier_selection, "probe_peers", lambda *_, answer=answer: [answer])
        asks = wakes and error is VerifierUnreachable  # else it must not be woken, or is on and serves nothing
        with nullcontext() if asks else pytest.raises(VerifierUnreachable):
            asleep = choose_verifier(guest, exact.vocabulary, hosts=[], wakes=TokenizerFit.SAME)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.255.255.255", 0))
        card.setblocking(False)
        monkeypatch.setattr(interfaces, "WAKE_PORT", card.getsockname()[1])
        remote = RemoteVerifier(asleep.where, exact.vocabulary, asleep=True)
        session = remote.open(GenerationState())
        assert (session.ready(), remote.info.model) == (False, exact.path.stem)
        with VerifierServer(exact, asleep.where.address, sessions=1, threads=1, trust=host):
            until(session.ready)
            assert len(session.submit(prompt, Chunk()).result().tokens)
        remote.close()
        assert card.recv(200) == b"\xff" * 6 + 16 * b"\x02\x00\x5e\x10\x00\x01"
        with pytest.raises(BlockingIOError):
            card.recv(200)


def chosen(guest: Trust, ours: Vocabulary, *named: str) -> str:
    return choose_verifier(guest, ours, named, hosts=[]).reason


def test_the_best_paired_verifier_is_chosen_and_it_is_said_why(
    exact: Model, server: VerifierServer, host: Trust, guest: Trust, tmp_path: Path, f32_pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ours = exact.vocabulary
    small = device(tmp_path / "small")
    befriend(small, guest)  # guest calls it "one", as the host
    with (
        Model.load(f32_pair[0]) as draft,
        VerifierServer(draft, ANYWHERE, sessions=1, context=64, threads=1, trust=small) as other,
    ):
        for trust, address in ((host, server.address), (small, other.address)):
            guest.peers.record_seen(trust.identity.id, address)
        guest.peers.rename(host.identity.id, "desk")
        guest.peers.rename(small.identity.id, "lounge")
        reason = chosen(guest, ours)
        assert reason.startswith(f"desk ({host.identity.id.short}) at {server.address} verifies: ")
        assert "Not taken: lounge: " in reason
        assert chosen(guest, ours, "lounge").startswith("lounge")
        assert chosen(guest, ours, str(other.address), "desk").startswith("desk")
        small.peers.revoke(guest.identity.id, [Right.VERIFY])
        assert "lounge has not granted this device the right to verify" in chosen(guest, ours)
    assert "lounge cannot be reached (No answer from" in chosen(guest, ours)
    gone = str(other.address)
    assert f"{gone} cannot be reached (No answer from" in chosen(guest, ours, gone, "desk")
    with pytest.raises(VerifierUnreachable, match="nothing listens at that port"):
        chosen(guest, ours, gone)
    assert ", with another tokenizer" in chosen(guest, different(ours))

    def unsent(*_: object, **__: object) -> None:
        raise VerifierUnreachable("No answer.", "Wait.")

    monkeypatch.setattr(verifier_selection, "open_tokenizer", unsent)
    with pytest.raises(VerifierUnreachable, match=r"desk serves .* which has a different tokenizer"):
        chosen(guest, different(ours))
    with pytest.raises(NotPaired, match="attic"):
        chosen(guest, ours, "attic")


def test_tls_is_used_wherever_it_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And on this machine where a paired device was met."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    here, met = Address("127.0.0.1", 50151), Address("127.0.0.1", 50152)
    assert trust_for(here) is None
    trust = trust_for(Address("10.0.0.2", 50151))
    assert trust is not None
    befriend(trust, device(tmp_path / "other"))
    trust.peers.record_seen(trust.peers.all()[0].id, met)
    assert trust_for(here) is None
    assert trust_for(met) is not None
    trust.peers.path.write_text("damaged")
    assert trust_for(met) is None


STREAM, UNARY = "stream_stream", "unary_unary"
WORKER = (
    (HOLDS, UNARY, Right.COMPUTE), (WORK, STREAM, Right.COMPUTE),
    *((method(name), UNARY, Right.FILES) for name in ("Held", "Reserve", "Put", "Clean")),
    (method("Measure"), UNARY, Right.COMPUTE), (method("Flow"), UNARY, Right.COMPUTE),
)  # fmt: skip
VERIFIER = ((HELLO, UNARY, Right.VERIFY), (TOKENIZER, UNARY, Right.VERIFY), (SESSION, STREAM, Right.VERIFY))
SUBSETS = [frozenset(some) for size in range(4) for some in combinations(Right, size)]
Calls = Sequence[tuple[str, str, Right]]
_TRIES = 5  # gRPC's client says INTERNAL of its own where a refusal arrives while it writes


async def status_of(channel: grpc.aio.Channel, path: str, kind: str) -> str:
    """Return the status of a call with invalid bytes."""
    if kind == STREAM:
        return (await ended(channel, path, b"\xff\xff\xff")).partition(" ")[0]
    call = channel.unary_unary(path, None, None)(b"")
    with suppress(grpc.aio.AioRpcError):  # its status is read below
        await call
    return str((await call.code()).name)


async def answer_of(channel: grpc.aio.Channel, path: str, kind: str) -> str:
    """Return "" if the guard refuses a call, or the status: any other passes it, also that the bytes are invalid."""
    for _ in range(_TRIES):
        if (code := await status_of(channel, path, kind)) != "INTERNAL":
            break
    return "" if code == "PERMISSION_DENIED" else code


def broken(server: Trust, client: Trust, address: Address, calls: Calls) -> tuple[int, list[str]]:
    """Try every call with every set of rights; return their number, and those whose answer is against the rule."""

    async def ask(some: frozenset[Right]) -> list[str]:
        async with (await connect_authenticated(address, client))[0] as channel:
            return [
                f"{path} with {', '.join(sorted(some)) or 'no right'}: {answer or 'refused'}"
                for path, kind, right in calls
                if bool(answer := await answer_of(channel, path, kind)) != (right in some)
            ]

    wrong = []
    for some in SUBSETS:
        server.peers.revoke(client.identity.id, Right)
        server.peers.grant(client.identity.id, some)
        wrong += run_in_network_loop(ask(some)).result(120)
    return len(SUBSETS) * len(calls), wrong


def test_a_worker_answers_a_call_with_its_right_alone(host: Trust, guest: Trust, tmp_path: Path) -> None:
    stored = StoredLayers(LayerStore(tmp_path / "store", 10**9))
    with WorkerServer(WeightCache(stored), ANYWHERE, trust=host, stored=stored) as worker:
        tried, wrong = broken(host, guest, worker.address, WORKER)
    assert (tried, wrong) == (len(SUBSETS) * len(WORKER), [])


def test_a_verifier_answers_with_the_right_to_verify_alone(host: Trust, guest: Trust, exact: Model) -> None:
    with VerifierServer(exact, ANYWHERE, sessions=1, context=64, threads=1, trust=host) as server:
        tried, wrong = broken(host, guest, server.address, VERIFIER)
    assert (tried, wrong) == (len(SUBSETS) * len(VERIFIER), [])
