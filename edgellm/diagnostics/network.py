"""The part of `edgellm doctor` that looks at the network: interfaces, multicast, and each paired device.

Multicast and TCP fail for different reasons, so they are tried apart: announcements that do not arrive point to client
isolation or a filter in the access point, a port that swallows packets to a firewall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgellm.diagnostics.local import Finding, fine, note, problem
from edgellm.errors import EdgeError, PeerTooNew, PeerTooOld, ProtocolError, VerifierUnreachable
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_there
from edgellm.rpc.discovery.interfaces import Interface, Reach, interfaces, reach
from edgellm.rpc.discovery.mdns import Hint, ServiceKind, announced, browse, multicast_error, new_instance
from edgellm.rpc.discovery.peer_probe import ProbeResult, ask_at, roll_call
from edgellm.rpc.trust.handshake import PeerInfo
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import LINK, check_version, program

LISTEN_SECONDS = 2.5
_LONGEST_LISTEN = 10.0  # seconds, for what this machine announces itself
_SKEW = 120.0  # seconds by which two clocks may differ


@dataclass(frozen=True, slots=True)
class Heard:
    """The announcements heard on the network while listening, and whether our own came back."""

    hints: tuple[Hint, ...]
    own_came_back: bool


def examine_interfaces(hosts: Sequence[str]) -> Iterator[Finding]:
    """Report which networks this machine is in, and which of them are used."""
    known = interfaces()
    used = [one for one in known if set(one.hosts) & set(hosts)]
    left = [one for one in known if one not in used]
    if not used:
        yield problem(
            "interfaces", f"This machine is in no network with other devices (there is: {_names(left) or 'none'}).",
            "Join the home's network, or name an interface with --interface.",
        )  # fmt: skip
    for one in used:
        yield fine("interfaces", f"{one.name} ({', '.join(one.hosts)}) is used: {one.reason}.")
    if used and left:
        yield fine("interfaces", f"Not used: {_names(left)}.")


def listen(short: str, hosts: Sequence[str]) -> Heard:
    """Announce a test, to hear whether it comes back, and listen for devices."""
    instance = new_instance()

    def own(found: Sequence[Hint]) -> bool:
        return any(hint.instance == instance for hint in found)

    with announced(ServiceKind.TEST, short, 1, hosts, instance):
        came_back = own(browse(ServiceKind.TEST, hosts, LISTEN_SECONDS, own, longest=_LONGEST_LISTEN))
    return Heard(tuple(browse(ServiceKind.DEVICE, hosts, LISTEN_SECONDS)), came_back)


def examine_multicast(heard: Heard, short: str, hosts: Sequence[str]) -> Iterator[Finding]:
    """Report whether announcements leave this machine, and whether another one announces its identity."""
    for host in hosts:
        if why := multicast_error(host):
            yield problem(
                "multicast", f"Nothing can be announced at {host}: {why}.", "Allow UDP port 5353, or use --peer."
            )
    if hosts and not heard.own_came_back:
        yield problem(
            "multicast", "What this machine announces does not even come back to itself.",
            "Let its firewall pass UDP port 5353 (multicast DNS), or name devices with --peer HOST:PORT.",
        )  # fmt: skip
    others = [hint for hint in heard.hints if not hint.own]
    if heard.own_came_back:
        count = f"{len(others)} other device{'' if len(others) == 1 else 's'}"
        yield fine("multicast", f"Announcements leave this machine; {count} heard in {LISTEN_SECONDS:g} seconds.")
    for hint in others:
        if hint.short == short:
            yield problem(
                "identity", f"{hint.addresses[0].host} announces the identity of this device: files were copied.",
                "On the one that has the copy remove trust/identity.pem from edgellm's data folder, and pair it anew.",
            )  # fmt: skip


def examine_peers(trust: Trust, heard: Heard, vocabulary: str) -> Iterator[Finding]:
    """Report for each paired device whether it answers, speaks our version and can verify."""
    for answer in roll_call(trust, trust.peers.all(), (), heard.hints):
        announcements = [hint for hint in heard.hints if hint.short == answer.peer.id.short]
        if answer.welcomed is None:
            yield _missing(answer, announcements)
        else:
            yield _there(answer.welcomed, bool(announcements or answer.announced))
            yield from examine_welcome(answer.welcomed, vocabulary)
        yield from _versions(answer.peer, announcements)


def examine_address(trust: Trust, address: Address, vocabulary: str) -> Iterator[Finding]:
    """Report on the device at an address that the user has given."""
    try:
        welcomed = ask_at(trust, address)
    except EdgeError as error:
        yield problem("peers", error.what, error.next_step)
        return
    yield fine("peers", f"At {address} {welcomed.peer.name} answers in {welcomed.seconds * 1e3:.1f} ms.")
    yield from examine_welcome(welcomed, vocabulary)


def examine_welcome(welcomed: PeerInfo, vocabulary: str) -> Iterator[Finding]:
    """Report on what a device says of itself: its clock, version, rights and vocabulary."""
    name = welcomed.peer.name
    if abs(welcomed.clock_ahead) > _SKEW:
        way = "ahead of" if welcomed.clock_ahead > 0 else "behind"
        yield note(
            "clock", f"The clock of {name} is {abs(welcomed.clock_ahead) / 60:.0f} minutes {way} this one.",
            "Switch on network time on both.",
        )  # fmt: skip
    if welcomed.version != program():
        yield note(
            "versions", f"{name} runs edgellm {welcomed.version}, this device {program()}.", "Update the older one."
        )
    if Right.VERIFY not in welcomed.rights:
        yield note(
            "rights", f"{name} does not let this device have drafts verified.",
            f"If it should, there: edgellm peers grant {welcomed.peer.name} verify (by the name it has given this one)",
        )  # fmt: skip
    offers = [offer for offer in welcomed.offers if offer.role == "verifier"]
    for offer in offers:
        if offer.vocabulary == vocabulary:
            yield fine("vocabulary", f"{name} verifies with {offer.model}, in the draft model's vocabulary.")
        elif vocabulary:
            yield problem(
                "vocabulary", f"{name} verifies with {offer.model}, whose vocabulary is not the draft model's.",
                "Serve a model of the draft model's family there, or draft with another one: -m MODEL.",
            )  # fmt: skip


def _there(welcomed: PeerInfo, announced_itself: bool) -> Finding:
    where = f"{welcomed.peer.name} answers at {welcomed.address} in {welcomed.seconds * 1e3:.1f} ms"
    if announced_itself:
        return fine("peers", f"{where}, and is heard by multicast.")
    return note(
        "multicast", f"{where}, but its announcements do not get here.",
        "It works as it is. Else: switch off client (AP) isolation and multicast filters in the access point; or it "
        f"was started with --no-announce. --peer {welcomed.address} needs no announcement.",
    )  # fmt: skip


def _missing(answer: ProbeResult, announcements: Sequence[Hint]) -> Finding:
    """Find out why a device does not answer: try TCP, whatever was announced."""
    name, trouble = answer.peer.name, answer.trouble
    if trouble is not None and not isinstance(trouble, VerifierUnreachable):
        topic = "versions" if isinstance(trouble, ProtocolError) else "peers"
        return problem(topic, f"{name}: {trouble.what}", trouble.next_step)
    said = [place for hint in announcements for place in hint.addresses]
    places = list(dict.fromkeys([*said, *answer.peer.addresses]))
    found = {place: run_there(reach(place)).result() for place in places}
    refused = [str(place) for place, how in found.items() if how is Reach.REFUSED]
    if said:
        how = "refuses" if refused else "swallows"
        return problem(
            "firewall", f"{name} announces itself at {said[0]}, and that port {how} what is sent there by TCP.",
            f"Let the firewall of {name} pass TCP port {said[0].port}, and restart what serves there.",
        )  # fmt: skip
    if refused:
        return note(
            "peers", f"{name} is on, and nothing listens at {', '.join(refused)}.",
            "Start it there: edgellm serve --role verifier --host ITS-ADDRESS",
        )  # fmt: skip
    known = ", ".join(map(str, places)) or "no address is known"
    return note(
        "peers", f"There is no sign of {name} ({known}).",
        "Is it on, and in this network? If it is: client (AP) isolation of the access point keeps devices apart, or "
        "its firewall drops everything. Its address may be new: --peer HOST:PORT.",
    )  # fmt: skip


def _versions(peer: Peer, announcements: Sequence[Hint]) -> Iterator[Finding]:
    for hint in announcements:
        try:
            check_version(hint.protocol, LINK, peer.name)
        except (PeerTooOld, PeerTooNew) as error:
            yield problem("versions", error.what, error.next_step)


def _names(known: Sequence[Interface]) -> str:
    return "; ".join(f"{one.name} ({one.reason})" for one in known)
