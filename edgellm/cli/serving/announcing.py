"""Say that a server is there: to other devices by announcements, and to the user how to reach it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from edgellm.cli.serving.http import until_stopped
from edgellm.cli.views.console import say

if TYPE_CHECKING:
    from edgellm.cli.options.serve import LinkOptions
    from edgellm.http.server import HttpServer
    from edgellm.services.server.listener import Listener, ServerEvent


def hosts_of(server: Listener, interface: Sequence[str]) -> list[str]:
    """Return the hosts at which others can reach a server: its address, or all those of this machine in the home."""
    from ipaddress import ip_address

    from edgellm.rpc.discovery.interfaces import chosen_hosts

    host = server.address.host
    try:
        everywhere = ip_address(host).is_unspecified
    except ValueError:  # a name
        everywhere = False
    return chosen_hosts(interface) if everywhere else [host]


@contextmanager
def announcing(server: Listener, link: LinkOptions) -> Iterator[None]:
    """Announce a server that other machines can reach, unless the user does not want that, and warn of a device that
    has the identity of this one."""
    from edgellm.rpc.discovery.mdns import ServiceKind, announce, find_copies

    trust, address = server.trust, server.address
    if trust is None or address.loopback or not link.announce:
        yield
        return
    hosts = [host for host in hosts_of(server, link.interface) if _is_ipv4(host)]  # announcements are made over IPv4
    short = trust.identity.id.short

    def warn_of_copies() -> None:
        for copy in find_copies(short, hosts):
            say(f"{copy.addresses[0].host} announces the identity of this device, {copy.short}. Run: edgellm doctor")

    with announce(ServiceKind.DEVICE, short, address.port, hosts) as begun:
        if begun:
            say(f"announced as {short} on {', '.join(hosts)}", style="dim")
            threading.Thread(target=warn_of_copies, daemon=True).start()
        else:
            say("It cannot be announced; to find out why, run: edgellm doctor. Other devices can use --peer HOST:PORT.")
        yield


def serve_until_stopped(server: Listener, http: HttpServer | None, link: LinkOptions) -> None:
    """Serve devices, and HTTP if it is given, until the user stops them; close `server`."""
    with announcing(server, link):
        try:
            until_stopped([http, server])
        finally:
            server.close()


def _is_ipv4(host: str) -> bool:
    return host.replace(".", "").isdigit()


def say_how_to_use(server: Listener, link: LinkOptions, models: Sequence[str] = ()) -> None:
    """Print how devices have drafts verified here, by one of several `models` if there are."""
    from edgellm.rpc.address import ModelAddress

    if server.trust is None:
        for model in models or ("",):
            say(f"Use it with: edgellm chat --verifier {ModelAddress(server.address, model)}", style="bold")
        return
    say("Use it on a paired device with: edgellm chat --verifier auto", style="bold")
    for host in hosts_of(server, link.interface):
        for model in models or ("",):
            where = ModelAddress(replace(server.address, host=host), model)
            say(f"{'or to choose a model' if models else 'or, if it is not found'}: edgellm chat --peer {where}",
                style="dim")  # fmt: skip


def print_server_event(event: ServerEvent) -> None:
    """Print what a server reports, and when."""
    say(f"{time.strftime('%H:%M:%S')}  {event.text}")
