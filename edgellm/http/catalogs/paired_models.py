"""The models with which paired devices verify for this one, under the same names as on those devices."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING

from edgellm.engine import Model
from edgellm.errors import EdgeError, ModelNotFound, Stopped, TrustUnusable, VocabularyMismatch
from edgellm.http.catalogs.local_models import LocalModels, ModelDefaults
from edgellm.http.model_host import Opener, ServedModel
from edgellm.http.schemas.responses import ModelInfo
from edgellm.llm import AUTO, LLM
from edgellm.llm.abilities import MOST_OF_VERIFIER
from edgellm.llm.model_loading import place_draft
from edgellm.rpc.address import ModelAddress
from edgellm.rpc.trust.peer_store import Peer
from edgellm.rpc.trust.rights import Right
from edgellm.storage import list_models, name_of
from edgellm.storage.model_names import unknown

if TYPE_CHECKING:
    from edgellm.rpc.discovery.peer_probe import ProbeResult
    from edgellm.rpc.trust.handshake import OfferedModel

_log = logging.getLogger(__name__)

_LISTED_SECONDS = 60.0  # for which a list of the devices' models is shown before they are asked again
_ASKED_SECONDS = 5.0  # within which no name makes the server ask them again

Probe = Callable[[], "Sequence[ProbeResult]"]


@dataclass(frozen=True, slots=True)
class PairedModel:
    """A model with which a paired device, that is at `address`, verifies for this one."""

    peer: Peer
    offer: OfferedModel
    address: ModelAddress


def probe() -> Sequence[ProbeResult]:
    """Ask every paired device at its last address. Raises TrustUnusable."""
    # gRPC is slow to import, so a server starts before it is
    from edgellm.rpc.discovery.peer_probe import probe_peers
    from edgellm.rpc.trust.trust import Trust

    trust = Trust.load()
    return probe_peers(trust, trust.peers.all(), ())


def verifying(results: Sequence[ProbeResult]) -> list[PairedModel]:
    """Return the models with which this device may have drafts verified, of several of one name the quickest to
    reach."""
    infos = sorted((one.info for one in results if one.info is not None), key=lambda info: info.seconds)
    found: dict[str, PairedModel] = {}
    for info in infos:
        if Right.VERIFY in info.rights:
            for offer in info.offers:
                if offer.role == "verifier":
                    address = ModelAddress(info.address, offer.model)
                    found.setdefault(offer.model, PairedModel(info.peer, offer, address))
    return list(found.values())


class PairedOpener:
    """Opens a verifier on a paired device, with a draft model here that has its tokenizer, if there is one."""

    def __init__(self, model: PairedModel, defaults: ModelDefaults) -> None:
        self.name = model.offer.model
        self._model, self._defaults = model, defaults
        self._draft: Path | None = None  # once it was chosen; a missing file is chosen again

    def file(self) -> None:
        """Return None: the file that decides the text is on the other device."""

    def check_fits(self, beside: Counter[str]) -> None:
        if (draft := self._chosen()) is not None:
            place_draft(draft, self._defaults.draft_hardware, Counter(beside), None)

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        """Raises what `remote_verifier` raises."""

        def progress(_name: str, _share: float) -> None:
            if is_closing():
                raise Stopped

        draft, peer, defaults = self._chosen(), self._model.peer, self._defaults
        pair = LLM.open(
            draft or "none", AUTO, peers=[f"{peer.id}#{self.name}"], hardware=defaults.hardware, progress=progress,
            draft_hardware=defaults.draft_hardware, beside=beside, replies=defaults.replies, fewer_replies=True,
        )  # fmt: skip
        for notice in pair.notices:
            defaults.on_event(f"{self.name}: {notice}")
        drafts = f"with the draft model {name_of(draft)} here" if draft is not None else f"and writes alone: {_ALONE}"
        defaults.on_event(f"{self.name} is open on {peer.name} {drafts}.")
        return ServedModel(pair, self.name, in_turns=False, options=defaults.options, replies=pair.replies)

    def _chosen(self) -> Path | None:
        if self._draft is None or not self._draft.exists():
            self._draft = self._choose_draft()
        return self._draft

    def _choose_draft(self) -> Path | None:
        """Return the smallest model here that has the verifier's tokenizer, which is compared across the link, and at
        most half of its size; None where there is none."""
        from edgellm.rpc.trust.trust import Trust
        from edgellm.services.client.verifier_client import RemoteVerifier

        offer, trust = self._model.offer, Trust.load()
        most = MOST_OF_VERIFIER * offer.size if offer.size and not offer.behind else None
        for path, size in sorted(((one.path, one.size) for one in list_models()), key=lambda one: one[1]):
            if most is not None and size > most:
                break
            with suppress(EdgeError), Model.load(path, text_only=True) as model:
                vocabulary = model.vocabulary
                with suppress(VocabularyMismatch):
                    RemoteVerifier(self._model.address, vocabulary, trust=trust, device=self._model.peer.id).close()
                    return path
        return None


_ALONE = "no model here has its tokenizer and at most half of its size"


class PairedModels:
    """The models of this machine, and those of paired devices. What both have is opened here.

    The devices are asked in the background, first when the list is made, so that nobody waits for one that is off.
    """

    def __init__(self, local: LocalModels, defaults: ModelDefaults, ask: Probe = probe) -> None:
        self._local, self._defaults, self._ask = local, defaults, ask
        self._models: list[PairedModel] = []
        self._asked_at = float("-inf")
        self._asking = threading.Lock()
        self.infos()

    def find(self, name: str) -> Opener:
        """Return the model that a name means, of this machine before others. Raises ModelNotFound."""
        try:
            return self._local.find(name)
        except ModelNotFound:
            pass
        if not (found := self._named(name)):
            self._refresh(_ASKED_SECONDS)
            found = self._named(name)
        if not found:
            raise unknown(name, [info.id for info in self.infos()])
        return PairedOpener(found[0], self._defaults)

    def infos(self) -> Sequence[ModelInfo]:
        """Return all models, none of them as loaded: those of paired devices as they were at the last time."""
        if monotonic() - self._asked_at > _LISTED_SECONDS:
            threading.Thread(target=self._refresh, args=(_LISTED_SECONDS,), daemon=True).start()
        local = self._local.infos()
        here = {info.id for info in local}
        return [*local, *(_info(one) for one in self._models if one.offer.model not in here)]

    def _named(self, name: str) -> list[PairedModel]:
        return [one for one in self._models if one.offer.model == name]

    def _refresh(self, seconds: float) -> None:
        """Ask the devices, if none was asked within `seconds`."""
        with self._asking:
            if monotonic() - self._asked_at <= seconds:
                return
            try:
                self._models = verifying(self._ask())
            except TrustUnusable as error:
                _log.warning("paired devices cannot be asked for their models: %s", error)
            self._asked_at = monotonic()


def _info(model: PairedModel) -> ModelInfo:
    return ModelInfo(
        id=model.offer.model, created=int(time()), context_length=None, loaded=False, device=model.peer.name
    )
