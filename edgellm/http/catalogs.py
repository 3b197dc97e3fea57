"""The models that requests may name: models on this machine, each with a fitting draft model if there is one, and
models with which paired devices verify for this one, under the devices' names."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, time

from edgellm.engine import Model, ModelFile, mtp_obstacle
from edgellm.engine.hardware import Hardware
from edgellm.engine.memory_fit import trained_positions
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import EdgeError, MemoryShort, Stopped, TrustUnusable
from edgellm.http.model_host import Opener, ServedModel
from edgellm.http.schemas.responses import ModelInfo
from edgellm.llm import AUTO, LLM, Named
from edgellm.llm.abilities import ALONE, MOST_OF_VERIFIER, choose_draft
from edgellm.llm.model_loading import EngineConfig, place_pair
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.peer_probe import ProbeResult, probe_peers
from edgellm.rpc.link import Endpoint
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust.trust import Peer, Right, Trust
from edgellm.services.client.verifier_selection import TokenizerFit, fit_of
from edgellm.services.verification_codec import KeptGreeting
from edgellm.spec.params import ReplyOptions
from edgellm.storage.model_files import (
    StoredModel,
    list_models,
    looks_like_path,
    name_of,
    resolve,
    resolve_pair,
    unknown,
)

_LISTED_SECONDS = 60.0  # age of the list of models at which the devices are asked again
_ASKED_SECONDS = 5.0  # least age of the list at which a name makes the server ask again
_log = logging.getLogger(__name__)

Probe = Callable[[], Sequence[ProbeResult]]


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """The options for opening models. There is memory for `replies` at once, and `prompt_cache` bytes on disk."""

    hardware: Hardware
    draft_hardware: Hardware
    options: ReplyOptions
    on_event: Callable[[str], None]
    replies: int = 1
    prompt_cache: int = 0


class PairOpener:
    """Opens a pair of models on this machine, or one whose verifier is on one of `peers`."""

    def __init__(
        self, name: str, draft: Named | None, verifier: Named | None, defaults: ModelDefaults,
        peers: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.name, self._asked, self._defaults, self._peers = name, (draft, verifier), defaults, peers
        self._draft, self._verifier, _ = resolve_pair(draft, verifier)

    def file(self) -> ModelFile:
        return ModelFile.open(resolve(str(self._verifier if self._verifier is not None else self._draft)))

    def check_fits(self, beside: Counter[str]) -> None:
        """Check that there is memory for one reply: other models are closed for no more than that."""
        pair, known = (self._draft, self._verifier), self._defaults
        config = EngineConfig(*pair, hardware=known.hardware, draft_hardware=known.draft_hardware, beside=beside)
        place_pair(*pair, config)

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        def progress(_name: str, _share: float) -> None:
            if is_closing():
                raise Stopped

        known = self._defaults
        pair = LLM.open(
            *self._asked, peers=self._peers, hardware=known.hardware, draft_hardware=known.draft_hardware,
            beside=beside, progress=progress, replies=known.replies, fewer_replies=True,
            prompt_cache=0 if self._peers else known.prompt_cache,
        )  # fmt: skip
        for notice in pair.notices:
            known.on_event(f"{self.name}: {notice}")
        return ServedModel(pair, self.name, options=known.options, replies=pair.replies)


class ModelOpener(PairOpener):
    """Opens a model on this machine as a verifier, with the draft model that is chosen for it, if both fit."""

    def __init__(self, model: StoredModel, defaults: ModelDefaults) -> None:
        self._path, self._all = model.path, defaults
        super().__init__(model.name, None, model.path, self._fitted(None))

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        draft, reason = None, "its MTP layer drafts"
        if mtp_obstacle(self.file().header):
            draft, reason = choose_draft(self._path, lambda name: self._with(name).check_fits(beside))
        served = self._with(draft).open(beside, is_closing)
        with_draft = "without a draft model" if draft is None else f"with the draft model {draft}"
        self._defaults.on_event(f"{self.name} is open {with_draft}: {reason}.")
        return served

    def _with(self, draft: str | None) -> PairOpener:
        return PairOpener(self.name, draft, self._path, self._fitted(draft))

    def _fitted(self, draft: str | None) -> ModelDefaults:
        """Return the defaults with contexts that are no longer than the models were trained for."""
        drafts = self._path if draft is None else resolve(draft)
        hardware, draft_hardware = _within(self._all.hardware, self._path), _within(self._all.draft_hardware, drafts)
        return replace(self._all, hardware=hardware, draft_hardware=draft_hardware)


def _within(hardware: Hardware, path: Path) -> Hardware:
    """Return `hardware` with a context that is no longer than the model at `path` was trained for."""
    trained = trained_positions(ModelFile.open(path).header)
    if hardware.n_ctx is None or trained is None or hardware.n_ctx <= trained:
        return hardware
    return replace(hardware, n_ctx=trained)


@dataclass(frozen=True, slots=True)
class PairedModel:
    """A model with which the paired device at `address` verifies for this one."""

    peer: Peer
    offer: Offer
    address: Address


def probe() -> Sequence[ProbeResult]:
    """Ask every paired device at its last address. Raises TrustUnusable."""
    trust = Trust.load()
    return probe_peers(trust, trust.peers.all(), ())


def verifying(results: Sequence[ProbeResult]) -> dict[str, PairedModel]:
    """Return the models that verify for this device; of models with the same name, the quickest to reach. Those of
    devices that sleep are their last ones."""
    found: dict[str, PairedModel] = {}
    answers = [answer for _, answer in results if not isinstance(answer, EdgeError)]
    for info in sorted(answers, key=lambda info: info.seconds):
        for offer in info.offers if Right.VERIFY in info.rights else ():
            found.setdefault(offer.model, PairedModel(info.peer, offer, info.address))
    for peer in (peer for peer, answer in results if isinstance(answer, EdgeError) and peer.addresses):
        if (kept := KeptGreeting.of(peer.id)) is not None and Right.VERIFY in peer.granted:
            told = kept.reply
            offer = Offer(model=told.model[:200], vocabulary=told.vocabulary, tokenizer=told.tokenizer)
            found.setdefault(offer.model, PairedModel(peer, offer, peer.addresses[0]))
    return found


class PairedOpener:
    """Opens a verifier on a paired device, with a draft model here that has its tokenizer, if there is one."""

    def __init__(self, model: PairedModel, defaults: ModelDefaults) -> None:
        self.name = model.offer.model
        self._model, self._defaults = model, defaults
        self._draft: Path | None = None  # None until chosen; chosen again where the file is missing

    def file(self) -> None:
        """Return None: the file that decides the text is on the other device."""

    def check_fits(self, beside: Counter[str]) -> None:
        if (draft := self._chosen()) is not None:
            PairOpener(self.name, draft, AUTO, self._defaults).check_fits(beside)

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        draft, peer = self._chosen(), self._model.peer
        pair = PairOpener(self.name, draft or "none", AUTO, self._defaults, [f"{peer.id}#{self.name}"])
        served = pair.open(beside, is_closing)
        drafts = f"with the draft model {name_of(draft)} here" if draft is not None else f"and writes alone: {ALONE}"
        self._defaults.on_event(f"{self.name} is open on {peer.name} {drafts}.")
        return served

    def _chosen(self) -> Path | None:
        """Return the smallest model here with the verifier's tokenizer and at most half its size, if there is one."""
        if self._draft is not None and self._draft.exists():
            return self._draft
        offer, peer, self._draft = self._model.offer, self._model.peer, None
        where = Endpoint(peer.name, self._model.address, Trust.load(), peer.id, offer.model)
        most = MOST_OF_VERIFIER * offer.size if offer.size and not offer.behind else float("inf")
        for path in [one.path for one in sorted(list_models(), key=lambda one: one.size) if one.size <= most]:
            with suppress(EdgeError), Model.load(path, TEXT_ONLY) as model:
                if fit_of(model.vocabulary, where, offer) is TokenizerFit.SAME:
                    self._draft = path
                    break
        return self._draft


