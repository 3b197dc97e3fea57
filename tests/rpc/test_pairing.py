"""Two devices meet over real sockets; and everybody else who tries to."""

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import spake2
from hypothesis import given
from hypothesis import strategies as st
from spake2 import SPAKE2_A, SPAKE2_B

from edgellm.errors import EdgeError, IdentityClash, InvalidOption, PairingFailed, VerifierUnreachable
from edgellm.rpc import channel
from edgellm.rpc.address import Address
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust import pairing
from edgellm.rpc.trust.identity import Certificate, Identity
from edgellm.rpc.trust.pairing import NUMBERS, WORDS, Code, Exchange, PairingWindow, introduce, join
from edgellm.rpc.trust.trust import Right, Trust
from tests.rpc.strangers import certified, device

PAIR = "/edgellm.v1.Pairing/Pair"


class Talk:
    """A conversation frame by frame, as a stranger would lead it."""

    def __init__(self, at: Address) -> None:
        self.channel = grpc.insecure_channel(str(at), options=[("grpc.use_local_subchannel_pool", 1)])
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        stream: Any = self.channel.stream_stream
        self._in: Any = stream(PAIR)(iter(self._out.get, None), timeout=120)

    def say(self, frame: pb.PairFrame | bytes | None) -> None:
        self._out.put(frame.SerializeToString() if isinstance(frame, pb.PairFrame) else frame)

    def hear(self) -> pb.PairFrame:
        return pb.PairFrame.FromString(next(self._in))

    def refused(self) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            self.hear()
        self.close()
        return f"{caught.value.code().name} {caught.value.details()}"

    def close(self) -> None:
        self.say(None)
        self._in.cancel()
        self.channel.close()


def hello(identity: Identity, spake: bytes, protocol: int = PROTOCOL) -> pb.PairFrame:
    return pb.PairFrame(hello=pb.PairHello(protocol=protocol, certificate=identity.certificate.der, spake=spake))


