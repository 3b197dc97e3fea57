"""The checks of `edgellm doctor`, of this device and its network.

Multicast and TCP fail for different reasons, so each is tried: missing announcements point to client isolation or a
filter in the access point, and a TCP port that does not answer points to a firewall.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import psutil

from edgellm import system
from edgellm.errors import EdgeError, PeerTooNew, PeerTooOld, ProtocolError, TrustUnusable, VerifierUnreachable, size
from edgellm.mesh import ENGINES, part_of
from edgellm.rpc.address import Address
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.interfaces import PortState, chosen_hosts, interfaces, probe_port
from edgellm.rpc.discovery.mdns import Hint, ServiceKind, announce, browse, multicast_error, new_instance
from edgellm.rpc.discovery.peer_probe import probe_address, probe_peers
from edgellm.rpc.protos import check_version, program_version
from edgellm.rpc.trust.handshake import PeerInfo
from edgellm.rpc.trust.identity import Identity, trust_folder
from edgellm.rpc.trust.trust import Peer, Peers, Right, Trust
from edgellm.sleeping import waking
from edgellm.storage.model_files import DEFAULT, hub_cache, is_url, resolve, resolve_pair
from edgellm.system import data_dir


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `topic` is a stable word for scripts; `next_step` is empty if all is well."""

    topic: str
    state: Literal["ok", "note", "problem"]
    what: str
    next_step: str = ""


def _fine(topic: str, what: str) -> Finding:
    return Finding(topic, "ok", what)


def _note(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, "note", what, next_step)


def _problem(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, "problem", what, next_step)


def _told(topic: str, error: EdgeError) -> Finding:
    return _problem(topic, error.what, error.next_step)


GIB = 2**30
_FAST = {
    "avx512_vnni": "AVX512_VNNI", "avx512f": "AVX512", "avx_vnni": "AVX_VNNI", "avx2": "AVX2",
    "i8mm": "MATMUL_INT8", "asimddp": "DOTPROD",
}  # fmt: skip
"""Linux's and llama.cpp's names of instructions for products, the fastest first."""
_DRIVERS = {"nvidia-smi": "CUDA", "rocminfo": "HIP"}
_VULKAN_CARD = re.compile(r"deviceType\s*= PHYSICAL_DEVICE_TYPE_\w+_GPU")  # a driver for the processor is no card


def examine_machine() -> Iterator[Finding]:
    """Yield the findings as they come."""
    yield from _library()
    free, bound = system.available_memory()
    if free < GIB:
        next_step = "Close programs, or use a smaller model; see: edgellm ls"
        yield _problem("memory", f"Only {size(free)} of memory is free: {bound}.", next_step)
    else:
        yield _fine("memory", f"{size(free)} are {bound}; a model must be smaller than that.")
    yield from _disks()
    if not (trust_folder() / "identity.pem").exists():
        yield _note("identity", "This device has no identity yet; pairing creates one.", "Pair a device: edgellm pair")
        return
    try:
        short, peers = Identity.load().id.short, len(Peers().all())
        yield _fine("identity", f"The ID of this device is {short}; {peers} device{'s' * (peers != 1)} paired.")
    except TrustUnusable as error:
        yield _told("identity", error)


def _library() -> Iterator[Finding]:
    try:
        from edgellm.engine.library import how_to_compile
        from edgellm.engine.native import available_threads, description, features
    except EdgeError as error:
        yield _told("llama.cpp", error)
        return

    found, flags = features(), system.processor_flags()
    yield _fine("llama.cpp", f"{description()}.")
    unused = [name for flag, name in _FAST.items() if flag in flags and name not in found.instructions]
    if unused:
        faster = "Compiled for this machine it does, which reads prompts of a Q4_0 model half again as fast:"
        what = f"It makes no use of this processor's {unused[0]}."
        yield _note("llama.cpp", what, f"{faster} {how_to_compile()}")
    yield processor(available_threads(), psutil.cpu_count() or 1)
    yield from _graphics_cards(found.gpu)
    if "rpc" in ENGINES:
        yield rpc_engine()