class NamedModels:
    """The models of `edgellm ls`, and those of paired devices, which are asked in the background."""

    def __init__(self, defaults: ModelDefaults, ask: Probe = probe) -> None:
        self._defaults, self._ask = defaults, ask
        self._paired: dict[str, PairedModel] = {}
        self._asked_at = float("-inf")
        self._asking = threading.Lock()
        self.infos()

    def find(self, name: str) -> Opener:
        """Return the model that a name means, of this machine if it fits here, but no file of another folder. Raises
        ModelNotFound."""
        models = list_models()
        found = next((model for model in models if model.name == name), None)
        if found is None and not looks_like_path(name):
            with suppress(EdgeError):
                path = resolve(name)
                found = next((model for model in models if path in model.paths), None)
        here = None if found is None else ModelOpener(found, self._defaults)
        if here is not None:
            with suppress(MemoryShort):
                here.check_fits(Counter())
                return here
        if name not in self._paired:
            self._refresh(_ASKED_SECONDS)
        if name in self._paired:
            return PairedOpener(self._paired[name], self._defaults)
        if here is None:
            raise unknown(name, [info.id for info in self.infos()])
        return here  # opening it says why it does not fit

    def infos(self) -> Sequence[ModelInfo]:
        """Return all models, marked as not loaded; models of paired devices as last listed."""
        if monotonic() - self._asked_at > _LISTED_SECONDS:
            threading.Thread(target=self._refresh, args=(_LISTED_SECONDS,), daemon=True).start()
        found = {name: (int(time()), model.peer.name) for name, model in self._paired.items()}
        here = {model.name: (int(model.path.stat().st_mtime), None) for model in list_models()}
        return [
            ModelInfo(id=name, created=created, context_length=None, loaded=False, device=device)
            for name, (created, device) in {**here, **found, **here}.items()
        ]

    def _refresh(self, seconds: float) -> None:
        """Ask the devices, if none was asked within `seconds`."""
        with self._asking:
            if monotonic() - self._asked_at <= seconds:
                return
            try:
                asked = self._ask()
                away = {
                    peer.id for peer, answer in asked if isinstance(answer, EdgeError)
                }  # They may sleep, and be woken up.
                known = {name: model for name, model in self._paired.items() if model.peer.id in away}
                self._paired = known | verifying(asked)
            except TrustUnusable as error:
                _log.warning("paired devices cannot be asked for their models: %s", error)
            self._asked_at = monotonic()
