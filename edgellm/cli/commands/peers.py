"""`edgellm pair` and `peers`: pair two devices, so that they trust each other, or a phone with the page; the paired
devices and their rights, and the phones."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import typer
from rich.text import Text

from edgellm.cli.options import AsJson
from edgellm.cli.views.console import Columns, emit_json, err, facts, format_age, one_line, say, show
from edgellm.cli.views.progress import activity
from edgellm.errors import EdgeError, InvalidOption, PairingFailed, ServerUnreachable, VerifierUnreachable, size
from edgellm.rpc import DEFAULT_PORT, PAIRING_PORT

if TYPE_CHECKING:
    from edgellm.http.running_servers import RunningServer
    from edgellm.rpc.address import Address
    from edgellm.rpc.discovery.mdns import Hint
    from edgellm.rpc.protos.trust_pb2 import Introduction
    from edgellm.rpc.trust.handshake import PeerInfo
    from edgellm.rpc.trust.pairing import Code
    from edgellm.rpc.trust.trust import Peer, Phone, Rights, Trust

RIGHTS = {
    "verify": ("have drafts verified by {host}", "{host} then reads the prompts and replies of {guest}"),
    "compute": (
        "have {host} compute layers of models",
        "{host} then gets activations, from which prompts can be guessed; {guest} can overload or crash {host}",
    ),
    "files": (
        "copy models from {host}, and store layers of models on it",
        "{guest} then knows which models {host} has, and uses its disk, up to a limit",
    ),
}
"""The actions that each right allows, and the consequence that both devices should know."""
SEARCH_SECONDS = 30.0  # search for the device that shows the code: slow machines answer late
WAKE_SECONDS = 120.0  # wait for a device that is woken up


def read_grant(text: str) -> Rights:
    """Parse rights such as `verify,files`, `all` or `none`. Raise InvalidOption for a right that does not exist."""
    from edgellm.rpc.trust.trust import Right

    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words in (["none"], ["all"]):
        return frozenset(Right if words == ["all"] else ())
    unknown = next((word for word in words if word not in RIGHTS), "")
    if unknown or not words:
        what = f"There is no right {unknown!r}." if unknown else "No right is given."
        raise InvalidOption(what, f"Choose from {', '.join(RIGHTS)}; or all, or none.")
    return frozenset(map(Right, words))


def pair(
    words: list[str] | None = typer.Argument(None, metavar="[HOST:PORT] [CODE]"),
    grant: str = typer.Option("verify", metavar="RIGHTS"),
    name: str | None = typer.Option(None, metavar="NAME", show_default="the host name"),
    port: int | None = typer.Option(None, metavar="PORT", show_default=f"{PAIRING_PORT}, or a free one"),
    as_json: bool = typer.Option(False, "--json"),
) -> None:
    from edgellm.rpc.address import Address
    from edgellm.rpc.discovery.interfaces import chosen_hosts
    from edgellm.rpc.trust.pairing import Code, introduce, join
    from edgellm.rpc.trust.trust import Peer, Trust, checked_name

    rights, place, given = read_grant(grant), None, words or []
    own_name = checked_name(platform.node()[:40] or "a device" if name is None else name)
    if given and (":" in given[0] or "." in given[0]):
        place = Address.parse(given[0] if ":" in given[0] else f"{given[0]}:{PAIRING_PORT}")
        given = given[1:]
        if not given:
            raise InvalidOption("The code is missing.", "Add it after the address: edgellm pair HOST:PORT 7-lamp-otter")
    code = Code.parse(" ".join(given)) if given else None
    hosts = chosen_hosts()
    about = introduce(own_name, rights, [Address(host, DEFAULT_PORT) for host in hosts])
    trust = Trust.load()
    if code is None:
        peer = _wait(trust, about, hosts, port, as_json)
    else:
        peer = join(place or _find(code, hosts), code, trust, about)
    if as_json:
        emit_json(_row(peer), indent=None)
        return
    say("")
    err().print(Text.assemble(("paired ", "bold green"), f"with {one_line(peer.name)} ({peer.id.short})"))
    if not isinstance(peer, Peer):
        say(f"It has the page, and your conversations there, until `edgellm peers rm {peer.id.short}`.", style="dim")
        return
    _print_rights(f"rights of {peer.name} here", peer.rights, "this device", peer.name)
    _print_rights("rights of this device there", peer.granted, peer.name, "this device")
    say(f"Change it with `edgellm peers grant|revoke|rename|rm {peer.id.short}`.", style="dim")


def _wait(trust: Trust, about: Introduction, hosts: Sequence[str], port: int | None, as_json: bool) -> Peer | Phone:
    from edgellm.cli.http_serving import show_phone_code
    from edgellm.rpc.discovery.mdns import ServiceKind, announce, code_number, new_instance
    from edgellm.rpc.trust.pairing import WINDOW_SECONDS, Code, PairingWindow
    from edgellm.rpc.trust.trust import Phone

    if not hosts:
        raise PairingFailed(
            "This machine is in no network with other devices.", "Join one, or name an interface by EDGELLM_INTERFACE."
        )
    instance = new_instance()
    code = Code.new(code_number(instance))
    known, page = {one.id for one in trust.peers.with_phones()}, _page_code()
    with closing(PairingWindow(trust, code, about, WINDOW_SECONDS)) as window:
        places = window.open(hosts, port)
        with announce(ServiceKind.PAIRING, trust.identity.id.short, places[0].port, hosts, instance):
            if as_json:
                link = None if page is None else f"{page[0].url}/#pair={page[1]}"
                emit_json({"code": str(code), "addresses": [str(place) for place in places], "page": link,
                           "seconds": WINDOW_SECONDS, "grants": list(about.rights)}, indent=None)  # fmt: skip
            else:
                say("On the other device, run:")
                say(f"\n    edgellm pair {code}\n", style="bold cyan")
                say(f"or, if it does not find this device:  edgellm pair {places[0]} {code}\n", style="dim")
                _print_rights("rights of the other device here", about.rights, "this device", "the other device")
                say("The code is valid for two minutes and one guess. Ctrl-C cancels it.", style="dim")
                if page is None:
                    say("For a phone, which needs the page alone, run: edgellm serve --http-host 0.0.0.0", style="dim")
                else:
                    show_phone_code(*page)
            while True:
                with suppress(TimeoutError):
                    return window.wait(0.5)  # short waits let Ctrl-C be heard
                for one in trust.peers.with_phones():
                    if one.id not in known and isinstance(one, Phone):
                        return one


def _page_code() -> tuple[RunningServer, str, float] | None:
    """Return a server of this user whose page phones can reach, a code for one of them, and how many seconds it is
    valid; None without such a server."""
    from edgellm.http.running_servers import running_servers
    from edgellm.rpc.address import Address

    for server in running_servers():
        with suppress(ServerUnreachable):
            if not Address(server.host, server.port).loopback:
                status, answer = server.ask("POST", "/phones/code")
                if status == 200:
                    return server, answer["code"], answer["seconds"]
    return None


def _find(code: Code, hosts: Sequence[str]) -> Address:
    from edgellm.rpc.channel import run_in_network_loop
    from edgellm.rpc.discovery.interfaces import listening
    from edgellm.rpc.discovery.mdns import ServiceKind, browse

    def matching(found: Sequence[Hint]) -> list[Hint]:
        return [hint for hint in found if hint.number == code.number]

    limit = f"{SEARCH_SECONDS:.0f} s at most; Ctrl-C ends it"
    say(f"looking for the device that shows this code ({limit}) ...", style="dim")
    hints = browse(ServiceKind.PAIRING, hosts, SEARCH_SECONDS, lambda found, _: bool(matching(found)))
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
    known = matches[0].addresses
    return (run_in_network_loop(listening(known)).result() or known)[0]


def _print_rights(title: str, rights: Iterable[str], host: str, guest: str) -> None:
    say(f"{one_line(title)}:")
    host, guest = one_line(host), one_line(guest)
    rows: list[tuple[str, Text]] = [] if rights else [("  nothing", Text())]
    for right, (allows, consequence) in RIGHTS.items():
        if right in rights:
            rows.append((f"  {right}", Text(allows.format(host=host, guest=guest))))
            rows.append(("", Text(consequence.format(host=host, guest=guest), "yellow")))
    err().print(facts(rows))


def _row(entry: Peer | Phone, answer: PeerInfo | EdgeError | None = None) -> dict[str, Any]:
    """Return what is known of a device or a phone, and what a device has answered."""
    from edgellm.rpc.trust.trust import Peer

    there = None if isinstance(answer, EdgeError) else answer
    offers = () if there is None else there.offers
    row: dict[str, Any] = {
        "name": entry.name, "id": str(entry.id), "short": entry.id.short, "paired": entry.paired.isoformat(),
        "last_seen": entry.seen.isoformat(), "there": there is not None, "address": there and str(there.address),
        "round_trip_ms": there and round(there.seconds * 1e3, 3), "version": there and there.version,
        "trouble": str(answer) if isinstance(answer, EdgeError) else None,
        "offers": [{"model": one.model, "size": one.size, "vocabulary": one.vocabulary.hex()} for one in offers],
    }  # fmt: skip
    if not isinstance(entry, Peer):
        return row | {"kind": "phone", "may_here": ["page"], "may_there": [], "addresses": []}
    return row | {
        "kind": "device", "may_here": sorted(entry.rights), "wakes": entry.wakes,
        "may_there": sorted(entry.granted if there is None else there.rights),
        "addresses": [str(address) for address in entry.addresses], "cards": [str(card) for card in entry.cards],
    }  # fmt: skip


Action: TypeAlias = Literal["list", "wake", "rm", "rename", "grant", "revoke"]
_EXAMPLES = {
    "wake": "wake desk", "rm": "rm phone", "rename": "rename phone old-phone", "grant": "grant phone files",
    "revoke": "revoke phone verify",
}  # fmt: skip


def peers(
    action: Action = typer.Argument("list", metavar="ACTION"),
    device: str | None = typer.Argument(None, metavar="DEVICE"),
    value: str | None = typer.Argument(None, metavar="VALUE"),
    ask: bool = typer.Option(True, "--ask/--no-ask"),
    wait: float = typer.Option(WAKE_SECONDS, metavar="SECONDS", min=0.0),
    as_json: AsJson = False,
) -> None:
    from edgellm.rpc.trust.trust import Peer, Peers

    if action != "list":
        peer = _named(action, device, value)
        if action == "wake" and value is None and isinstance(peer, Peer):
            _wake(peer, wait, as_json)
        else:
            _change(action, peer, value, as_json)
    elif device is not None:
        raise InvalidOption(f"`peers {action}` takes no device.", "Leave it out: edgellm peers")
    else:
        _list(Peers().with_phones(), ask, as_json)


def _named(action: Action, device: str | None, value: str | None) -> Peer | Phone:
    """Return what an action names. Raise InvalidOption where it is nothing, or the number of words is wrong."""
    from edgellm.rpc.trust.trust import Peers

    example = f"For example: edgellm peers {_EXAMPLES[action]}"
    if device is None:
        raise InvalidOption(f"`peers {action}` needs a device.", example)
    if action == "wake" and value not in (None, "on", "off"):
        raise InvalidOption(f"`peers wake {device} {value}` is not known.", "Give on, off, or nothing to wake it now.")
    if (value is None) is not (action == "rm") and action != "wake":
        what = "needs a value" if value is None else "takes no value"
        raise InvalidOption(f"`peers {action} {device}` {what}.", example)
    return Peers().find_any(device)


def _wake(peer: Peer, seconds: float, as_json: bool) -> None:
    """Send magic packets to a device until it answers. Raise VerifierUnreachable where it has not within `seconds`."""
    from edgellm.rpc.discovery.interfaces import chosen_hosts, send_magic_packets
    from edgellm.rpc.discovery.peer_probe import probe_peers
    from edgellm.rpc.trust.trust import Trust

    trust, hosts, began = Trust.load(), chosen_hosts(), monotonic()
    sent = send_magic_packets(peer.cards)
    if not sent:
        where = ", ".join(str(card.network) for card in peer.cards) or "no network that is known"
        raise VerifierUnreachable(
            f"This machine is in no network with {peer.name}, which was last in {where}.",
            "Join that network. A device tells of its network cards when it is paired, and whenever it is met.",
        )
    for line in sent:
        say(f"sent {line}", style="dim")
    with activity(f"waiting for {peer.name}; Ctrl-C ends it") as show_activity:
        while seconds and isinstance(answer := probe_peers(trust, [peer], hosts)[0][1], EdgeError):
            if (passed := monotonic() - began) >= seconds:
                raise VerifierUnreachable(
                    f"{peer.name} has not answered within {seconds:g} seconds.",
                    "Run `edgellm doctor` there once it is awake: it says whether it can be woken.",
                )
            show_activity(f"waiting for {peer.name} ({passed:.0f} s of at most {seconds:.0f} s; Ctrl-C ends it)")
            send_magic_packets(peer.cards)
    address = str(answer.address) if seconds and not isinstance(answer, EdgeError) else None
    if as_json:
        emit_json({"name": peer.name, "sent": sent, "awake": address is not None, "address": address})
    elif address:
        say(f"{peer.name} answers at {address}.", style="bold green")


def _change(action: Action, peer: Peer | Phone, value: str | None, as_json: bool) -> None:
    from edgellm.rpc.trust.trust import Peer, Peers

    store = Peers()
    if action == "rm":
        store.remove(peer.id)
        say(f"{peer.name} ({peer.id.short}) is unpaired; its requests here end.")
        if isinstance(peer, Peer):
            say("Unpair this device there too, with edgellm peers rm, so that it is not asked any more.", style="dim")
    elif action == "rename":
        renamed = store.rename(peer.id, value or "")
        say(f"{peer.name} ({peer.id.short}) is now called {renamed.name} here.")
    elif action == "wake":
        new = store.wake(peer.id, value == "on")
        say(f"{peer.name} is {'' if new.wakes else 'not '}woken up by itself when a reply wants it to verify.")
    else:
        new = (store.grant if action == "grant" else store.revoke)(peer.id, read_grant(value or ""))
        say(f"The rights of {peer.name} ({peer.id.short}) here: {', '.join(sorted(new.rights)) or 'none'}.")
    if as_json:
        now = next((one for one in store.with_phones() if one.id == peer.id), None)
        emit_json({"id": str(peer.id), "name": now.name if now else peer.name, "paired": now is not None,
                   "may_here": _row(now)["may_here"] if now else []})  # fmt: skip


def _list(known: Sequence[Peer | Phone], ask: bool, as_json: bool) -> None:
    from edgellm.rpc.discovery.interfaces import chosen_hosts
    from edgellm.rpc.discovery.peer_probe import probe_peers
    from edgellm.rpc.trust.trust import Peer, Trust

    peers = [one for one in known if ask and isinstance(one, Peer)]
    answers: dict[Peer | Phone, PeerInfo | EdgeError] = {}
    with activity("asking the devices"):
        answers.update(probe_peers(Trust.load(), peers, chosen_hosts()) if peers else ())
    rows = [_row(one, answers.get(one)) for one in known]
    columns = _COLUMNS if ask else {**_COLUMNS, " round trip": lambda _: "not asked"}
    show(rows, columns, as_json, empty="No device is paired with this one. Pair one with: edgellm pair", fold="offers")
    for row in rows:
        if row["trouble"] and not as_json:
            say(f"{row['name']}: {row['trouble']}", style="dim")


def _last_seen(row: dict[str, Any]) -> str:
    since = datetime.now(UTC) - datetime.fromisoformat(row["last_seen"])
    return "now" if row["there"] else format_age(since.total_seconds())


_COLUMNS: Columns = {
    "name": "name",
    "id": "short",
    "may here": lambda row: ", ".join(row["may_here"]) or "nothing",
    "may there": lambda row: ", ".join(row["may_there"]) or "nothing",
    "address": lambda row: row["address"] or next(iter(row["addresses"]), "-"),
    "last seen": _last_seen,
    " round trip": lambda row: f"{row['round_trip_ms']:.1f} ms" if row["there"] else "-",
    "offers": lambda row: ", ".join(f"{one['model']} ({size(one['size'])})" for one in row["offers"]) or "-",
    "version": "version",
}
