"""The checks of `edgellm doctor` that need the network: interfaces, multicast, and each paired device; all checks.

Multicast and TCP fail for different reasons, so each is tried: missing announcements point to client isolation or a
filter in the access point, and a TCP port that does not answer points to a firewall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgellm.diagnostics.local import Finding, examine_machine, fine, note, problem
from edgellm.errors import EdgeError, PeerTooNew, PeerTooOld, ProtocolError, VerifierUnreachable
from edgellm.llm.model_loading import is_url
from edgellm.rpc.address import Address, ModelAddress
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.interfaces import PortState, chosen_hosts, interfaces, probe_port
from edgellm.rpc.discovery.mdns import Hint, ServiceKind, announce, browse, multicast_error, new_instance
from edgellm.rpc.discovery.peer_probe import ProbeResult, probe_address, probe_peers
from edgellm.rpc.trust.handshake import PeerInfo
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import DEVICES_PROTOCOL, check_version, program_version
from edgellm.storage.default_pair import DEFAULT, resolve_pair

LISTEN_SECONDS = 2.5
_LONGEST_LISTEN = 10.0  # longest wait for this machine's own announcement
_SKEW = 120.0  # seconds by which two clocks may differ


def examine(*, draft: str = DEFAULT, peers: Sequence[str] = (), interfaces: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings of all checks; this takes some seconds, as it listens to the network.

    Args:
        draft: the model whose vocabulary verifiers should have.
        peers: addresses (HOST:PORT, or the URL of a stock server) to check too; a model behind # is left out of
            HOST:PORT, as all that are served there are named.
        interfaces: names or addresses of the networks to use, instead of those of the home.

    Raises:
        InvalidOption: one of `peers` is not an address, or there is no such interface.
    """
    from edgellm.engine import Model
    from edgellm.storage import resolve

    addresses = [ModelAddress.parse(text).address for text in peers if not is_url(text)]
    hosts, vocabulary = chosen_hosts(interfaces), ""
    draft = str(resolve_pair(draft, None).draft)
    yield from examine_machine()
    try:
        with Model.load(resolve(draft)) as model:
            vocabulary = model.vocabulary.fingerprint
    except EdgeError as error:
        yield problem("vocabulary", f"The draft model cannot be read: {error.what}", error.next_step)
    for url in filter(is_url, peers):
        yield from examine_server(url, draft)
    yield from examine_interfaces(hosts)
    try:
        trust = Trust.load()
        trust.peers.all()
    except EdgeError:  # `examine_machine` has reported it
        return
    received = listen(trust.identity.id.short, hosts)
    yield from examine_multicast(received, trust.identity.id.short, hosts)
    yield from examine_peers(trust, received, vocabulary)
    for address in addresses:
        yield from examine_address(trust, address, vocabulary)


def examine_server(url: str, draft: str) -> Iterator[Finding]:
    """Report on the server at `url` for drafts of the model `draft`."""
    from edgellm.engine.model import TEXT_ONLY, Model
    from edgellm.storage import resolve
    from edgellm.upstream.opening import open_upstream

    try:
        with Model.load(resolve(draft), TEXT_ONLY) as text:
            opened = open_upstream(url, text)
            opened.verifier.close()
    except EdgeError as error:
        yield problem("server", error.what, error.next_step)
        return
    yield fine("server", f"{opened.finding}.")
    for notice in opened.notices:
        yield note("server", notice, "")


@dataclass(frozen=True, slots=True)
class ReceivedAnnouncements:
    """The announcements received while listening, and whether this machine's own came back."""

    hints: tuple[Hint, ...]
    own_came_back: bool


def examine_interfaces(hosts: Sequence[str]) -> Iterator[Finding]:
    """Report the networks of this machine, and which of them are used."""
    known = interfaces()
    used = [one for one in known if set(one.hosts) & set(hosts)]
    others = "; ".join(f"{one.name} ({one.reason})" for one in known if one not in used)
    if not used:
        what = f"This machine is not in a home network (interfaces: {others or 'none'})."
        yield problem("interfaces", what, "Join the home's network, or choose an interface with --interface.")
    for one in used:
        yield fine("interfaces", f"{one.name} ({', '.join(one.hosts)}) is used: {one.reason}.")
    if used and others:
        yield fine("interfaces", f"Not used: {others}.")


def listen(short: str, hosts: Sequence[str]) -> ReceivedAnnouncements:
    """Announce a test service, note whether the announcement comes back, and listen for devices."""
    instance = new_instance()

    def own(found: Sequence[Hint]) -> bool:
        return any(hint.instance == instance for hint in found)

    with announce(ServiceKind.TEST, short, 1, hosts, instance):
        came_back = own(browse(ServiceKind.TEST, hosts, LISTEN_SECONDS, own, max_seconds=_LONGEST_LISTEN))
    return ReceivedAnnouncements(tuple(browse(ServiceKind.DEVICE, hosts, LISTEN_SECONDS)), came_back)


def examine_multicast(received: ReceivedAnnouncements, short: str, hosts: Sequence[str]) -> Iterator[Finding]:
    """Report whether announcements leave this machine, and whether another device announces its identity."""
    for host in hosts:
        if why := multicast_error(host):
            next_step = "Allow UDP port 5353 in the firewall, or use --peer HOST:PORT."
            yield problem("multicast", f"Announcements on {host} fail: {why}.", next_step)
    if hosts and not received.own_came_back:
        next_step = "Allow UDP port 5353 (multicast DNS) in its firewall, or use --peer HOST:PORT."
        yield problem("multicast", "Announcements of this machine do not come back to it.", next_step)
    others = [hint for hint in received.hints if not hint.own]
    if received.own_came_back:
        count = f"{len(others)} other device{'' if len(others) == 1 else 's'}"
        yield fine("multicast", f"Announcements leave this machine; {count} found in {LISTEN_SECONDS:g} seconds.")
    for hint in others:
        if hint.short == short:
            yield problem(
                "identity", f"{hint.addresses[0].host} announces the identity of this device: its files were copied.",
                "On the device with the copy, remove trust/identity.pem from edgellm's data folder, and pair it again.",
            )  # fmt: skip


