"""Attacks on pairing with the code, or a recorded exchange, but without another device's key."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric import ec

from bench.robustness.attack.harness import Attack, Found
from edgellm.errors import EdgeError, PairingFailed
from edgellm.rpc.address import Address
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.pairing import Code, Exchange, Introduction, PairingWindow, join
from edgellm.rpc.trust.peer_store import Peer, Peers
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import PAIRING_PROTOCOL
from testkit.hostile.pairing_relay import PAIR, Relay

CODE = Code(7, ("lamp", "otter"))
LOOPBACK = ["127.0.0.1"]
PATIENCE = 60.0  # seconds for events that must come at once
HONEST = Introduction("honest", frozenset({Right.VERIFY}), ())
GREEDY = Introduction("greedy", frozenset(Right), ())
ROUNDS = 8  # of every case


@dataclass(frozen=True, slots=True)
class Scene:
    """Devices with folders of their own: `desk` shows the code, `phone` types it, `tablet` is the victim."""

    desk: Trust
    phone: Trust
    tablet: Trust
    folder: Path

    def posing_as(self, victim: Trust) -> Trust:
        """Return a device that shows `victim`'s certificate and signs with a key of its own."""
        identity = Identity(Identity.new().key, victim.identity.certificate)
        return Trust(identity, Peers(self.folder / "thief"))

    def harmed(self, before: dict[str, list[Peer]]) -> str:
        """Return the devices whose list of paired devices changed; empty if none did."""
        return ", ".join(name for name, peers in self.lists().items() if peers != before[name])

    def lists(self) -> dict[str, list[Peer]]:
        """Return the paired devices of each honest device."""
        return {name: trust.peers.all() for name, trust in (("desk", self.desk), ("phone", self.phone))}


Case = Callable[[Scene], None]


@contextmanager
def window(trust: Trust, about: Introduction = HONEST) -> Iterator[tuple[PairingWindow, Address]]:
    """Yield the window of a device that shows the code, and its address."""
    with PairingWindow(trust, CODE, about) as opened:
        yield opened, opened.open(LOOPBACK, 0)[0]


def refused(what: str, work: Callable[[], object]) -> None:
    """Raise AssertionError where `work` succeeds; it should raise an error of ours."""
    try:
        work()
    except EdgeError:
        return
    raise AssertionError(f"{what} went through")


def both_refuse(opened: PairingWindow, at: Address, who: Trust, about: Introduction = HONEST) -> None:
    refused("the join", lambda: join(at, CODE, who, about))
    refused("the window", lambda: opened.wait(PATIENCE))


def key_not_owned_by_who_joins(scene: Scene) -> None:
    with window(scene.desk) as (opened, at):
        both_refuse(opened, at, scene.posing_as(scene.tablet))


def key_not_owned_by_who_shows_the_code(scene: Scene) -> None:
    with window(scene.posing_as(scene.tablet)) as (opened, at):
        both_refuse(opened, at, scene.phone)


def existing_entry_changed(scene: Scene) -> None:
    """Pair again as a victim that is already paired, with another name and all rights."""
    now = datetime.now(UTC).replace(microsecond=0)
    known = Peer("tablet", scene.tablet.identity.certificate, frozenset(), frozenset(), (), now, now)
    scene.desk.peers.add(known)
    with window(scene.desk, GREEDY) as (opened, at):
        both_refuse(opened, at, scene.posing_as(scene.tablet), GREEDY)
    if scene.desk.peers.all() != [known]:
        raise AssertionError("the entry of the victim changed")
    scene.desk.peers.remove(known.id)


def replay(scene: Scene) -> None:
    """Replay all frames of an honest device to the same code."""
    sent: list[bytes] = []

    def record(frame: pb.PairFrame, up: bool) -> None:
        if up:
            sent.append(frame.SerializeToString())

    with window(scene.desk) as (opened, at), Relay(at, record) as between:
        join(between, CODE, scene.phone, HONEST)
        opened.wait(PATIENCE)
    scene.desk.peers.remove(scene.phone.identity.id)
    scene.phone.peers.remove(scene.desk.identity.id)
    with window(scene.desk) as (opened, at):
        refused("the replay", lambda: lead(at, lambda _frame: sent.pop(0) if sent else None))
        refused("the window", lambda: opened.wait(PATIENCE))


def reflection(scene: Scene) -> None:
    """Send the window's own frames back to it, after a valid first one."""
    stranger = Identity.new()
    first = pb.PairHello(protocol=PAIRING_PROTOCOL, certificate=stranger.certificate.der)
    first.spake = Exchange("A", CODE, stranger).spake

    def echo(received: pb.PairFrame | None) -> bytes | None:
        if received is None:
            return pb.PairFrame(hello=first).SerializeToString()
        if received.WhichOneof("frame") == "hello":  # B only proves its key after a proof
            return pb.PairFrame(confirm=pb.PairConfirm(mac=received.hello.spake)).SerializeToString()
        return received.SerializeToString()

    with window(scene.desk) as (opened, at):
        refused("the reflection", lambda: lead(at, echo))
        refused("the window", lambda: opened.wait(PATIENCE))


