"""`edgellm serve`: a role that other devices use."""

from __future__ import annotations

import enum
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli.loading import Loading
from edgellm.cli.pair import Interfaces
from edgellm.cli.screen import say
from edgellm.cli.teach import model_names

if TYPE_CHECKING:
    from edgellm.serve.listener import Listener
    from edgellm.serve.service import ServerEvent

PORT = 50151  # as in `edgellm.link.channel`, which takes its time to import


class Role(enum.StrEnum):
    """What this process does for others."""

    VERIFIER = "verifier"
    WORKER = "worker"


def serve(
    role: Annotated[
        Role,
        typer.Option(
            help="What to serve: a verifier checks what other devices draft; a worker computes layers of models that "
            "several devices hold together."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            autocompletion=model_names,
            show_default="edgellm-verifier",
            help="The model that verifies; of a worker, one of which it has all layers.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Where to listen: this machine only, or one of its addresses, for paired devices."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="The TCP port; 0 lets the system choose.")] = PORT,
    paired_only: Annotated[
        bool, typer.Option("--paired-only", help="Mutual TLS and paired devices alone also on this machine.")
    ] = False,
    announce: Annotated[
        bool, typer.Option("--announce/--no-announce", help="Let paired devices find it by multicast DNS.")
    ] = True,
    interface: Interfaces = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GB", min=0.0, help="A worker's memory for layers.", show_default="no limit")
    ] = None,
    keep: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long a worker keeps layers that nobody uses.")
    ] = 300.0,
) -> None:
    from edgellm.store import resolve

    if role is Role.WORKER:
        from edgellm.cli.worker import serve_worker

        path = None if model is None else resolve(model)
        worker = serve_worker(path, host, port, paired_only=paired_only, memory=memory, keep=keep)
        _serving(worker, interface, announce)
        return
    from edgellm.serve.server import serve_verifier

    path = resolve(model or "edgellm-verifier")
    with Loading() as loading:
        server = serve_verifier(
            path, host=host, port=port, paired_only=paired_only, on_event=_tell, progress=partial(loading, path.name)
        )
    if server.trust is None:
        say(f"Ask it with: edgellm chat --verifier {server.address}", style="bold")
    else:
        say("Ask it on a paired device with: edgellm chat --verifier auto", style="bold")
        for host in _hosts(server, interface):
            say(f"or, if it is not found: edgellm chat --peer {replace(server.address, host=host)}", style="dim")
    say("Ctrl-C stops it when it has finished what is in flight; a second one stops it at once.", style="dim")
    _serving(server, interface, announce)


def _serving(server: Listener, interface: list[str] | None, announce: bool) -> None:
    """Until it is stopped; meanwhile others may find it."""
    with _announced(server, interface) if announce else nullcontext():
        _until_stopped(server)


def _hosts(server: Listener, interface: list[str] | None) -> list[str]:
    """Where others can reach a server: at the address it was given, or at all that lead home."""
    from ipaddress import ip_address

    from edgellm.link.interfaces import chosen_hosts

    host = server.address.host
    try:
        everywhere = ip_address(host).is_unspecified
    except ValueError:  # a name
        everywhere = False
    return chosen_hosts(interface or ()) if everywhere else [host]


@contextmanager
def _announced(server: Listener, interface: list[str] | None) -> Iterator[None]:
    """Announces a server that other machines can reach, and looks for one that has this one's identity."""
    from edgellm.link.discovery import Kind, announced, copies

    trust, address = server.trust, server.address
    if trust is None or address.loopback:
        yield
        return
    hosts = [host for host in _hosts(server, interface) if _is_ipv4(host)]  # announcements are made over IPv4
    short = trust.identity.id.short

    def look() -> None:
        for copy in copies(short, hosts):
            say(f"{copy.addresses[0].host} announces the identity of this device, {copy.short}: run `edgellm doctor`.")

    with announced(Kind.DEVICE, short, address.port, hosts) as begun:
        if begun:
            say(f"announced as {short} on {', '.join(hosts)}", style="dim")
            threading.Thread(target=look, daemon=True).start()
        else:
            say("It could not be announced; `edgellm doctor` tells why. --peer HOST:PORT works all the same.")
        yield


def _is_ipv4(host: str) -> bool:
    return host.replace(".", "").isdigit()


def _until_stopped(server: Listener) -> None:
    """Waits for SIGINT or SIGTERM, then for what is in flight; a second signal cuts that off."""
    asked = 0

    def stop(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            server.request_stop()
        else:
            server.request_stop(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not server.wait(1.0):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.close()


def _tell(event: ServerEvent) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {event.text}")
