"""What is announced on the network, and what is believed of it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zeroconf import IPVersion, ServiceInfo, Zeroconf

from edgellm.rpc.address import Address
from edgellm.rpc.discovery.mdns import (
    Hint,
    ServiceKind,
    announce,
    browse,
    new_instance,
    parse_announcement,
)
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.versions import DEVICES_PROTOCOL

HERE = ["127.0.0.1"]


@pytest.fixture
def short() -> str:
    return Identity.new().id.short


def found(kind: ServiceKind, short: str, seconds: float = 10.0) -> Hint | None:
    """What is found of the device with this short ID; waits for it only as long as it takes."""
    hints = browse(kind, HERE, seconds, lambda found: any(hint.short == short for hint in found))
    return next((hint for hint in hints if hint.short == short), None)


def test_a_device_is_found_where_it_listens(short: str) -> None:
    instance = new_instance()
    with announce(ServiceKind.DEVICE, short, 50151, HERE, instance) as begun:
        assert begun
        hint = found(ServiceKind.DEVICE, short)
        assert hint == Hint(short, DEVICES_PROTOCOL, instance, (Address("127.0.0.1", 50151),))
        assert hint.own


def test_nothing_else_is_announced(short: str) -> None:
    instance = new_instance()
    with announce(ServiceKind.DEVICE, short, 50151, HERE, instance):
        assert found(ServiceKind.DEVICE, short)
        zeroconf = Zeroconf(interfaces=HERE, ip_version=IPVersion.V4Only)
        info = zeroconf.get_service_info(ServiceKind.DEVICE.value, f"{instance}.{ServiceKind.DEVICE.value}")
        zeroconf.close()
    assert info is not None
    assert info.properties == {b"id": short.encode(), b"v": str(DEVICES_PROTOCOL).encode(), b"i": instance.encode()}
    assert (info.server, info.port) == (f"edgellm-{instance}.local.", 50151)


def said(properties: dict[str, str | bytes | None], host: str = "10.0.0.7", port: int = 5) -> Hint | None:
    """What is made of an announcement that was heard."""
    info = ServiceInfo(
        ServiceKind.DEVICE.value,
        f"x.{ServiceKind.DEVICE.value}",
        port=port,
        properties=properties,
        parsed_addresses=[host],
    )
    return parse_announcement(info, local=False)


SOUND: dict[str, str | bytes | None] = {"id": "0000-0000", "v": "1", "i": "00000000000000ff"}


def test_a_sound_announcement_is_a_hint() -> None:
    assert said(SOUND) == Hint("0000-0000", 1, "00000000000000ff", (Address("10.0.0.7", 5),))


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "0000-0001"},
        {"id": "\x1b[31m"},
        {"id": b"\xff"},
        {"id": None},
        {"v": "x"},
        {"i": "zz"},
        {"i": "12"},
        {"i": "1" * 200},
    ],
)
def test_an_odd_announcement_is_none(changes: dict[str, str | bytes | None]) -> None:
    assert said(SOUND | changes) is None
    for left_out in SOUND:
        assert said({key: value for key, value in SOUND.items() if key != left_out}) is None


@pytest.mark.parametrize("host", ["224.0.0.1", "0.0.0.0", "127.0.0.1", "::1"])
def test_an_address_where_no_other_device_can_be_is_none(host: str) -> None:
    assert said(SOUND, host) is None


@given(st.dictionaries(st.sampled_from(["id", "v", "i"]), st.binary(max_size=40)), st.integers(0, 65535))
def test_whatever_is_announced_does_no_harm(properties: dict[str, str | bytes | None], port: int) -> None:
    said(SOUND | properties, port=port)


def test_a_name_that_is_not_resolved_at_once_is_asked_for_again(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one of the two machines has no time for it."""
    tries = []
    ask = Zeroconf.get_service_info

    def late(self: Zeroconf, kind: str, name: str, patience: int) -> ServiceInfo | None:
        tries.append(patience)
        return ask(self, kind, name, patience) if len(tries) > 2 else None

    monkeypatch.setattr(Zeroconf, "get_service_info", late)
    with announce(ServiceKind.PAIRING, short, 50150, HERE):
        assert found(ServiceKind.PAIRING, short, 60.0)
    assert tries[:3] == [800, 1600, 3200]


def test_what_is_not_found_quickly_is_looked_for_longer(short: str) -> None:
    """It begins to be announced when it was already missed."""
    waited: list[float] = []
    with ExitStack() as later:

        def waiting(elapsed: float) -> None:
            waited.append(elapsed)
            if len(waited) == 2:
                later.enter_context(announce(ServiceKind.DEVICE, short, 50151, HERE))

        hints = browse(
            ServiceKind.DEVICE, HERE, 0.1, lambda found: any(hint.short == short for hint in found), max_seconds=60.0,
            on_wait=waiting,
        )  # fmt: skip
    assert short in [hint.short for hint in hints]
    assert len(waited) >= 2
    assert waited[1] >= 0.2


def test_what_was_found_in_part_is_looked_for_no_longer_than_usual(short: str) -> None:
    with announce(ServiceKind.DEVICE, short, 50151, HERE):
        assert found(ServiceKind.DEVICE, short)
        hints = browse(ServiceKind.DEVICE, HERE, 0.2, max_seconds=600.0, minimum=lambda found: bool(found))
    assert hints


def test_without_an_interface_nothing_is_found_and_nothing_fails(short: str) -> None:
    with announce(ServiceKind.DEVICE, short, 1, []) as begun:
        assert not begun
    assert browse(ServiceKind.DEVICE, [], 5.0) == []
