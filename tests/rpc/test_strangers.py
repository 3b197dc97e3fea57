"""Who gets in by mutual TLS and who does not. Real servers and connections; each test names the guard it is about."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from edgellm import errors
from edgellm.errors import NotPaired, NotPermitted, PairingRequired, PeerTooNew, PeerTooOld, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import bind, new_server, open_channel
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust import handshake
from edgellm.rpc.trust.handshake import connect_authenticated, fetch_peer_info
from edgellm.rpc.trust.identity import SERVER_NAME, Identity
from edgellm.rpc.trust.trust import Right, Trust
from tests.rpc.doors import (
    OFFER,
    SECRET,
    Said,
    answering,
    ask_for,
    code_of,
    greeting,
    impostor,
    open_stream,
    serving,
    steal,
)
from tests.rpc.strangers import Gullible, befriend, certified, device, known
from tests.watching import calls_of


async def test_without_tls_nobody_gets_a_word(host: Trust, guest: Trust) -> None:
    async with serving(host) as address:
        assert await code_of(open_channel(address)) is grpc.StatusCode.UNAVAILABLE


async def test_no_certificate_is_refused_in_the_handshake_and_behind_it(
    host: Trust, guest: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter as if TLS had been told to let in whoever comes."""
    said: Said = []

    async def code(address: Address) -> grpc.StatusCode:
        nobody = grpc.ssl_channel_credentials(host.identity.certificate.pem)
        options = [("grpc.ssl_target_name_override", SERVER_NAME)]
        return await code_of(grpc.aio.secure_channel(str(address), nobody, options=options))

    async with serving(host) as address:
        assert await code(address) is grpc.StatusCode.UNAVAILABLE
    genuine = grpc.dynamic_ssl_server_credentials
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda first, fetch, _must: genuine(first, fetch, False)
    )
    async with serving(host, said) as address:
        assert await code(address) is grpc.StatusCode.PERMISSION_DENIED
        assert "no certificate" in said[0]


