"""The list of paired devices: private, shared by processes, and never larger than what it was told."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edgellm.errors import InvalidOption, NotPaired, TrustUnusable
from edgellm.rpc.address import Address
from edgellm.rpc.trust.identity import DeviceID, Identity
from edgellm.rpc.trust.trust import MAX_ADDRESSES, Peer, Peers, Right, printable_name, read_cards, read_rights

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
