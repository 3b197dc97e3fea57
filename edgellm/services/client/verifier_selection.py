"""`--verifier auto`: the best of the paired devices that verify for the draft model, and why; and the tokenizer of a
verifier on another device: fetched once, checked, and kept by its hash."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from pathlib import Path

import grpc
import grpc.aio

from edgellm import errors
from edgellm.engine import Model, Vocabulary
from edgellm.engine.gguf.writer import MAX_TOKENIZER
from edgellm.engine.model import load_tokenizer
from edgellm.rpc.address import Address
from edgellm.rpc.channel import READ_TIMEOUT_SECONDS, TOKENIZER, run_in_network_loop
from edgellm.rpc.discovery.interfaces import chosen_hosts, shared_networks
from edgellm.rpc.discovery.peer_probe import probe_address, probe_peers
from edgellm.rpc.link import Endpoint
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.protos import parse_message
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust.handshake import NothingListens, PeerInfo
from edgellm.rpc.trust.trust import Peer, Right, Trust
from edgellm.services.verification_codec import KeptGreeting, printable
from edgellm.state import keep_recent, write_state
from edgellm.system import cache_dir


class TokenizerFit(IntEnum):
    """The fit of a verifier's tokenizer: SAME as the draft model's up to unused tokens, TRANSLATED for drafts, or NONE:
    another one, which the verifier does not send."""

    NONE = 0
    TRANSLATED = 1
    SAME = 2


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A model of a paired device that can verify, `where` it is named only if the device has several."""

    info: PeerInfo
    offer: Offer
    where: Endpoint
    fit: TokenizerFit

    @property
    def order(self) -> tuple[int, float, float]:
        return -self.fit, -inf if self.offer.behind else -self.offer.size, self.info.seconds

    def __str__(self) -> str:
        offer = self.offer
        what = f"by {offer.behind}" if offer.behind else f"{offer.size / 1e6:,.1f} MB"
        tokenizer = ", with another tokenizer" if self.fit is TokenizerFit.TRANSLATED else ""
        return f"{offer.model}, {what}{tokenizer}, {self.info.seconds * 1e3:.1f} ms round trip"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The device and model that verify drafts, and the reason in a sentence or two. The device may be `asleep`: then
    the draft model begins alone, while it is woken up."""

    where: Endpoint
    reason: str
    asleep: bool = False


def choose_verifier(
    trust: Trust,
    ours: Vocabulary,
    named: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    wakes: TokenizerFit | None = None,
) -> Chosen:
    """Choose the largest model in this vocabulary that a paired device lets this one use; of equals the one with the
    shortest round trip. A gateway comes before all others: the size of its model is not known. Without such a model, a
    model with another tokenizer is chosen, for which drafts are translated. `named` are the devices to choose from:
    names, IDs, or HOST:PORT, and after a # the wanted model. `hosts`: interface addresses to listen on for
    announcements, by default all that lead to other home devices. Where none answers, a device is chosen that can be
    woken up and has verified before, if it fits as well as `wakes` says. Raises PairingRequired: no device is paired;
    NotPaired: one of the names or IDs in `named` is no paired device's; VerifierUnreachable: none of them can be used;
    says why each cannot."""
    trust.require_peers(_address(named[0].partition("#")[0]) if named else None)
    peers: list[tuple[Peer, str]] = [] if named else [(peer, "") for peer in trust.peers.all()]
    asked: list[tuple[str, str, PeerInfo | errors.EdgeError]] = []  # name, wanted model, and answer of each
    for name, _, model in (one.partition("#") for one in named):
        if (address := _address(name)) is None:
            peers.append((trust.peers.find(name), model))
            continue
        try:
            info = probe_address(trust, address)
            asked.append((info.peer.name, model, info))
        except errors.EdgeError as error:
            if len(named) == 1:
                raise
            asked.append((name, model, error))
    asleep = [one for peer, model in peers if wakes and (one := _sleeper(trust, peer, ours.fingerprint, model, wakes))]
    near = () if asleep else chosen_hosts() if hosts is None else hosts  # A sleeper is looked for meanwhile.
    answers = probe_peers(trust, [peer for peer, _ in peers], near) if peers else []
    asked += [(peer.name, model, answer) for (peer, answer), (_, model) in zip(answers, peers, strict=True)]
    found = [one for name, model, answer in asked for one in _candidates(name, model, answer, trust, ours)]
    suitable = sorted((one for one in found if isinstance(one, _Candidate)), key=lambda one: one.order)
    unsuitable = [why for why in found if isinstance(why, str)]
    silent = (one for one in answers if isinstance(one[1], errors.VerifierUnreachable))
    off = {peer.id for peer, answer in silent if not isinstance(answer, NothingListens)}
    if not suitable and (woken := next((one for one in asleep if one.where.device in off), None)):
        return woken
    if not suitable:
        raise errors.VerifierUnreachable(
            f"No paired device can verify: {'; '.join(unsuitable)}.",
            "Start one there with `edgellm serve --role verifier --host ITS-ADDRESS`, wake the device up with `edgellm"
            " peers wake`, or run `edgellm doctor`.",
        )
    chosen, *others = suitable
    best = chosen.info
    rest = "; ".join([*(f"{other.info.peer.name}: {other}" for other in others), *unsuitable])
    reason = f"{best.peer.name} ({best.peer.id.short}) at {best.address} verifies: {chosen}."
    return Chosen(chosen.where, f"{reason} Not taken: {rest}." if rest else reason)


def _sleeper(trust: Trust, peer: Peer, vocabulary: str, wanted: str, least: TokenizerFit) -> Chosen | None:
    """Return the verifier of a device that can be woken up, of the `least` fit; of the `wanted` model if one is
    named."""
    kept = KeptGreeting.of(peer.id)
    if kept is None or not (peer.wakes and peer.addresses and shared_networks(peer.cards)):
        return None
    reply, where = kept.reply, Endpoint(peer.name, peer.addresses[0], trust, peer.id, kept.asked)
    other = TokenizerFit.TRANSLATED if reply.tokenizer else TokenizerFit.NONE
    fit = TokenizerFit.SAME if vocabulary == reply.vocabulary.hex() else other
    if fit < least or wanted not in ("", kept.asked, reply.model):
        return None
    reason = f"{peer.name} ({peer.id.short}) does not answer, and is woken up to verify: {reply.model}."
    return Chosen(where, f"{reason} Until then the draft model writes alone.", asleep=True)


def _candidates(
    name: str, wanted: str, answer: PeerInfo | errors.EdgeError, trust: Trust, ours: Vocabulary
) -> Sequence[_Candidate | str]:
    """Return the models of a device that can verify, or the reason why there is none; only the `wanted` model if one is
    named."""
    if isinstance(answer, errors.EdgeError):
        return [f"{name} cannot be reached ({answer.what.rstrip('.')})"]
    if Right.VERIFY not in answer.rights:
        return [f"{name} has not granted this device the right to verify (there: edgellm peers grant NAME verify)"]
    if not answer.offers:
        return [f"{name} serves no verifier"]
    offers = [offer for offer in answer.offers if wanted in ("", offer.model)]
    if not offers:
        return [f"{name} serves {_names(answer.offers)}, but not {wanted}"]
    same = [one for one in offers if one.vocabulary.hex() == ours.fingerprint]
    found = []
    for one in same or offers:
        where = Endpoint(name, answer.address, trust, answer.peer.id, one.model if len(answer.offers) > 1 else "")
        if fit := fit_of(ours, where, one):
            found.append(_Candidate(answer, one, where, fit))
    return found or [f"{name} serves {_names(offers)}, which has a different tokenizer, and does not send it"]


def _names(offers: Sequence[Offer]) -> str:
    return ", ".join(offer.model for offer in offers)


def _address(name: str) -> Address | None:
    with suppress(errors.InvalidOption):
        return Address.parse(name)
    return None


def fit_of(ours: Vocabulary, where: Endpoint, offer: Offer) -> TokenizerFit:
    """Return how the tokenizer of a paired device's verifier fits this vocabulary; it is fetched where they differ, and
    may do so in unused tokens only."""
    if offer.vocabulary.hex() == ours.fingerprint:
        return TokenizerFit.SAME
    sha256 = offer.tokenizer.hex()
    if sha256:
        with suppress(errors.EdgeError), open_tokenizer(where, sha256) as theirs:
            return TokenizerFit.SAME if ours.different(theirs.vocabulary) is None else TokenizerFit.TRANSLATED
    return TokenizerFit.NONE


MOST_KEPT = 256 * 2**20
"""Bytes of all tokenizers that are kept, the least recently used leaving first."""

OnProgress = Callable[[float], None]


def open_tokenizer(where: Endpoint, sha256: str, *, progress: OnProgress | None = None) -> Model:
    """Return the tokenizer with this hash (hex) of the verifier at `where`, as a model without weights; it is fetched
    unless it is kept already. `progress` is called with the share that has come. Raises ProtocolError: the verifier
    sends another tokenizer, which is not kept; VerifierUnreachable, NotPermitted: it sends nothing; NotPaired,
    PairingRequired, IdentityClash: it is not a device that trusts this one, and is trusted; InvalidOption: there is no
    room to keep it; EngineFailed: its trial in a child process could not be made."""
    path = _kept(sha256)
    if path.exists():
        with suppress(errors.ModelCorrupt, errors.ModelUnsupported):  # it is damaged, and fetched again
            model = load_tokenizer(path)
            os.utime(path)
            return model
    data = run_in_network_loop(_fetch(where, progress)).result()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise unusable(where, "it is not the one that was announced")
    try:
        write_state(path, data)
    except OSError as error:
        raise errors.InvalidOption(
            f"The tokenizer of the verifier at {where} cannot be kept: {error}.", f"Make room in {path.parent}."
        ) from error
    keep_recent(path.parent.glob("*.gguf"), MOST_KEPT)
    try:
        return load_tokenizer(path)
    except (errors.ModelCorrupt, errors.ModelUnsupported) as error:
        forget_tokenizer(sha256)
        raise unusable(where, error.what.replace(str(path), "it")) from None


def forget_tokenizer(sha256: str) -> None:
    with suppress(OSError):
        _kept(sha256).unlink()


def _kept(sha256: str) -> Path:
    return cache_dir() / "tokenizers" / f"{sha256}.gguf"


def unusable(where: Endpoint, why: str) -> errors.ProtocolError:
    """Return the error for a tokenizer that differs from its verifier's claim; `why` is a clause."""
    return errors.ProtocolError(
        f"The tokenizer that the verifier at {where} sends cannot be used: {why.rstrip('.')}.",
        f"{errors.SAME_VERSION} Or choose a draft model with the verifier's tokenizer.",
    )


