"""The first words: a server proves which paired device it is, and what is in the way is told apart."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from edgellm.errors import NotPaired, PeerTooNew, PeerTooOld, ProtocolError, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel
from edgellm.rpc.protos import DEVICES_PROTOCOL
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust import handshake as greetings
from edgellm.rpc.trust.handshake import connect_authenticated, fetch_peer_info
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.trust import Right, Trust
from tests.rpc.doors import OFFER, answering, greeting, in_loop, serving, steal
from tests.rpc.strangers import Gullible, befriend, certified, device, known


@in_loop
async def test_a_paired_device_is_let_in_and_told_what_it_may(host: Trust, guest: Trust) -> None:
    async with serving(host) as address:
        assert await steal(open_channel(address, guest)) == b"the secret"
        welcomed = await fetch_peer_info(address, guest)
        assert welcomed.peer.id == host.identity.id
        assert (welcomed.rights, welcomed.offers) == (frozenset({Right.VERIFY}), (OFFER,))
        assert 0 < welcomed.seconds < 60
        assert abs(welcomed.clock_ahead) < 60
        there = guest.peers.get(host.identity.id)
        assert there is not None
        assert (there.addresses, there.granted) == ((address,), frozenset({Right.VERIFY}))


@in_loop
async def test_a_server_that_a_paired_authority_has_signed_cannot_prove_who_it_is(
    tmp_path: Path, authority: Identity
) -> None:
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


@in_loop
async def test_a_paired_device_cannot_pass_for_another_by_passing_the_question_on(
    host: Trust, guest: Trust, tmp_path: Path
) -> None:
    """A man in the middle who is paired with both: the answer he gets names him as the client."""
    middle = device(tmp_path / "middle")
    befriend(middle, guest)
    befriend(middle, host)
    async with serving(host) as address:

        async def passed_on(request: pb.WelcomeRequest, _context: Any) -> pb.WelcomeReply:
            async with open_channel(address, middle, host.identity.id) as channel:
                call = channel.unary_unary(
                    greetings._WELCOME, pb.WelcomeRequest.SerializeToString, pb.WelcomeReply.FromString
                )
                reply: pb.WelcomeReply = await call(request, timeout=60)
                return reply

        async with greeting(middle, passed_on) as between:
            with pytest.raises(NotPaired, match="cannot prove it"):
                await connect_authenticated(between, guest)
            with pytest.raises(NotPaired, match="do not trust each other"):
                await connect_authenticated(between, guest, host.identity.id)  # TLS is enough where one device is meant


@in_loop
async def test_a_recorded_welcome_is_worth_nothing(host: Trust, guest: Trust) -> None:
    old = pb.WelcomeReply(protocol=DEVICES_PROTOCOL, device=host.identity.id.digest)
    old.signature = host.identity.sign(greetings._statement(b"n" * 32, host.identity.id, guest.identity.id))
    async with answering(host, lambda _reply: None, old) as address:
        with pytest.raises(NotPaired, match="cannot prove it"):
            await connect_authenticated(address, guest)


@in_loop
async def test_another_paired_device_than_the_one_meant_is_refused(host: Trust, guest: Trust, tmp_path: Path) -> None:
    """Also where TLS would take any paired device."""
    other = device(tmp_path / "other")
    befriend(other, guest)
    async with serving(other) as address:
        channel = open_channel(address, guest)  # to any
        with pytest.raises(NotPaired, match="not the expected one"):
            await greetings._call_welcome(channel, address, guest, host.identity.id, 5)
        await channel.close(None)


@pytest.mark.parametrize(("version", "error", "who"), [(0, PeerTooOld, "the other"), (99, PeerTooNew, "this")])
@in_loop
async def test_another_version_says_which_side_is_too_old(
    host: Trust, guest: Trust, version: int, error: type[ProtocolError], who: str
) -> None:
    async with answering(host, lambda reply: setattr(reply, "protocol", version)) as address:
        with pytest.raises(error, match=f"Update edgellm on {who} device"):
            await connect_authenticated(address, guest)


@in_loop
async def test_nobody_there_is_told_apart_from_nobody_trusted(guest: Trust) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        with pytest.raises(VerifierUnreachable, match="within"):
            await connect_authenticated(Address("127.0.0.1", port), guest, None, 0.3)
    with pytest.raises(VerifierUnreachable, match="nothing listens"):
        await connect_authenticated(Address("127.0.0.1", port), guest)