def examine_peers(trust: Trust, received: ReceivedAnnouncements, vocabulary: str) -> Iterator[Finding]:
    """Report for each paired device whether it answers, has a compatible version and can verify."""
    for answer in probe_peers(trust, trust.peers.all(), (), received.hints):
        announcements = [hint for hint in received.hints if hint.short == answer.peer.id.short]
        if answer.info is None:
            yield _not_answering(answer, announcements)
        else:
            yield _answering(answer.info, bool(announcements or answer.announced))
            yield from examine_welcome(answer.info, vocabulary)
        for hint in announcements:
            try:
                check_version(hint.protocol, DEVICES_PROTOCOL, answer.peer.name)
            except (PeerTooOld, PeerTooNew) as error:
                yield problem("versions", error.what, error.next_step)


def examine_address(trust: Trust, address: Address, vocabulary: str) -> Iterator[Finding]:
    """Report on the device at an address that the user gave."""
    try:
        welcomed = probe_address(trust, address)
    except EdgeError as error:
        yield problem("peers", error.what, error.next_step)
        return
    yield fine("peers", f"{welcomed.peer.name} answers at {address} in {welcomed.seconds * 1e3:.1f} ms.")
    yield from examine_welcome(welcomed, vocabulary)


def examine_welcome(welcomed: PeerInfo, vocabulary: str) -> Iterator[Finding]:
    """Report on the clock, version, rights and vocabulary of a device."""
    name, ahead = welcomed.peer.name, welcomed.clock_ahead
    if abs(ahead) > _SKEW:
        way = "ahead of" if ahead > 0 else "behind"
        what = f"The clock of {name} is {abs(ahead) / 60:.0f} minutes {way} this one."
        yield note("clock", what, "Turn on network time on both devices.")
    if welcomed.version != program_version():
        what = f"{name} runs edgellm {welcomed.version}, but this device runs {program_version()}."
        yield note("versions", what, "Update the older one.")
    if Right.VERIFY not in welcomed.rights:
        next_step = (
            "If it should, grant the right there: edgellm peers grant NAME verify (NAME: this device's name there)"
        )
        yield note("rights", f"{name} does not verify this device's drafts.", next_step)
    offers = [offer for offer in welcomed.offers if offer.role == "verifier"]
    fits = any(offer.vocabulary == vocabulary for offer in offers)
    for offer in offers:
        if offer.behind:
            yield fine("server", f"{name} is a gateway to {offer.model}, by {offer.behind}.")
        if offer.vocabulary == vocabulary:
            yield fine("vocabulary", f"{name} verifies with {offer.model}, which has the draft model's vocabulary.")
        elif vocabulary and not fits:  # one fitting model is enough
            yield note(
                "vocabulary", f"{name} verifies with {offer.model}, which does not have the draft model's vocabulary: "
                "drafts are translated, and fewer are accepted.",
                "Use a draft model of the verifier's family: -m MODEL.",
            )  # fmt: skip


def _answering(welcomed: PeerInfo, announced_itself: bool) -> Finding:
    where = f"{welcomed.peer.name} answers at {welcomed.address} in {welcomed.seconds * 1e3:.1f} ms"
    if announced_itself:
        return fine("peers", f"{where}, and its announcements arrive.")
    return note(
        "multicast", f"{where}, but its announcements do not arrive.",
        f"Use --peer {welcomed.address}. To find it automatically, start it without --no-announce, and switch off "
        "client (AP) isolation and multicast filters in the access point.",
    )  # fmt: skip


def _not_answering(answer: ProbeResult, announcements: Sequence[Hint]) -> Finding:
    """Find out by TCP why a device does not answer."""
    name, trouble = answer.peer.name, answer.error
    if trouble is not None and not isinstance(trouble, VerifierUnreachable):
        topic = "versions" if isinstance(trouble, ProtocolError) else "peers"
        return problem(topic, f"{name}: {trouble.what}", trouble.next_step)
    announced_places = [place for hint in announcements for place in hint.addresses]
    places = list(dict.fromkeys([*announced_places, *answer.peer.addresses]))
    found = {place: run_in_network_loop(probe_port(place)).result() for place in places}
    refused = [str(place) for place, how in found.items() if how is PortState.REFUSED]
    if announced_places:
        place, how = announced_places[0], "refuses TCP connections" if refused else "does not answer TCP connections"
        return problem(
            "firewall", f"{name} announces itself at {place}, but that port {how}.",
            f"Allow TCP port {place.port} in the firewall of {name}, and restart its server.",
        )  # fmt: skip
    if refused:
        what = f"{name} is on, but nothing listens at {', '.join(refused)}."
        return note("peers", what, "Start it there: edgellm serve --role verifier --host ITS-ADDRESS")
    return note(
        "peers", f"{name} does not answer ({', '.join(map(str, places)) or 'no known address'}).",
        "Check that it is on and in this network. If it is, switch off client (AP) isolation in the access point, and "
        "check its firewall. If its address has changed, use --peer HOST:PORT.",
    )  # fmt: skip