async def _fetch(where: Endpoint, progress: OnProgress | None) -> bytes:
    """Return the tokenizer that the verifier sends, at most `MAX_TOKENIZER` bytes."""
    data, size = bytearray(), 1
    async with await where.connect() as channel:
        call = channel.unary_unary(TOKENIZER, pb.TokenizerRequest.SerializeToString, bytes)
        while len(data) < size:
            request = pb.TokenizerRequest(model=where.model, offset=len(data))
            try:
                part = parse_message(pb.TokenizerPart, await call(request, timeout=READ_TIMEOUT_SECONDS))
            except grpc.aio.AioRpcError as error:
                raise _refused(where, error) from None
            if not part.data:
                raise unusable(where, "a part of it is empty")
            data += part.data
            size = part.size
            if max(size, len(data)) > MAX_TOKENIZER:
                raise unusable(where, f"it has more than {MAX_TOKENIZER} bytes")
            if progress is not None:
                progress(min(1.0, len(data) / max(1, size)))
    return bytes(data)


def _refused(where: Endpoint, error: grpc.aio.AioRpcError) -> errors.EdgeError:
    why = printable(error.details() or error.code().name)
    if error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return errors.NotPermitted(f"The verifier at {where} refuses.", why)
    return errors.VerifierUnreachable(
        f"The verifier at {where} does not send its tokenizer ({why.rstrip('.')}).",
        "Try again, or choose a draft model with the verifier's tokenizer.",
    )
