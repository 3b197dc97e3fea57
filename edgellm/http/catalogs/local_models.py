"""The models on this machine that requests may name: each verifies, with a draft model that fits it if there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.engine import ModelFile, mtp_support
from edgellm.engine.hardware import Hardware
from edgellm.engine.memory_fit import trained_positions
from edgellm.errors import EdgeError, MemoryShort, Stopped
from edgellm.http.model_host import ServedModel
from edgellm.http.schemas.responses import ModelInfo
from edgellm.llm import LLM, Named
from edgellm.llm.abilities import draft_for, heads_for
from edgellm.llm.model_loading import eagle3_named, place_draft, place_named
from edgellm.spec.params import ReplyOptions
from edgellm.storage import StoredModel, list_models, name_of, resolve
from edgellm.storage.default_pair import resolve_pair
from edgellm.storage.model_names import looks_like_path, unknown


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """How models are opened, and the choices that requests do not make. `on_event` is called with a sentence for each
    model that is opened, and what to know about it. There is memory for as many `replies` at once, or for as many as
    fit."""

    hardware: Hardware
    draft_hardware: Hardware
    options: ReplyOptions
    on_event: Callable[[str], None]
    replies: int = 1
    prompt_cache: int = 0
    """Bytes on disk for what models have read; 0: nothing is kept."""


class PairOpener:
    """Opens a pair of models on this machine."""

    def __init__(self, name: str, draft: Named | None, verifier: Named | None, defaults: ModelDefaults) -> None:
        self.name, self._asked, self._defaults = name, (draft, verifier), defaults
        self._draft, self._verifier, _ = resolve_pair(draft, verifier)

    def file(self) -> ModelFile:
        return ModelFile.open(resolve(str(self._verifier if self._verifier is not None else self._draft)))

    def check_fits(self, beside: Counter[str]) -> None:
        """A model fits where there is memory for one reply: others are closed for no more than that."""
        taken, eagle3 = Counter(beside), eagle3_named(self._draft)
        if self._verifier is not None:
            place_named(self._verifier, self._defaults.hardware, taken, verifies=True, eagle3=eagle3)
        if self._draft is not None and eagle3 is None:
            place_draft(self._draft, self._defaults.draft_hardware, taken, None)

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:

        def progress(_name: str, _share: float) -> None:
            if is_closing():
                raise Stopped

        pair = LLM.open(
            *self._asked, hardware=self._defaults.hardware,
            draft_hardware=self._defaults.draft_hardware, beside=beside, progress=progress,
            replies=self._defaults.replies, fewer_replies=True, prompt_cache=self._defaults.prompt_cache,
        )  # fmt: skip
        for notice in pair.notices:
            self._defaults.on_event(f"{self.name}: {notice}")
        return ServedModel(pair, self.name, options=self._defaults.options, replies=pair.replies)


class ModelOpener:
    """Opens a model on this machine as a verifier, with the draft model that is chosen for it, if both fit."""

    def __init__(self, model: StoredModel, defaults: ModelDefaults) -> None:
        self.name = model.name
        self._path, self._defaults = model.path, defaults

    def file(self) -> ModelFile:
        return ModelFile.open(self._path)

    def check_fits(self, beside: Counter[str]) -> None:
        self._pair(None).check_fits(beside)

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        draft, reason = self._choose_draft(beside)
        served = self._pair(draft).open(beside, is_closing)
        with_draft = "without a draft model" if draft is None else f"with the draft model {name_of(draft)}"
        self._defaults.on_event(f"{self.name} is open {with_draft}: {reason}.")
        return served

    def _pair(self, draft: Path | None) -> PairOpener:
        """Return the opener of the pair, with contexts that are no longer than the models were trained for."""
        defaults = replace(
            self._defaults,
            hardware=_within(self._defaults.hardware, self._path),
            draft_hardware=_within(self._defaults.draft_hardware, draft or self._path),
        )
        return PairOpener(self.name, draft, self._path, defaults)

    def _choose_draft(self, beside: Counter[str]) -> tuple[Path | None, str]:
        paths, others = dict[str, Path](), dict[str, ModelFile]()
        for model in list_models():
            with suppress(EdgeError):
                if model.path != self._path:
                    others[model.name] = ModelFile.open(model.path)
                    paths[model.name] = model.path
        file = ModelFile.open(self._path)
        if mtp_support(file.header).usable:
            return None, "its MTP layer drafts"
        for head in heads_for(file, others):
            with suppress(MemoryShort):
                self._pair(paths[head]).check_fits(beside)
                return paths[head], "it is an EAGLE-3 head for this model"
        if (name := draft_for(file, others)) is None:
            return None, "no model here has its tokenizer and at most half of its size"
        try:
            self._pair(paths[name]).check_fits(beside)
        except MemoryShort as error:
            return None, error.what.rstrip(".")
        return paths[
            name
        ], f"it has the same tokenizer and {others[name].header.file_size / file.header.file_size:.0%} of the size"


def _within(hardware: Hardware, path: Path) -> Hardware:
    """Return `hardware` with a context that is no longer than the model at `path` was trained for."""
    trained = trained_positions(ModelFile.open(path).header)
    if hardware.n_ctx is None or trained is None or hardware.n_ctx <= trained:
        return hardware
    return replace(hardware, n_ctx=trained)


class LocalModels:
    """The models of `edgellm ls`, opened by name."""

    def __init__(self, defaults: ModelDefaults) -> None:
        self._defaults = defaults

    def find(self, name: str) -> ModelOpener:
        """Return the model that a name means, but no file of another folder. Raises ModelNotFound."""
        models = list_models()
        found = next((model for model in models if model.name == name), None)
        if found is None and not looks_like_path(name):
            with suppress(EdgeError):
                path = resolve(name)
                found = next((model for model in models if path in model.paths), None)
        if found is None:
            raise unknown(name, [model.name for model in models])
        return ModelOpener(found, self._defaults)

    def infos(self) -> Sequence[ModelInfo]:
        """Return all models, none of them as loaded."""
        return [
            ModelInfo(id=model.name, created=int(model.path.stat().st_mtime), context_length=None, loaded=False)
            for model in list_models()
        ]