async def test_a_wrong_certificate_is_refused_in_the_handshake_and_behind_it(
    host: Trust, guest: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latter as if TLS still trusted a device that the list does not hold."""
    stranger = impostor(guest, tmp_path / "stranger", Identity.new())
    async with serving(host) as address:
        assert await code_of(open_channel(address, stranger)) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(NotPaired, match="do not trust each other"):
            await connect_authenticated(address, stranger)
    genuine = Trust._roots
    monkeypatch.setattr(Trust, "_roots", lambda self: genuine(self) + stranger.identity.certificate.pem)
    async with serving(host) as address:
        assert await code_of(open_channel(address, stranger)) is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(NotPermitted, match="is not paired"):
            await connect_authenticated(address, stranger)


async def test_what_a_guest_has_signed_is_refused_in_the_handshake(host: Trust, guest: Trust, tmp_path: Path) -> None:
    signed = impostor(guest, tmp_path / "signed", certified(issuer=guest.identity))
    async with serving(host) as address:
        assert await code_of(open_channel(address, signed)) is grpc.StatusCode.UNAVAILABLE


async def test_what_an_authority_has_signed_is_refused_by_its_fingerprint(tmp_path: Path, authority: Identity) -> None:
    """TLS lets it in: this is what the look behind the handshake is for."""
    trusted = device(tmp_path / "authority", authority)
    host = device(tmp_path / "host")
    host = Trust(host.identity, Gullible(tmp_path / "host", known(trusted, "authority")))
    befriend(device(tmp_path / "host", host.identity), trusted)

    # the list on disk refuses to be read with such a certificate in it
    (tmp_path / "host" / "peers.json").unlink()
    async with serving(host) as address:
        assert await steal(open_channel(address, trusted)) == b"the secret"
        signed = impostor(trusted, tmp_path / "signed", certified(issuer=authority))
        assert await code_of(open_channel(address, signed)) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_revoked_device_is_refused_at_once(host: Trust, guest: Trust) -> None:
    async with serving(host) as address:
        channel, _ = await connect_authenticated(address, guest)
        assert await ask_for(channel, SECRET) == b"the secret"
        host.peers.remove(guest.identity.id)
        assert await code_of(channel) is grpc.StatusCode.PERMISSION_DENIED  # on the open connection
        assert await code_of(open_channel(address, guest)) is grpc.StatusCode.UNAVAILABLE  # on a new one
        with pytest.raises(NotPaired):
            await connect_authenticated(address, guest)


async def test_a_damaged_list_ends_streams_that_are_open(host: Trust, guest: Trust) -> None:
    """Revocation does the same (`tests/services/test_paired.py`)."""
    said: Said = []
    async with serving(host, said) as address:
        channel, _ = await connect_authenticated(address, guest)
        call = open_stream(channel)
        assert await call.read() == b"hello"
        host.peers.path.write_text("nonsense")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert len(said) == 1
        await channel.close(None)


async def test_a_refused_caller_learns_why_though_it_is_still_writing(host: Trust, tmp_path: Path) -> None:
    """gRPC hides the reason from a caller whose request cannot be sent, as the guard then has ended the call."""
    guest = device(tmp_path / "guest")
    befriend(host, guest, "files")

    async def refused(channel: grpc.aio.Channel) -> str | None:
        call = open_stream(channel)
        try:
            for _ in range(3):
                await call.write(bytes(2**20))
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error.details()
        return None

    async with serving(host) as address, open_channel(address, guest) as channel:
        for why in await asyncio.gather(*[refused(channel) for _ in range(8)]):
            assert "no right to verify" in str(why)


async def test_a_copied_identity_is_found_out_and_explained_on_both_sides(
    host: Trust, guest: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = impostor(guest, tmp_path / "copy", host.identity)
    said: Said = []
    async with serving(host, said) as address:
        assert await code_of(open_channel(address, copy)) is grpc.StatusCode.PERMISSION_DENIED
        assert "itself" in said[0]  # it calls from this machine
        monkeypatch.setattr(handshake, "own_hosts", lambda: frozenset({"10.9.9.9"}))
        with pytest.raises(NotPermitted, match="files were copied"):
            await connect_authenticated(address, copy)
    async with answering(copy, lambda _reply: None) as address:
        guest.peers.remove(host.identity.id)
        host.peers.grant(guest.identity.id, [Right.VERIFY])
        with pytest.raises(errors.IdentityClash, match="files were copied"):
            await connect_authenticated(address, host)


async def test_whoever_has_no_paired_device_neither_listens_nor_asks(tmp_path: Path) -> None:
    lonely = device(tmp_path)
    with pytest.raises(PairingRequired, match="edgellm pair"):
        bind(new_server(), Address("127.0.0.1", 0), lonely)
    with pytest.raises(PairingRequired, match="edgellm pair"):
        open_channel(Address("127.0.0.1", 1), lonely)


async def test_the_list_is_replaced_when_it_has_changed_and_after_a_pause(
    host: Trust, guest: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC frees what it replaces, perhaps under a connection that is about to use it: then the process ends."""
    made, pauses = calls_of(monkeypatch, grpc, "ssl_server_certificate_configuration"), list[float]()
    monkeypatch.setattr("edgellm.rpc.trust.trust.sleep", pauses.append)

    async def enter(address: Address, trust: Trust) -> None:
        assert await steal(open_channel(address, trust))

    async with serving(host) as address:
        for _ in range(3):
            await enter(address, guest)
        assert (len(made), pauses) == (1, [])
        other = device(tmp_path / "other")
        befriend(host, other)
        for _ in range(3):
            await enter(address, other)
            await enter(address, guest)
        assert (len(made), len(pauses)) == (2, 1)
        assert other.identity.certificate.pem in made[1][1]


# --- the first words --------------------------------------------------------------------------------------------------


async def test_a_paired_device_is_let_in_and_told_what_it_may(host: Trust, guest: Trust) -> None:
    async with serving(host) as address:
        assert await steal(open_channel(address, guest)) == b"the secret"
        welcomed = await fetch_peer_info(address, guest)
        assert welcomed.peer.id == host.identity.id
        assert (welcomed.rights, welcomed.offers) == (frozenset({Right.VERIFY}), (OFFER,))
        assert 0 < welcomed.seconds < 60
        there = guest.peers.get(host.identity.id)
        assert there is not None
        assert (there.addresses, there.granted) == ((address,), frozenset({Right.VERIFY}))


async def test_a_server_that_an_authority_signed_cannot_prove_who_it_is(tmp_path: Path, authority: Identity) -> None:
    """The same at the other end: TLS lets the client talk to it, and the welcome is what finds it out."""
    guest = device(tmp_path / "guest")
    trusted = known(device(tmp_path / "authority", authority), "authority")
    guest = Trust(guest.identity, Gullible(tmp_path / "guest", trusted))
    rogue = device(tmp_path / "rogue", certified(issuer=authority))
    befriend(device(tmp_path / "guest2", guest.identity), rogue)

    async with serving(rogue) as address:
        with pytest.raises(NotPaired, match="is not paired with this one"):
            await connect_authenticated(address, guest)
    # It names the ID of the one who has signed it; sign it can with its own key only.
    claim = pb.WelcomeReply(device=trusted.id.digest)
    async with answering(rogue, lambda reply: reply.MergeFrom(claim)) as address:
        with pytest.raises(NotPaired, match="cannot prove it"):
            await connect_authenticated(address, guest)


async def test_passing_the_question_on_makes_no_other_device(host: Trust, guest: Trust, tmp_path: Path) -> None:
    """A man in the middle who is paired with both: the answer he gets names him as the client."""
    middle = device(tmp_path / "middle")
    befriend(middle, guest)
    befriend(middle, host)
    async with serving(host) as address:

        async def passed_on(request: pb.WelcomeRequest, _context: Any) -> pb.WelcomeReply:
            async with open_channel(address, middle, host.identity.id) as channel:
                call = channel.unary_unary(
                    handshake._WELCOME, pb.WelcomeRequest.SerializeToString, pb.WelcomeReply.FromString
                )
                reply: pb.WelcomeReply = await call(request, timeout=60)
                return reply

        async with greeting(middle, passed_on) as between:
            with pytest.raises(NotPaired, match="cannot prove it"):
                await connect_authenticated(between, guest)
            with pytest.raises(NotPaired, match="do not trust each other"):
                await connect_authenticated(between, guest, host.identity.id)  # TLS is enough where one device is meant


async def test_a_nonce_of_another_length_is_not_signed(host: Trust, guest: Trust) -> None:
    request = pb.WelcomeRequest(protocol=PROTOCOL, nonce=b"abc").SerializeToString()
    async with serving(host) as address, open_channel(address, guest, host.identity.id) as channel:
        call: Any = channel.unary_unary
        with pytest.raises(grpc.aio.AioRpcError, match="nonce has 3 bytes"):
            await call(handshake._WELCOME)(request, timeout=60)


async def test_a_recorded_welcome_is_worth_nothing(host: Trust, guest: Trust) -> None:
    old = pb.WelcomeReply(protocol=PROTOCOL, device=host.identity.id.digest)
    old.signature = host.identity.sign(handshake._statement(b"n" * 32, host.identity.id, guest.identity.id))
    async with answering(host, lambda _reply: None, old) as address:
        with pytest.raises(NotPaired, match="cannot prove it"):
            await connect_authenticated(address, guest)


async def test_another_paired_device_than_the_one_meant_is_refused(host: Trust, guest: Trust, tmp_path: Path) -> None:
    """Also where TLS would take any paired device."""
    other = device(tmp_path / "other")
    befriend(other, guest)
    async with serving(other) as address:
        channel = open_channel(address, guest)  # to any
        with pytest.raises(NotPaired, match="not the expected one"):
            await handshake._call_welcome(channel, address, guest, host.identity.id, 5)
        await channel.close(None)


@pytest.mark.parametrize(("version", "error", "who"), [(0, PeerTooOld, "the other"), (99, PeerTooNew, "this")])
async def test_another_version_says_which_side_is_too_old(
    host: Trust, guest: Trust, version: int, error: type[errors.ProtocolError], who: str
) -> None:
    async with answering(host, lambda reply: setattr(reply, "protocol", version)) as address:
        with pytest.raises(error, match=f"Update edgellm on {who} device"):
            await connect_authenticated(address, guest)


async def test_nobody_there_is_told_apart_from_nobody_trusted(guest: Trust) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(VerifierUnreachable, match="within"):
            await connect_authenticated(Address("127.0.0.1", port), guest, None, 0.3)
    with pytest.raises(VerifierUnreachable, match="nothing listens"):
        await connect_authenticated(Address("127.0.0.1", port), guest)
