"""Announcement of what is served here, so that other devices find it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgellm.cli.views.console import say

if TYPE_CHECKING:
    from edgellm.services.server.grpc_server import Listener


def hosts_of(server: Listener, interface: list[str] | None) -> list[str]:
    """Return the hosts at which others can reach a server: its address, or all of this machine's that lead home."""
    from ipaddress import ip_address

    from edgellm.rpc.discovery.interfaces import chosen_hosts

    host = server.address.host
    try:
        everywhere = ip_address(host).is_unspecified
    except ValueError:  # a name
        everywhere = False
    return chosen_hosts(interface or ()) if everywhere else [host]


@contextmanager
def findable(server: Listener, interface: list[str] | None) -> Iterator[None]:
    """Announce a server that other machines can reach, and look for a device with the identity of this one."""
    from edgellm.rpc.discovery.mdns import ServiceKind, announced, copies

    trust, address = server.trust, server.address
    if trust is None or address.loopback:
        yield
        return
    hosts = [host for host in hosts_of(server, interface) if _is_ipv4(host)]  # announcements are made over IPv4
    short = trust.identity.id.short

    def look() -> None:
        for copy in copies(short, hosts):
            say(f"{copy.addresses[0].host} announces the identity of this device, {copy.short}: run `edgellm doctor`.")

    with announced(ServiceKind.DEVICE, short, address.port, hosts) as begun:
        if begun:
            say(f"announced as {short} on {', '.join(hosts)}", style="dim")
            threading.Thread(target=look, daemon=True).start()
        else:
            say("It could not be announced; `edgellm doctor` tells why. --peer HOST:PORT works all the same.")
        yield


def _is_ipv4(host: str) -> bool:
    return host.replace(".", "").isdigit()