class Relay:
    """A man in the middle: everything passes through him, and he may change it. His address is what `with` gives."""

    def __init__(
        self,
        at: Address,
        change: Callable[[pb.PairFrame], Any] = lambda _frame: None,
        up: Callable[[bytes], Any] = lambda _frame: None,
    ) -> None:
        """`up` hears every frame to the window, `change` may change those of either way."""
        self._at, self._change, self._up = at, change, up
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])

    def __enter__(self) -> Address:
        method = grpc.stream_stream_rpc_method_handler(self._pass)
        handler = grpc.method_handlers_generic_handler("edgellm.v1.Pairing", {"Pair": method})
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return Address("127.0.0.1", port)

    def __exit__(self, *_raised: object) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()

    def _pass(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with grpc.insecure_channel(str(self._at), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stream: Any = channel.stream_stream
            try:
                for frame in stream(PAIR)(self._changed(frame, True) for frame in frames):
                    yield self._changed(frame, False)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "")

    def _changed(self, data: bytes, upwards: bool) -> bytes:
        if upwards:
            self._up(data)
        frame = pb.PairFrame.FromString(data)
        self._change(frame)
        return frame.SerializeToString()


CODE = Code(7, ("lamp", "otter"))
WRONG = Code(7, ("lamp", "owl"))
VERIFY = frozenset({Right.VERIFY})
ABOUT_DESK = introduce("desk", VERIFY, (Address("10.0.0.2", 50151),))
ABOUT_PHONE = introduce("phone", frozenset({Right.FILES}), (Address("10.0.0.3", 50151),))


@pytest.fixture
def desk(tmp_path: Path) -> Trust:
    return device(tmp_path / "desk")


@pytest.fixture
def phone(tmp_path: Path) -> Trust:
    return device(tmp_path / "phone")


@pytest.fixture
def window(desk: Trust) -> Iterator[PairingWindow]:
    with closing(PairingWindow(desk, CODE, ABOUT_DESK)) as opened:
        yield opened


@pytest.fixture
def at(window: PairingWindow) -> Address:
    return window.open(["127.0.0.1"], 0)[0]


def nobody_was_paired(*devices: Trust) -> bool:
    return all(not one.peers.all() for one in devices)


def test_a_second_guess_is_refused_even_if_right(window: PairingWindow, at: Address, desk: Trust, phone: Trust) -> None:
    with pytest.raises(PairingFailed):
        join(at, WRONG, phone, ABOUT_PHONE)
    with pytest.raises(PairingFailed, match="window is closed"):
        join(at, CODE, phone, ABOUT_PHONE)
    assert nobody_was_paired(desk, phone)


def test_two_guesses_at_once_are_one_too_many(window: PairingWindow, at: Address, desk: Trust, phone: Trust) -> None:
    """Whoever has begun has used the guess up, also if he never says what he guessed."""
    first = Talk(at)
    first.say(hello(Identity.new(), Exchange("A", WRONG, Identity.new()).spake))
    first.hear()
    with pytest.raises(PairingFailed, match="window is closed"):
        join(at, CODE, phone, ABOUT_PHONE)
    first.close()
    with pytest.raises(PairingFailed, match="disconnected during pairing"):
        window.wait(60)
    assert nobody_was_paired(desk, phone)


def test_after_its_time_the_right_code_is_refused(desk: Trust, phone: Trust) -> None:
    with closing(PairingWindow(desk, CODE, ABOUT_DESK, seconds=0.05)) as window:
        at = window.open(["127.0.0.1"], 0)[0]
        with pytest.raises(PairingFailed, match="No device joined"):
            window.wait(60)
        with pytest.raises(PairingFailed, match="window is closed"):
            join(at, CODE, phone, ABOUT_PHONE)
    assert nobody_was_paired(desk, phone)


@pytest.mark.parametrize("same_window", [True, False])
def test_a_recorded_pairing_cannot_be_played_again(desk: Trust, phone: Trust, same_window: bool) -> None:
    """Not even where the same code is shown again."""
    record: list[bytes] = []
    with (
        closing(PairingWindow(desk, CODE, ABOUT_DESK)) as window,
        Relay(window.open(["127.0.0.1"], 0)[0], up=record.append) as between,
    ):
        join(between, CODE, phone, ABOUT_PHONE)
        window.wait(60)
        assert len(record) == 3
        desk.peers.remove(phone.identity.id)
        if same_window:
            replay(between, list(record), "FAILED_PRECONDITION")
    if not same_window:
        with closing(PairingWindow(desk, CODE, ABOUT_DESK)) as again:
            replay(again.open(["127.0.0.1"], 0)[0], record, "PERMISSION_DENIED")
            with pytest.raises(PairingFailed):
                again.wait(60)
    assert nobody_was_paired(desk)


def replay(at: Address, record: list[bytes], refused: str) -> None:
    talk = Talk(at)
    for frame in record:
        talk.say(frame)
    if refused == "PERMISSION_DENIED":
        talk.hear()
    assert talk.refused().startswith(refused)


def test_a_man_in_the_middle_with_certificates_of_his_own_pairs_nobody(
    window: PairingWindow, at: Address, desk: Trust, phone: Trust
) -> None:
    """He passes on SPAKE2's messages as they are, and gives each side his certificate for the other's."""
    mallory = Identity.new()

    def swap(frame: pb.PairFrame) -> None:
        if frame.WhichOneof("frame") == "hello":
            frame.hello.certificate = mallory.certificate.der

    with Relay(at, swap) as between:
        with pytest.raises(PairingFailed, match="tampered with"):
            join(between, CODE, phone, ABOUT_PHONE)
        with pytest.raises(PairingFailed, match="tampered with"):
            window.wait(60)
    assert nobody_was_paired(desk, phone)


@pytest.mark.parametrize("shows_the_code", [False, True])
def test_another_devices_certificate_cannot_be_paired_without_its_key(
    desk: Trust, phone: Trust, tmp_path: Path, shows_the_code: bool
) -> None:
    tablet = device(tmp_path / "tablet")
    thief = device(tmp_path / "thief", Identity(Identity.new().key, tablet.identity.certificate))
    shows, types = (thief, phone) if shows_the_code else (desk, thief)
    with closing(PairingWindow(shows, CODE, ABOUT_DESK)) as window:
        at = window.open(["127.0.0.1"], 0)[0]
        with pytest.raises(PairingFailed) as joined:
            join(at, CODE, types, ABOUT_PHONE)
        with pytest.raises(PairingFailed) as waited:
            window.wait(60)
    assert "does not hold the key" in f"{joined.value} {waited.value}"
    assert nobody_was_paired(desk, phone)


@pytest.mark.parametrize(
    ("kind", "upwards"), [("hello", True), ("hello", False), ("confirm", True), ("confirm", False), ("done", True)]
)
def test_whatever_is_changed_on_the_way_pairs_nobody(
    window: PairingWindow, at: Address, desk: Trust, phone: Trust, kind: str, upwards: bool
) -> None:
    turns = {"hello": 0, "confirm": 0, "done": 0}

    def spoil(frame: pb.PairFrame) -> None:
        now = str(frame.WhichOneof("frame"))
        turns[now] += 1
        if now == kind and turns[now] == (1 if upwards else 2):
            if now == "hello":
                frame.hello.spake = Exchange("A" if upwards else "B", CODE, Identity.new()).spake
            elif now == "confirm":
                frame.confirm.sealed = frame.confirm.sealed[:-1] + bytes([frame.confirm.sealed[-1] ^ 1])
            else:
                frame.done.mac = bytes(32)

    with Relay(at, spoil) as between, pytest.raises(PairingFailed):
        join(between, CODE, phone, ABOUT_PHONE)
    with pytest.raises(PairingFailed):
        window.wait(60)
    assert nobody_was_paired(desk, phone)


def test_nothing_private_travels_in_the_clear(at: Address, phone: Trust) -> None:
    record: list[bytes] = []
    with Relay(at, lambda frame: record.append(frame.SerializeToString())) as between:
        join(between, CODE, phone, ABOUT_PHONE)
    heard = b"".join(record)
    assert len(record) == 5
    for private in (b"desk", b"phone", b"lamp", b"otter", b"verify", b"10.0.0"):
        assert private not in heard


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (b"\xff\xff", "cannot be parsed"),
        (pb.PairFrame(), "Expected a frame 'hello'"),
        (pb.PairFrame(done=pb.PairDone()), "Expected a frame 'hello'"),
        (hello(Identity.new(), b"", PROTOCOL + 1), "Update edgellm on this device"),
        (hello(Identity.new(), b"", PROTOCOL - 1), "Update edgellm on the other device"),
        (hello(certified(ca=True), b"A" + bytes(32)), "may sign other certificates"),
        (hello(Identity.new(), b""), "SPAKE2"),
        (hello(Identity.new(), b"A" + b"\xff" * 32), "SPAKE2"),
        (hello(Identity.new(), b"B" + bytes(32)), "SPAKE2"),
        (b"x" * 2**17, "RESOURCE_EXHAUSTED"),
        (None, "disconnected during pairing"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_first_word_costs_no_guess(
    window: PairingWindow, at: Address, phone: Trust, frame: pb.PairFrame | bytes | None, says: str
) -> None:
    talk = Talk(at)
    talk.say(frame)
    assert says in talk.refused()
    assert join(at, CODE, phone, ABOUT_PHONE).addresses == (Address("10.0.0.2", 50151),)
    window.wait(60)


def test_whoever_dawdles_is_shown_the_door(window: PairingWindow, at: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "STEP_SECONDS", 0.2)
    talk = Talk(at)
    assert talk.refused().startswith("DEADLINE_EXCEEDED")
    monkeypatch.setattr(pairing, "STEP_SECONDS", 1.5)
    identity = Identity.new()
    talk = Talk(at)
    talk.say(hello(identity, Exchange("A", CODE, identity).spake))
    talk.hear()
    assert talk.refused().startswith("DEADLINE_EXCEEDED")
    with pytest.raises(PairingFailed, match="in time"):
        window.wait(60)


def test_meeting_oneself_is_explained(window: PairingWindow, at: Address, desk: Trust, tmp_path: Path) -> None:
    copy = device(tmp_path / "copy", desk.identity)
    with pytest.raises(EdgeError, match="itself"):
        join(at, CODE, copy, ABOUT_PHONE)
    with Relay(at, lambda frame: own(frame, copy.identity)) as between, pytest.raises(IdentityClash):
        join(between, CODE, copy, ABOUT_PHONE)
    assert nobody_was_paired(copy)


def own(frame: pb.PairFrame, identity: Identity) -> None:
    """Towards B a stranger's certificate, towards A its own."""
    if frame.WhichOneof("frame") == "hello":
        upwards = frame.hello.spake.startswith(b"A")
        frame.hello.certificate = (Identity.new() if upwards else identity).certificate.der


def test_nobody_there_is_said(phone: Trust) -> None:
    with pytest.raises(VerifierUnreachable, match="No device is waiting"):
        join(Address("127.0.0.1", 1), CODE, phone, ABOUT_PHONE)


def test_it_listens_at_one_port(window: PairingWindow, desk: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["127.0.0.1", "127.0.0.2" if sys.platform == "linux" else "::1"]  # elsewhere loopback has no second one
    bound = window.open(hosts, 0)
    assert bound == [Address(host, bound[0].port) for host in hosts]
    monkeypatch.setattr(channel, "PAIRING_PORT", bound[0].port)
    with closing(PairingWindow(desk, CODE, ABOUT_DESK)) as second:
        for host, port, said in (("127.0.0.1", bound[0].port, "in use"), ("192.0.2.77", 0, "device cannot listen")):
            with pytest.raises(EdgeError, match=said):
                second.open([host], port)
        assert second.open(["127.0.0.1"]) != bound[:1]  # another one, as that is taken, and the user has named none


def without_the_transcript(patch: pytest.MonkeyPatch) -> None:
    same = SimpleNamespace(digest=lambda: bytes(32))
    patch.setattr(pairing, "hashlib", SimpleNamespace(sha256=lambda _data: same))


def without_spakes_identities(patch: pytest.MonkeyPatch) -> None:
    blind = property(lambda _self: b"", lambda _self, _value: None)
    for name, side in (("SPAKE2_A", SPAKE2_A), ("SPAKE2_B", SPAKE2_B)):
        patch.setattr(spake2, name, type(name, (side,), {"idA": blind, "idB": blind}))


def said(one: Exchange, other: Exchange, sees: tuple[Certificate, Certificate]) -> bytes:
    """What `other` hears of `one`, each having seen the certificate that it `sees` for the other's."""
    one.agree(sees[0], other.spake)
    other.agree(sees[1], one.spake)
    return other.check(*one.confirm(b"words"))


@pytest.mark.parametrize("without", [without_the_transcript, without_spakes_identities])
@pytest.mark.parametrize("swapped", [0, 1])
def test_either_binding_finds_a_swapped_certificate(
    monkeypatch: pytest.MonkeyPatch, without: Callable[[pytest.MonkeyPatch], None], swapped: int
) -> None:
    without(monkeypatch)
    desk, phone = Identity.new(), Identity.new()
    mallory = Identity.new().certificate
    right = (desk.certificate, phone.certificate)
    assert said(Exchange("A", CODE, phone), Exchange("B", CODE, desk), right) == b"words"
    wrong = (mallory, phone.certificate) if swapped == 0 else (desk.certificate, mallory)
    with pytest.raises(PairingFailed, match="tampered with"):
        said(Exchange("A", CODE, phone), Exchange("B", CODE, desk), wrong)


def agreed() -> tuple[Exchange, Exchange, Identity, Identity]:
    """Both sides of an exchange, A and B, up to their confirmations; and their identities."""
    phone, desk = Identity.new(), Identity.new()
    one, other = Exchange("A", CODE, phone), Exchange("B", CODE, desk)
    one.agree(desk.certificate, other.spake)
    other.agree(phone.certificate, one.spake)
    return one, other, phone, desk


def test_a_confirmation_is_signed_by_the_certificates_key_for_one_side_one_exchange_and_one_set_of_words() -> None:
    one, other, phone, desk = agreed()
    mac, sealed, signed = one.confirm(b"words")
    again, _, _, _ = agreed()
    statement = one._statement("A", sealed)
    for signature in (signed, phone.sign(statement)):
        assert other.check(mac, sealed, signature) == b"words"
    for signature in (
        b"",
        bytes(70),
        signed[:-1],
        Identity.new().sign(sealed),
        other.confirm(b"words")[2],  # its own, reflected
        desk.sign(statement),
        phone.sign(one._statement("B", sealed)),
        phone.sign(one._statement("A", sealed + b"x")),
        phone.sign(again._statement("A", sealed)),
    ):
        with pytest.raises(PairingFailed, match="does not hold the key"):
            other.check(mac, sealed, signature)


# --- codes ------------------------------------------------------------------------------------------------------------


codes = st.builds(Code, st.integers(1, NUMBERS), st.tuples(st.sampled_from(WORDS), st.sampled_from(WORDS)))


def test_the_words_are_easy_to_tell_apart() -> None:
    assert len(WORDS) == 256
    assert len({word[:3] for word in WORDS}) == 256
    assert all(re.fullmatch("[a-z]{3,8}", word) for word in WORDS)


@given(codes, st.sampled_from([str, str.upper, str.title]), st.sampled_from(["-", " ", "_", " - "]))
def test_it_is_read_as_people_type_it(code: Code, case: object, between: str) -> None:
    text = between.join((str(code.number), *code.words))
    assert Code.parse(f" {case(text)} ") == code  # type: ignore[operator]
    assert Code.parse(f"{code.number} {code.words[0][:3]} {code.words[1][:3]}") == code


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, "7-lamp-otter") for text in ("", "lamp-otter", "7-lamp", "0-lamp-otter", "0991-lamp-otter")),
        *((text, "7-lamp-otter") for text in ("100-lamp-otter", "٧-lamp-otter", "7-lamp-otter-otter")),
        ("099" + "9" * 5000 + "-lamp-otter", "7-lamp-otter"),
        ("7-lmap-otter", "Is it 'lamp'"),
        ("7-la-otter", "'la' is not a word"),
        ("7-lamp-xxxxxx", "'xxxxxx' is not a word of any code. Compare"),
    ],
)
def test_a_typing_error_is_found_before_it_costs_the_guess(text: str, says: str) -> None:
    with pytest.raises(InvalidOption, match=re.escape(says)):
        Code.parse(text)
