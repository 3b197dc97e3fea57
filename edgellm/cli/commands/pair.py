"""`edgellm pair`: pair two devices, so that they trust each other."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from edgellm.cli.options.models import Interfaces
from edgellm.cli.options.records import completion
from edgellm.cli.views.console import emit, err, one_line, say
from edgellm.errors import InvalidOption, PairingFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgellm.rpc.address import Address
    from edgellm.rpc.discovery.mdns import Hint
    from edgellm.rpc.trust.pairing import Code, Introduction
    from edgellm.rpc.trust.peer_store import Peer
    from edgellm.rpc.trust.rights import Right, Rights
    from edgellm.rpc.trust.trust import Trust


# the actions that each right allows, and the consequence that both devices should know
RIGHTS = {
    "verify": (
        "have drafts verified by {host}",
        "{host} then reads the prompts and replies of {guest}",
    ),
    "compute": (
        "have {host} compute layers of models",
        "{host} then gets activations, from which prompts can be guessed; {guest} can overload or crash {host}",
    ),
    "files": (
        "copy models from {host}, and store layers of models on it",
        "{guest} then knows which models {host} has, and uses its disk, up to a limit",
    ),
}


_RIGHTS = {right: allows.format(host="this device", guest="it") for right, (allows, _) in RIGHTS.items()}


def read_grant(text: str) -> Rights:
    """Parse rights such as `verify,files`, `all` or `none`.

    Raises:
        InvalidOption: there is no such right.
    """
    from edgellm.rpc.trust.rights import Right

    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words == ["none"]:
        return frozenset()
    if words == ["all"]:
        return frozenset(Right)
    known = {right.value: right for right in Right}
    for word in words:
        if word not in known:
            raise InvalidOption(f"There is no right {word!r}.", f"Choose from {', '.join(known)}; or all, or none.")
    if not words:
        raise InvalidOption("No right is given.", f"Choose from {', '.join(known)}; or all, or none.")
    return frozenset(known[word] for word in words)


def explain_rights(rights: Iterable[Right], host: str, guest: str) -> Iterator[tuple[str, str]]:
    """Yield each right of `guest` on `host` with what it allows, then "" with its consequence."""
    granted = set(rights)
    if not granted:
        yield "nothing", ""
    for right, (allows, consequence) in RIGHTS.items():
        if right in granted:
            yield right, allows.format(host=host, guest=guest)
            yield "", consequence.format(host=host, guest=guest)


PORT = 50150  # a copy: `edgellm.rpc.trust.pairing` is slow to import
SEARCH_SECONDS = 4.0  # search for the device that shows the code, before a notice
LONGEST_SEARCH = 30.0


def pair(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[HOST:PORT] [CODE]", help="What the other device shows. Default: show a code here."),
    ] = None,
    grant: Annotated[
        str,
        typer.Option(
            metavar="RIGHTS", autocompletion=completion(_RIGHTS, _RIGHTS),
            help="Rights of the other device here: verify, compute, files (separated by commas), all or none.",
        ),
    ] = "verify",
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of this device on the other one.", show_default="the host name"),
    ] = None,
    interface: Interfaces = None,
    port: Annotated[int, typer.Option(metavar="PORT", help="Port to wait on for the other device.")] = PORT,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the code, then the result.")] = False,
) -> None:  # fmt: skip
    from edgellm.rpc.address import Address
    from edgellm.rpc.channel import DEFAULT_PORT
    from edgellm.rpc.discovery.interfaces import chosen_hosts
    from edgellm.rpc.trust.pairing import Introduction, join
    from edgellm.rpc.trust.peer_store import checked_name
    from edgellm.rpc.trust.trust import Trust

    rights = read_grant(grant)
    own_name = checked_name(platform.node()[:40] or "a device" if name is None else name)
    place, code = _address_and_code(words or [])
    hosts = chosen_hosts(interface or ())
    about = Introduction(own_name, rights, tuple(Address(host, DEFAULT_PORT) for host in hosts))
    trust = Trust.load()
    if code is None:
        peer = _wait(trust, about, hosts, port, as_json)
    else:
        peer = join(place or _find(code, hosts), code, trust, about)
    if as_json:
        emit(json.dumps(_row(peer)))
    else:
        _print_peer(peer)


def _address_and_code(words: list[str]) -> tuple[Address | None, Code | None]:
    """Parse the arguments of `edgellm pair`: none, a code, or an address and a code."""
    from edgellm.rpc.address import Address
    from edgellm.rpc.trust.pairing import PAIRING_PORT, Code

    if not words:
        return None, None
    place = None
    if ":" in words[0] or "." in words[0]:
        place = Address.parse(words[0] if ":" in words[0] else f"{words[0]}:{PAIRING_PORT}")
        words = words[1:]
        if not words:
            raise InvalidOption("The code is missing.", "Add it after the address: edgellm pair HOST:PORT 7-lamp-otter")
    return place, Code.parse(" ".join(words))


def _wait(trust: Trust, about: Introduction, hosts: Sequence[str], port: int, as_json: bool) -> Peer:
    """Show a code, and wait until a device has tried it or it has expired."""
    from edgellm.rpc.discovery.mdns import ServiceKind, announce, code_number, new_instance
    from edgellm.rpc.trust.pairing import WINDOW_SECONDS, Code, PairingWindow

    if not hosts:
        raise PairingFailed(
            "This machine is in no network with other devices.", "Join one, or choose an interface with --interface."
        )
    instance = new_instance()
    code = Code.new(code_number(instance))
    with PairingWindow(trust, code, about, WINDOW_SECONDS) as window:
        places = window.open(hosts, port)
        with announce(ServiceKind.PAIRING, trust.identity.id.short, places[0].port, hosts, instance):
            if as_json:
                emit(json.dumps({"code": str(code), "addresses": [str(place) for place in places],
                                 "seconds": WINDOW_SECONDS, "grants": sorted(about.rights)}))  # fmt: skip
            else:
                _print_code(code, places, about.rights)
            while True:
                with suppress(TimeoutError):
                    return window.wait(0.5)  # short waits let Ctrl-C be heard


def _print_code(code: Code, places: Sequence[Address], rights: Rights) -> None:
    say("On the other device, run:")
    err().print(Text(f"\n    edgellm pair {code}\n", style="bold cyan"))
    say(f"or, if it does not find this device:  edgellm pair {places[0]} {code}", style="dim")
    say("")
    _print_rights("rights of the other device here", rights, "this device", "the other device")
    say("The code is valid for two minutes and one guess. Ctrl-C cancels it.", style="dim")


def _find(code: Code, hosts: Sequence[str]) -> Address:
    """Return the address of the device that announces a code with this number."""
    from edgellm.rpc.channel import run_in_network_loop
    from edgellm.rpc.discovery.interfaces import first_listening
    from edgellm.rpc.discovery.mdns import ServiceKind, browse

    say("looking for the device that shows this code ...", style="dim")

    def matching(found: Sequence[Hint]) -> list[Hint]:
        return [hint for hint in found if hint.number == code.number]

    def waiting(elapsed: float) -> None:
        say(f"still looking ({elapsed:.0f} s of at most {LONGEST_SEARCH:.0f} s; Ctrl-C ends it) ...", style="dim")

    hints = browse(
        ServiceKind.PAIRING,
        hosts,
        SEARCH_SECONDS,
        lambda found: bool(matching(found)),
        max_seconds=LONGEST_SEARCH,
        on_wait=waiting,
    )
    matches = matching(hints)
    if len({hint.short for hint in matches}) > 1:
        raise PairingFailed(
            f"Several devices show codes that begin with {code.number}.",
            "Add the address that the right one shows: edgellm pair HOST:PORT CODE",
        )
    if not matches:
        others = f" ({len(hints)} with other codes found)" if hints else ""
        raise PairingFailed(
            f"No device with the code {code} was found{others}.",
            f"Add the address that it shows: edgellm pair HOST:PORT {code}",
        )
    return run_in_network_loop(first_listening(matches[0].addresses)).result()


def _print_peer(peer: Peer) -> None:
    say("")
    err().print(Text.assemble(("paired ", "bold green"), f"with {one_line(peer.name)} ({peer.id.short})"))
    _print_rights(f"rights of {peer.name} here", peer.rights, "this device", peer.name)
    _print_rights("rights of this device there", peer.granted, peer.name, "this device")
    say(f"Change it with `edgellm peers grant|revoke|rename|rm {peer.id.short}`.", style="dim")


def _print_rights(title: str, rights: Rights, host: str, guest: str) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="green")
    table.add_column(overflow="fold")
    for right, meaning in explain_rights(rights, one_line(host), one_line(guest)):
        table.add_row(f"  {right}", Text(meaning, style="" if right else "yellow"))
    say(f"{one_line(title)}:")
    err().print(table)


def _row(peer: Peer) -> dict[str, object]:
    return {
        "name": peer.name,
        "id": str(peer.id),
        "short": peer.id.short,
        "may_here": sorted(peer.rights),
        "may_there": sorted(peer.granted),
        "addresses": [str(address) for address in peer.addresses],
    }