def _graphics_cards(offloads: bool) -> Iterator[Finding]:
    from edgellm.engine.hardware import offload_devices
    from edgellm.engine.library import how_to_compile

    topic = "graphics card"
    cards = offload_devices()
    for card in cards:
        free = f"{size(card.free)} of {size(card.total)} is free, and layers go there first."
        yield _fine(topic, f"{card.name} ({card.description}): {free}")
    if offloads and not cards:
        what = "llama.cpp was compiled for graphics cards, but finds none: everything runs on the CPU."
        drivers = "Install the card's driver; nvidia-smi, rocminfo or vulkaninfo show whether it is there."
        yield _note(topic, what, drivers)
    if not offloads and (kind := _unused_card()) is not None:
        compile_it = how_to_compile(f"-DGGML_{kind}=on", f"--gpu {kind.lower()}")
        what = "There is a graphics card, but llama.cpp has no backend for it."
        yield _note(topic, what, f"Compile it for the card: {compile_it}")


def _unused_card() -> str | None:
    """Return the backend that llama.cpp would need for this machine's graphics card; None without a card."""
    for program, kind in _DRIVERS.items():
        if shutil.which(program):
            return kind
    with suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["vulkaninfo", "--summary"], capture_output=True, text=True, errors="replace", check=True,
            timeout=10.0,
        )  # fmt: skip
        return "VULKAN" if _VULKAN_CARD.search(shown.stdout) else None
    return None


def rpc_engine() -> Finding:
    """Report whether llama.cpp has its RPC here, by which devices hold models that cannot be cut into layers."""
    backend = part_of("rpc", "backend")
    if backend.is_compiled_in():
        return _fine("rpc engine", "llama.cpp's RPC backend is compiled in.")
    what = "llama.cpp is compiled without its RPC, by which devices share uncut models."
    return _note("rpc engine", what, f"If you need it, compile llama.cpp with it: {backend.how_to_compile()}")


def processor(threads: int, processors: int) -> Finding:
    """Say how many of this machine's processors decode, and how many stay idle."""
    idle = processors - threads
    rest = f"; {idle} of {processors} processors stay idle, as they would slow these down" if idle > 0 else ""
    return _fine("processor", f"Decodes use {threads} threads, one for each performance core they may use{rest}.")


