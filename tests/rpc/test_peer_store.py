"""The list of paired devices, and their keys and certificates."""

import base64
import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import InvalidOption, NotPaired, TrustUnusable
from edgellm.rpc.address import Address
from edgellm.rpc.trust.identity import ALPHABET, Certificate, DeviceID, Identity, parse_short, pem_id
from edgellm.rpc.trust.trust import MAX_ADDRESSES, Peer, Peers, Right, printable_name, read_cards, read_rights
from tests.rpc.strangers import certified

THEN = datetime(2026, 1, 1, tzinfo=UTC)


def peer(name: str = "desk", rights: str = "verify", identity: Identity | None = None) -> Peer:
    certificate = (identity or Identity.new()).certificate
    granted = frozenset({Right.VERIFY})
    return Peer(name, certificate, read_rights(rights.split()), granted, (Address("10.0.0.2", 50151),), THEN, THEN)


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    return Peers(tmp_path)


def test_what_is_added_is_there_for_every_process(peers: Peers, tmp_path: Path) -> None:
    other = Peers(tmp_path)
    assert other.all() == []
    added = peers.add(peer())
    assert other.all() == peers.all() == [added]
    assert stat.S_IMODE(peers.path.stat().st_mode) == 0o600
    peers.remove(added.id)
    assert other.get(added.id) is None
    with pytest.raises(NotPaired):
        peers.remove(added.id)


def test_one_that_is_paired_again_is_not_listed_twice(peers: Peers) -> None:
    identity = Identity.new()
    peers.add(peer("desk", "verify files", identity))
    peers.add(peer("desk", "verify", identity))
    assert [(one.name, one.rights) for one in peers.all()] == [("desk", frozenset({Right.VERIFY}))]


def test_it_is_found_by_name_and_by_id(peers: Peers) -> None:
    desk, lounge = peers.add(peer("desk")), peers.add(peer("lounge"))
    for text in ("desk", " DESK ", desk.id.short, desk.id.short.lower().replace("-", ""), str(desk.id)):
        assert peers.find(text) == desk
    assert peers.find("lounge") == lounge
    for text in ("attic", Identity.new().id.short, ""):
        with pytest.raises(NotPaired, match="desk, lounge"):
            peers.find(text)


def test_names_can_be_changed_to_what_is_a_name(peers: Peers) -> None:
    desk = peers.add(peer("desk"))
    peers.add(peer("lounge"))
    assert peers.rename(desk.id, " Küche ").name == "Küche"
    for name in ("", "x" * 41, "a\nb", "\x1b[31m", "Lounge"):
        with pytest.raises(InvalidOption):
            peers.rename(desk.id, name)


