"""The default pair of models: SmolLM2 with the draft model made for it, or the bundled home pair."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, TypeAlias

from edgellm.errors import InvalidOption, ModelNotFound
from edgellm.storage.model_files import resolve

Named: TypeAlias = str | Path
DEFAULT = "default"
"""The name that stands for the default pair's model."""
VARIABLE = "EDGELLM_PAIR"
"""`home` keeps to the bundled home pair, which needs no download."""


class PairNames(NamedTuple):
    """The names of a draft model and its verifier."""

    draft: str
    verifier: str


HOME = PairNames("edgellm-draft", "edgellm-verifier")
SMOLLM2 = PairNames("smollm2:draft", "smollm2:135m")


class ResolvedPair(NamedTuple):
    """A draft model and a verifier, None where there is none. `missing` is the model that the home pair stands in for,
    "" if none."""

    draft: Named | None
    verifier: Named | None
    missing: str = ""

    @property
    def notice(self) -> str:
        """Return the notice for a user; "" if there is none."""
        if not self.missing:
            return ""
        return f"{self.missing} is not here (edgellm pull {self.missing}); the bundled toy pair answers."


def resolve_pair(draft: Named | None, verifier: Named | None) -> ResolvedPair:
    """Return the pair with the models that `DEFAULT` means: with a model of the home pair, the home pair's other model.
    Raise InvalidOption if EDGELLM_PAIR is set to a pair that does not exist."""
    if DEFAULT not in (draft, verifier):
        return ResolvedPair(draft, verifier)
    chosen, missing = default_pair() if {draft, verifier}.isdisjoint(HOME) else HOME, ""
    for asked, name in zip((draft, verifier), chosen, strict=True):
        try:
            if asked == DEFAULT:
                resolve(name)
        except ModelNotFound:
            chosen, missing = HOME, missing or name
    return ResolvedPair(
        chosen.draft if draft == DEFAULT else draft, chosen.verifier if verifier == DEFAULT else verifier, missing
    )


def default_pair() -> PairNames:
    """Return the names of the default pair that the user wants."""
    name = os.environ.get(VARIABLE, "")
    if name not in ("", "home", "smollm2"):
        raise InvalidOption(f"{VARIABLE} is {name!r}.", "Set it to home or smollm2, or unset it.")
    return HOME if name == "home" else SMOLLM2