def _disks() -> Iterator[Finding]:
    next_step = "Free some space, or set EDGELLM_HOME and HF_HOME to folders on another disk."
    devices: set[int] = set()
    for name, place in {"edgellm's data": data_dir(), "models": hub_cache()}.items():
        folder = next(one for one in (place, *place.parents) if one.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            yield _note("disk", f"{place} cannot be written.", "Check its permissions, or choose another folder.")
        device = folder.stat().st_dev
        if device in devices:
            continue
        devices.add(device)
        free = shutil.disk_usage(folder).free
        what = f"{size(free)} is free for {name}, at {folder}."
        if free < GIB // 4:
            yield _problem("disk", what, next_step)
        elif free < 4 * GIB:
            yield _note("disk", what, f"This is enough for small models. {next_step}")
        else:
            yield _fine("disk", what)


LISTEN_SECONDS = 2.5


def examine(*, draft: str = DEFAULT, peers: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings of all checks; this takes some seconds, as it listens to the network. Verifiers should have
    the vocabulary of the model `draft`. The addresses `peers`, HOST:PORT or the URL of a stock server, are checked,
    too. Raise InvalidOption for one that is wrong."""
    addresses = [Address.parse(text.partition("#")[0]) for text in peers if not is_url(text)]
    hosts, vocabulary = chosen_hosts(), ""
    draft = str(resolve_pair(draft, None).draft)
    computes = True
    for found in examine_machine():
        yield found
        computes = computes and (found.topic, found.state) != ("llama.cpp", "problem")
    if computes:  # to load a llama.cpp again that could not be loaded may end the process
        from edgellm.engine import Model

        try:
            with Model.load(resolve(draft)) as model:
                vocabulary = model.vocabulary.fingerprint
        except EdgeError as error:
            yield _problem("vocabulary", f"The draft model cannot be read: {error.what}", error.next_step)
        for url in filter(is_url, peers):
            yield from examine_server(url, draft)
    yield from examine_interfaces(hosts)
    try:
        trust = Trust.load()
        trust.peers.all()
    except EdgeError:  # `examine_machine` has reported it
        return
    hints, came_back = listen(trust.identity.id.short, hosts)
    yield from examine_multicast(hints, came_back, trust.identity.id.short, hosts)
    yield from examine_peers(trust, hints, vocabulary)
    for address in addresses:
        yield from examine_address(trust, address, vocabulary)


def examine_server(url: str, draft: str) -> Iterator[Finding]:
    """Report on the server at `url` for drafts of the model `draft`."""
    from edgellm.engine.model import TEXT_ONLY, Model
    from edgellm.upstream.opening import open_upstream

    try:
        with Model.load(resolve(draft), TEXT_ONLY) as text:
            server = open_upstream(url, text)
            server.close()
    except EdgeError as error:
        yield _told("server", error)
        return
    yield _fine("server", f"{server.elsewhere.finding}.")
    for notice in server.elsewhere.notices:
        yield _note("server", notice, "")


def examine_interfaces(hosts: Sequence[str]) -> Iterator[Finding]:
    """Report the networks of this machine, and which of them are used."""
    known = interfaces()
    used = [one for one in known if set(one.hosts) & set(hosts)]
    others = "; ".join(f"{one.name} ({one.reason})" for one in known if one not in used)
    if not used:
        what = f"This machine is not in a home network (interfaces: {others or 'none'})."
        yield _problem("interfaces", what, "Join the home's network, or choose an interface with EDGELLM_INTERFACE.")
    for one in used:
        yield _fine("interfaces", f"{one.name} ({', '.join(one.hosts)}) is used: {one.reason}.")
        yield Finding("waking", *waking(one.name))
    if used and others:
        yield _fine("interfaces", f"Not used: {others}.")


def listen(short: str, hosts: Sequence[str]) -> tuple[list[Hint], bool]:
    """Announce a test service, and return the announcements of devices, and whether the own one came back."""
    instance = new_instance()

    def own(found: Sequence[Hint], _elapsed: float = 0.0) -> bool:
        return any(hint.instance == instance for hint in found)

    with announce(ServiceKind.TEST, short, 1, hosts, instance):
        came_back = own(browse(ServiceKind.TEST, hosts, 4 * LISTEN_SECONDS, own))
    return browse(ServiceKind.DEVICE, hosts, LISTEN_SECONDS), came_back


def examine_multicast(hints: Sequence[Hint], came_back: bool, short: str, hosts: Sequence[str]) -> Iterator[Finding]:
    """Report whether announcements leave this machine, and whether another device announces its identity."""
    for host in hosts:
        if why := multicast_error(host):
            next_step = "Allow UDP port 5353 in the firewall, or use --peer HOST:PORT."
            yield _problem("multicast", f"Announcements on {host} fail: {why}.", next_step)
    if hosts and not came_back:
        next_step = "Allow UDP port 5353 (multicast DNS) in its firewall, or use --peer HOST:PORT."
        yield _problem("multicast", "Announcements of this machine do not come back to it.", next_step)
    others = [hint for hint in hints if not hint.own]
    if came_back:
        count = f"{len(others)} other device{'' if len(others) == 1 else 's'}"
        yield _fine("multicast", f"Announcements leave this machine; {count} found in {LISTEN_SECONDS:g} seconds.")
    for hint in others:
        if hint.short == short:
            yield _problem(
                "identity", f"{hint.addresses[0].host} announces the identity of this device: its files were copied.",
                "On the device with the copy, remove trust/identity.pem from edgellm's data folder, and pair it again.",
            )  # fmt: skip


def examine_peers(trust: Trust, hints: Sequence[Hint], vocabulary: str) -> Iterator[Finding]:
    """Report for each paired device whether it answers, has a compatible version and can verify."""
    for peer, answer in probe_peers(trust, trust.peers.all(), (), hints):
        announcements = [hint for hint in hints if hint.short == peer.id.short]
        if isinstance(answer, EdgeError):
            yield _not_answering(peer, answer, announcements)
        else:
            yield _answering(answer, bool(announcements))
            yield from examine_welcome(answer, vocabulary)
        for hint in announcements:
            try:
                check_version(hint.protocol, peer.name)
            except (PeerTooOld, PeerTooNew) as error:
                yield _told("versions", error)


def examine_address(trust: Trust, address: Address, vocabulary: str) -> Iterator[Finding]:
    """Report on the device at an address that the user gave."""
    try:
        welcomed = probe_address(trust, address)
    except EdgeError as error:
        yield _told("peers", error)
        return
    yield _fine("peers", f"{welcomed.peer.name} answers at {address} in {welcomed.seconds * 1e3:.1f} ms.")
    yield from examine_welcome(welcomed, vocabulary)


def examine_welcome(welcomed: PeerInfo, vocabulary: str) -> Iterator[Finding]:
    """Report on the version, rights and vocabulary of a device."""
    name = welcomed.peer.name
    if welcomed.version != program_version():
        what = f"{name} runs edgellm {welcomed.version}, but this device runs {program_version()}."
        yield _note("versions", what, "Update the older one.")
    if Right.VERIFY not in welcomed.rights:
        next_step = (
            "If it should, grant the right there: edgellm peers grant NAME verify (NAME: this device's name there)"
        )
        yield _note("rights", f"{name} does not verify this device's drafts.", next_step)
    fits = any(offer.vocabulary.hex() == vocabulary for offer in welcomed.offers)
    for offer in welcomed.offers:
        if offer.behind:
            yield _fine("server", f"{name} is a gateway to {offer.model}, by {offer.behind}.")
        if offer.vocabulary.hex() == vocabulary:
            yield _fine("vocabulary", f"{name} verifies with {offer.model}, which has the draft model's vocabulary.")
        elif vocabulary and not fits:  # one fitting model is enough
            yield _note(
                "vocabulary", f"{name} verifies with {offer.model}, which does not have the draft model's vocabulary: "
                "drafts are translated, and fewer are accepted.",
                "Use a draft model of the verifier's family: --draft MODEL.",
            )  # fmt: skip


def _answering(welcomed: PeerInfo, announced_itself: bool) -> Finding:
    where = f"{welcomed.peer.name} answers at {welcomed.address} in {welcomed.seconds * 1e3:.1f} ms"
    if announced_itself:
        return _fine("peers", f"{where}, and its announcements arrive.")
    return _note(
        "multicast", f"{where}, but its announcements do not arrive.",
        f"Use --peer {welcomed.address}. To find it automatically, start it without --no-announce, and switch off "
        "client (AP) isolation and multicast filters in the access point.",
    )  # fmt: skip


def _not_answering(peer: Peer, trouble: EdgeError, announcements: Sequence[Hint]) -> Finding:
    name = peer.name
    if not isinstance(trouble, VerifierUnreachable):
        topic = "versions" if isinstance(trouble, ProtocolError) else "peers"
        return _problem(topic, f"{name}: {trouble.what}", trouble.next_step)
    announced_places = [place for hint in announcements for place in hint.addresses]
    places = list(dict.fromkeys([*announced_places, *peer.addresses]))
    found = {place: run_in_network_loop(probe_port(place)).result() for place in places}
    refused = [str(place) for place, how in found.items() if how is PortState.REFUSED]
    if announced_places:
        place, how = announced_places[0], "refuses TCP connections" if refused else "does not answer TCP connections"
        return _problem(
            "firewall", f"{name} announces itself at {place}, but that port {how}.",
            f"Allow TCP port {place.port} in the firewall of {name}, and restart its server.",
        )  # fmt: skip
    if refused:
        what = f"{name} is on, but nothing listens at {', '.join(refused)}."
        return _note("peers", what, "Start it there: edgellm serve --role verifier --host ITS-ADDRESS")
    return _note(
        "peers", f"{name} does not answer ({', '.join(map(str, places)) or 'no known address'}).",
        "Check that it is on and in this network. If it is, switch off client (AP) isolation in the access point, and "
        "check its firewall. If its address has changed, use --peer HOST:PORT.",
    )  # fmt: skip
