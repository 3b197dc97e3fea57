"""What is announced on the network, and what is believed of it."""

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest
from zeroconf import ServiceInfo, Zeroconf

from edgellm.errors import InvalidOption
from edgellm.rpc.address import Address
from edgellm.rpc.discovery import mdns
from edgellm.rpc.discovery.interfaces import chosen_hosts, own_cards
from edgellm.rpc.discovery.mdns import Hint, ServiceKind, announce, browse, keep_announced, new_instance
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.trust.identity import Identity
from tests.watching import calls_of

HERE = ["127.0.0.1"]


@pytest.fixture
def short() -> str:
    return Identity.new().id.short


def found(short: str, seconds: float = 60.0) -> Hint | None:
    """What is found of the device with this short ID, among those of other tests; waits only as long as it takes."""
    hints = browse(ServiceKind.DEVICE, HERE, seconds, lambda found, _: any(hint.short == short for hint in found))
    return next((hint for hint in hints if hint.short == short), None)


def test_a_device_is_found_where_it_listens_and_announces_no_more(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instance, registered = new_instance(), calls_of(monkeypatch, Zeroconf, "register_service")
    with announce(ServiceKind.DEVICE, short, 50151, HERE, instance) as begun:
        assert begun
        hint = found(short)
        assert hint == Hint(short, PROTOCOL, instance, (Address("127.0.0.1", 50151),))
        assert hint.own
    ((_, info),) = registered
    assert info.properties == {b"id": short.encode(), b"v": str(PROTOCOL).encode(), b"i": instance.encode()}
    assert (info.name, info.server) == (f"{instance}.{ServiceKind.DEVICE.value}", f"edgellm-{instance}.local.")
    assert found(short, 0.5) is None, "it is withdrawn"


def said(properties: dict[str, str | bytes | None], host: str = "10.0.0.7", port: int = 5) -> Hint | None:
    """What is made of an announcement that was heard."""
    info = ServiceInfo(
        ServiceKind.DEVICE.value, f"x.{ServiceKind.DEVICE.value}", port=port, properties=properties,
        parsed_addresses=[host],
    )  # fmt: skip
    return mdns.parse_announcement(info, local=False)


SOUND: dict[str, str | bytes | None] = {"id": "0000-0000", "v": "1", "i": "00000000000000ff"}


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "0000-0001"}, {"id": "\x1b[31m"}, {"id": b"\xff"}, {"id": None}, {"v": "x"}, {"i": "zz"}, {"i": "12"},
        {"i": "1" * 200},
    ],
)  # fmt: skip
def test_an_odd_announcement_is_none(changes: dict[str, str | bytes | None]) -> None:
    assert said(SOUND) == Hint("0000-0000", 1, "00000000000000ff", (Address("10.0.0.7", 5),))
    assert said(SOUND | changes) is None
    for left_out in SOUND:
        assert said({key: value for key, value in SOUND.items() if key != left_out}) is None


@pytest.mark.parametrize("host", ["224.0.0.1", "0.0.0.0", "127.0.0.1", "::1"])
def test_an_address_where_no_other_device_can_be_is_none(host: str) -> None:
    assert said(SOUND, host) is None


@pytest.mark.parametrize(
    ("name", "host", "announced"),
    [
        ("eth0", "192.168.7.5", True), ("wlan0", "10.0.0.5", True), ("docker0", "172.17.0.1", False),
        ("tailscale0", "100.101.7.9", False), ("wg0", "10.8.0.2", False), ("en5", "100.64.0.3", False),
    ],
)  # fmt: skip
def test_a_home_network_is_announced(name: str, host: str, announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    address, here = (SimpleNamespace(address=one, family=socket.AF_INET, netmask="255.0.0.0") for one in (host, *HERE))
    card, none = (SimpleNamespace(address=f"0{one}:00:00:00:00:00", family=psutil.AF_LINK) for one in (2, 0))
    up = SimpleNamespace(isup=True)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {name: [address, card], "lo": [here, none]})
    monkeypatch.setattr("psutil.net_if_stats", lambda: {name: up, "lo": up})
    assert chosen_hosts() == list(own_cards().values()) == [host] * announced
    monkeypatch.setenv("EDGELLM_INTERFACE", name)
    assert chosen_hosts() == list(own_cards().values()) == [host]
    monkeypatch.setenv("EDGELLM_INTERFACE", "lo")
    assert (chosen_hosts(), own_cards()) == (["127.0.0.1"], {})
    monkeypatch.setenv("EDGELLM_INTERFACE", "nothing0")
    with pytest.raises(InvalidOption, match="no interface 'nothing0'"):
        chosen_hosts()


def test_what_is_not_found_quickly_is_looked_for_longer(short: str) -> None:
    """It begins to be announced when it was already missed."""
    with ExitStack() as later:

        def enough(found: Sequence[Hint], elapsed: float) -> bool:
            if elapsed > 0.2 and not begun:
                begun.append(later.enter_context(announce(ServiceKind.DEVICE, short, 50151, HERE)))
            return any(hint.short == short for hint in found)

        begun = list[bool]()
        hints = browse(ServiceKind.DEVICE, HERE, 60.0, enough)
    assert short in [hint.short for hint in hints]


def test_a_device_whose_addresses_change_is_announced_at_the_new_ones(short: str) -> None:
    """As when it has slept, or is in another network."""
    hosts = list[str]()
    with keep_announced(ServiceKind.DEVICE, short, 50151, lambda: list(hosts)) as begun:
        assert not begun
        hosts += HERE
        assert found(short)
    assert found(short, 0.5) is None, "it is withdrawn"


def test_without_an_interface_nothing_is_found_and_nothing_fails(short: str) -> None:
    with announce(ServiceKind.DEVICE, short, 1, []) as begun:
        assert not begun
    assert browse(ServiceKind.DEVICE, [], 5.0) == []