def lead(at: Address, answer: Callable[[pb.PairFrame | None], bytes | None]) -> None:
    """Lead a pairing frame by frame: `answer` returns the next frame for the last one received, None at first.

    Raises:
        PairingFailed: the other side refuses.
    """
    received: list[pb.PairFrame | None] = [None]
    with grpc.insecure_channel(str(at), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stream: Any = channel.stream_stream

        def frames() -> Iterator[bytes]:
            for _ in range(3):
                frame = answer(received[-1])
                if frame is None:
                    return
                seen = len(received)
                yield frame
                while len(received) == seen and not call.done():
                    time.sleep(0.005)

        call = stream(PAIR)(frames(), timeout=PATIENCE)
        try:
            received.extend(map(pb.PairFrame.FromString, call))
        except grpc.RpcError as error:
            raise PairingFailed("The other side refuses.", str(error)) from None


def no_signature(scene: Scene) -> None:
    """Confirm without a signature, as an older version would, in both directions."""

    def strip(frame: pb.PairFrame, _up: bool) -> None:
        if frame.WhichOneof("frame") == "confirm":
            frame.confirm.signature = b""

    with window(scene.desk) as (opened, at), Relay(at, strip) as between:
        both_refuse(opened, between, scene.phone)


def swapped_signatures(scene: Scene) -> None:
    """Send A its own signature, and B one by A's key of the previous exchange."""
    kept: list[bytes] = []

    def swap(frame: pb.PairFrame, up: bool) -> None:
        if frame.WhichOneof("frame") == "confirm":
            kept.append(frame.confirm.signature)
            if not up:
                frame.confirm.signature = kept[0]  # A's own, reflected

    with window(scene.desk) as (_opened, at), Relay(at, swap) as between:
        refused("the join", lambda: join(between, CODE, scene.phone, HONEST))

    def another(frame: pb.PairFrame, up: bool) -> None:
        if frame.WhichOneof("frame") == "confirm" and up:
            frame.confirm.signature = kept[0]  # by the right key, of the previous exchange

    with window(scene.desk) as (opened, at), Relay(at, another) as between:
        both_refuse(opened, between, scene.phone)


def between_who_knows_the_code(scene: Scene) -> None:
    """Run an exchange with each side under the other's certificate, and forward the phone's signature to the desk."""
    passed: list[bytes] = []

    class PassesOn(Identity):
        """An identity that can only sign with a signature which the victim made for another device."""

        def sign(self, message: bytes) -> bytes:
            return passed[-1] if passed else super().sign(message)

    def record(frame: pb.PairFrame, up: bool) -> None:
        if frame.WhichOneof("frame") == "confirm" and up:
            passed.append(frame.confirm.signature)

    key: ec.EllipticCurvePrivateKey = Identity.new().key
    towards_phone = Trust(Identity(key, scene.desk.identity.certificate), Peers(scene.folder / "left"))
    towards_desk = Trust(PassesOn(key, scene.phone.identity.certificate), Peers(scene.folder / "right"))
    with window(towards_phone, GREEDY) as (opened, at), Relay(at, record) as between:
        refused("the phone", lambda: join(between, CODE, scene.phone, HONEST))
        with suppress(EdgeError):
            opened.wait(PATIENCE)
    if not passed:
        raise AssertionError("the phone has not signed anything: nothing was tried")
    with window(scene.desk) as (opened, at):
        both_refuse(opened, at, towards_desk, GREEDY)


def an_older_version(scene: Scene) -> None:
    """Pair with a side that has the version without signatures."""

    def older(frame: pb.PairFrame, _up: bool) -> None:
        if frame.WhichOneof("frame") == "hello":
            frame.hello.protocol = PAIRING_PROTOCOL - 1

    with window(scene.desk) as (_opened, at), Relay(at, older) as between:
        refused("the join", lambda: join(between, CODE, scene.phone, HONEST))


CASES: tuple[Case, ...] = (
    key_not_owned_by_who_joins, key_not_owned_by_who_shows_the_code, existing_entry_changed, replay, reflection,
    no_signature, swapped_signatures, between_who_knows_the_code, an_older_version,
)  # fmt: skip


def run(quick: bool) -> Found:
    """Try every case, with an honest pairing in between, which must work."""
    tried, wrong, by_case = 0, list[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        desk, phone, tablet = (Trust(Identity.new(), Peers(root / name)) for name in ("desk", "phone", "tablet"))
        scene = Scene(desk, phone, tablet, root)
        for _ in range(1 if quick else ROUNDS):
            for case in CASES:
                before = scene.lists()
                tried += 1
                by_case[case.__name__] += 1
                try:
                    case(scene)
                    trouble = scene.harmed(before) and f"the list of {scene.harmed(before)} changed"
                except AssertionError as error:
                    trouble = str(error)
                if trouble:
                    wrong.append(f"{case.__name__}: {trouble}")
    return Found(tried, tuple(wrong), {name: float(count) for name, count in by_case.items()})


ATTACKS = (Attack("pairing", "pairing with the code, or a recorded exchange, but without another device's key", run),)