def test_being_seen_does_not_bring_one_back_that_is_removed_at_that_moment(
    peers: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes it between the look at the list and the writing of it."""
    desk, genuine = peers.add(peer()), Peers.get

    def removed_behind(self: Peers, device: DeviceID) -> Peer | None:
        found = genuine(self, device)
        Peers(tmp_path).remove(device)
        return found

    monkeypatch.setattr(Peers, "get", removed_behind)
    peers.record_seen(desk.id, Address("10.0.0.9", 1))
    assert peers.all() == []


def test_where_it_was_seen_comes_first_and_the_oldest_goes(peers: Peers) -> None:
    desk = peers.add(peer())
    for port in range(1, 12):
        peers.record_seen(desk.id, Address("10.0.0.9", port), frozenset({Right.FILES}))
    seen = peers.find("desk")
    assert [address.port for address in seen.addresses] == [11, 10, 9, 8, 7, 6, 5, 4]
    assert seen.granted == {Right.FILES}
    assert datetime.now(UTC) - seen.seen < timedelta(minutes=5)


def test_the_file_is_not_written_for_every_call(peers: Peers) -> None:
    desk = peers.add(peer())
    peers.record_seen(desk.id)
    before = peers.path.stat().st_ino, peers.path.stat().st_mtime_ns
    peers.record_seen(desk.id)
    assert (peers.path.stat().st_ino, peers.path.stat().st_mtime_ns) == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"peers": [{}]}', '{"peers": 5}', "\xff", "[" * 100_000])
def test_a_damaged_list_trusts_nobody(peers: Peers, text: str) -> None:
    desk = peers.add(peer())
    peers.path.write_text(text, encoding="latin-1")
    for _ in range(2):
        with pytest.raises(TrustUnusable, match="damaged"):
            peers.get(desk.id)


def test_the_certificate_counts_and_not_the_id_beside_it(peers: Peers) -> None:
    desk, other = peers.add(peer()), Identity.new()
    said = json.loads(peers.path.read_text())
    said["peers"][0]["id"] = str(other.id)
    peers.path.write_text(json.dumps(said))
    assert peers.get(other.id) is None
    assert peers.get(desk.id) is not None


def test_what_others_call_themselves_cannot_command_the_terminal() -> None:
    device = Identity.new().id
    assert printable_name("\x1b[2Jdesk\n" + "x" * 99, device) == "[2Jdesk" + "x" * 33
    assert printable_name("\n", device) == device.short


def test_only_what_is_the_card_of_a_device_is_believed() -> None:
    told = ["02-00-5E-10-00-01 192.168.1.7/24", "no 10.0.0.0/8", "ff:ff:ff:ff:ff:ff 10.0.0.0/8"]
    assert list(map(str, read_cards(told))) == ["02:00:5e:10:00:01 192.168.1.0/24"]
    assert len(read_cards(f"02:00:5e:10:00:{one:02x} 10.0.0.0/8" for one in range(100))) == MAX_ADDRESSES


# --- identities -------------------------------------------------------------------------------------------------------


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    first, again = Identity.load(tmp_path / "trust"), Identity.load(tmp_path / "trust")
    path = tmp_path / "trust" / "identity.pem"
    assert first.id == again.id == pem_id(first.certificate.pem)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert Identity.load(tmp_path / "other").id != first.id


@pytest.mark.parametrize("kept", [b"", b"nonsense", b"key", b"certificate", b"mixed"])
def test_a_damaged_one_is_said_and_not_replaced(tmp_path: Path, kept: bytes) -> None:
    one, other = Identity.new(), Identity.new()
    made = {b"key": one.key_pem, b"certificate": one.certificate.pem, b"mixed": one.key_pem + other.certificate.pem}
    kept = made.get(kept, kept)
    path = tmp_path / "identity.pem"
    path.write_bytes(kept)
    with pytest.raises(TrustUnusable, match=r"identity\.pem is damaged"):
        Identity.load(tmp_path)
    assert path.read_bytes() == kept


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ca": True}, "may sign other certificates"), ({"issuer": Identity.new()}, "not self-signed"),
        ({"curve": "P-384"}, "P-256"), ({"subject": "edgellm-of-another"}, "subject"),
        ({"constraints": False}, "damaged"),
    ],
)  # fmt: skip
def test_certificates_of_another_kind_are_refused(how: dict[str, object], says: str) -> None:
    with pytest.raises(NotPaired, match=says):
        Certificate.of(certified(**how).certificate.der)  # type: ignore[arg-type]


def test_whatever_is_odd_in_a_certificate_is_one_error() -> None:
    """The library has errors of its own, outside any common class, for a version and for an extension that is twice."""
    der = Identity.new().certificate.der
    constraints = bytes.fromhex("300c0603551d130101ff04023000")
    odd = (
        b"",
        b"x" * 100,
        der.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020109"), 1),
        der.replace(bytes.fromhex("0603551d11"), bytes.fromhex("0603551d13"), 1),  # the names become constraints
    )
    assert constraints in der
    for made in odd:
        assert made != der
        with pytest.raises(NotPaired, match="damaged"):
            Certificate.of(made)
        with pytest.raises(NotPaired, match="damaged"):
            pem_id(made)
        with pytest.raises(NotPaired, match="damaged"):
            Certificate.of_pem(
                b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(made) + b"-----END CERTIFICATE-----\n"
            )


shorts = st.builds(lambda digest: DeviceID(digest).short, st.binary(min_size=32, max_size=32))
LOOK_ALIKES = {"1": "1iIlL", "0": "0oO", "8": "8bB"}


@given(shorts, st.data())
def test_case_grouping_and_look_alikes_do_not_matter(short: str, data: st.DataObject) -> None:
    assert parse_short(short) == short
    typed = "".join(
        data.draw(st.sampled_from(LOOK_ALIKES.get(sign, sign + sign.lower()))) for sign in short if sign != "-"
    )
    assert parse_short(typed[:5] + data.draw(st.sampled_from(["", " ", "-", " - "])) + typed[5:]) == short


@given(shorts, st.integers(0, 7), st.sampled_from(ALPHABET))
def test_any_single_wrong_sign_is_found(short: str, at: int, wrong: str) -> None:
    signs = short.replace("-", "")
    if signs[at] != wrong:
        with pytest.raises(InvalidOption, match="mistyped"):
            parse_short(signs[:at] + wrong + signs[at + 1 :])


@given(shorts, st.integers(0, 7), st.integers(0, 7))
def test_two_signs_that_changed_places_are_found(short: str, first: int, second: int) -> None:
    signs = list(short.replace("-", ""))
    if signs[first] != signs[second]:
        signs[first], signs[second] = signs[second], signs[first]
        with pytest.raises(InvalidOption, match="mistyped"):
            parse_short("".join(signs))


@pytest.mark.parametrize("text", ["", "K7QF", "K7QF-2MXU", "K7QF-2MX\x1b", "äöüäöüäö", "K7QF-2MX9-1"])
def test_what_is_none_is_said(text: str) -> None:
    with pytest.raises(InvalidOption):
        parse_short(text)
