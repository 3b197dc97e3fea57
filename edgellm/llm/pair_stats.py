"""Data that is learned and kept about a pair of models from reply to reply, and its removal.

docs/guide/privacy.md lists it for users.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from edgellm.engine.kv.saved_prompts import prompt_files, removed
from edgellm.errors import ModelNotFound, ProfileUnusable
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController
from edgellm.spec.params import ReplyOptions, mechanism
from edgellm.state import close_to_others, set_aside
from edgellm.storage.chat_log import History, expired, oldest
from edgellm.storage.fingerprint import FileHash
from edgellm.storage.model_files import ALIASES, bundled
from edgellm.system import cache_dir, data_dir, state_dir

LOGS_MOST = 20
"""The number of kept crash logs, the newest ones."""


@dataclass(frozen=True, slots=True)
class KeptData:
    """Counts of kept data, by kind. `profiles` are those made from replies."""

    conversations: int = 0
    profiles: int = 0
    curves: int = 0
    logs: int = 0
    prompts: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __str__(self) -> str:
        names = ("conversation", "profile", "cost curve", "crash log", "saved prompt")
        counted = ((count, name) for count, name in zip(astuple(self), names, strict=True) if count)
        return ", ".join(f"{count:,} {name}{'s' * (count != 1)}" for count, name in counted) or "nothing"


def kept() -> KeptData:
    """Count kept data, whether the history is on or off."""
    return KeptData(**{kind: sum(map(_is_personal, paths)) for kind, paths in _files().items()})


def forget() -> KeptData:
    """Remove all kept data, and return the counts. A profile from a file of prompts stays. Raise
    HistoryUnusable where the history cannot be removed, once the rest is."""
    gone = {kind: sum(map(_forget, paths)) for kind, paths in _files().items()}
    History().clear()
    return KeptData(**gone)


def tidy() -> None:
    """Close kept data to other users, and remove expired data."""
    close_to_others()  # This comes first: a file in place of a folder hides its contents.
    expire()


def expire() -> None:
    """Remove expired data (`chat_log.max_age`), and all but the newest crash logs. Files that cannot be removed are
    kept for now."""
    before, files = oldest(), _files()
    old = [path for paths in files.values() for path in paths if expired(path, before)]
    for path in {*old, *files["logs"][:-LOGS_MOST]}:
        _forget(path)


def kept_bytes() -> int:
    """Return the bytes that all kept data take on the disk."""
    return sum(path.lstat().st_size for paths in _files().values() for path in paths)


def _files() -> dict[str, list[Path]]:
    """Return the files that may hold data of prompts and replies, sorted, by their kind in `KeptData`. Among profiles
    are first replies, files that were set aside, and remains of a crash; names of crash logs begin with their times."""
    found: dict[str, list[Path]] = {"prompts": prompt_files()}
    folders = {"conversations": History().path, "profiles": data_dir() / "profiles", "curves": cache_dir() / "curves",
               "logs": state_dir() / "logs"}  # fmt: skip
    for kind, folder in folders.items():
        found[kind] = []
        with suppress(OSError):
            found[kind] = [path for path in sorted(folder.iterdir()) if not path.is_dir() or path.is_symlink()]
    return found


def _is_personal(path: Path) -> bool:
    """Return whether a file holds data of prompts or replies: each but a profile of prompts, which are figures."""
    with suppress(ProfileUnusable):
        return path.parent.name != "profiles" or Profile.load(path, own=True).terms.origin != "prompts"
    return True


def _forget(path: Path) -> bool:
    """Remove data of prompts and replies in a file; return whether there was any."""
    return _is_personal(path) and removed(path)


def profile_path(draft_hash: str, verifier_hash: str) -> Path:
    """Return the file in the user's data folder for the profile of these two models; it need not exist."""
    return data_dir() / "profiles" / f"{draft_hash[:16]}-{verifier_hash[:16]}.json"


def find_profile(draft_hash: str, verifier_hash: str) -> Profile | None:
    """Return the user's own profile of the pair, else the shipped profile, if any. Raises ProfileUnusable: the user's
    own is damaged or of another version."""
    path = profile_path(draft_hash, verifier_hash)
    if os.path.lexists(path):
        return read_profile(path, draft_hash, verifier_hash, own=True)
    with suppress(ModelNotFound, ProfileUnusable):  # The shipped profile is of another pair, or not installed.
        shipped = bundled(next(iter(ALIASES))).with_name("profile.json")
        return read_profile(shipped, draft_hash, verifier_hash)
    return None


def keep_profile(profile: Profile, path: Path) -> None:
    """Save a profile. An unusable file at `path` is set aside. Raises OSError: it cannot be written."""
    try:
        if os.path.lexists(path):
            profile.load(path, own=True)
    except ProfileUnusable:
        set_aside(path)
    profile.save(path)


def read_profile(path: Path, draft_hash: str, verifier_hash: str, *, own: bool = False) -> Profile:
    """Return the profile in a file; `own` as for `Profile.load`. Raises ProfileUnusable: the profile is missing, of
    another version, or of other models."""
    profile = Profile.load(path, own=own)
    for name, found, wanted in (
        ("draft model", profile.terms.draft_hash, draft_hash),
        ("verifier", profile.terms.verifier_hash, verifier_hash),
    ):
        if found != wanted:
            raise ProfileUnusable(
                f"{path.name} is the profile of another {name} (hash {found[:8]}..., this one has {wanted[:8]}...).",
                "Make one for this pair: edgellm profile --draft A --verifier B --prompts FILE",
            )
    return profile


FIRST = ".first.json"
"""Ending of the file of first replies."""


class PairStats:
    """The statistics of a pair, kept while the pair is open. Each file is read when needed, and once."""

    def __init__(
        self, draft: FileHash, verifier: FileHash | Callable[[], str], given: Path | None = None, *,
        history: bool = True,
    ) -> None:  # fmt: skip
        """Use the hashes of both files; across a link, `verifier` is a function that returns the hash (empty: unknown).
        `given` is a profile to use. Without `history`, and while the history is off, observations stay in memory.
        Raises ProfileUnusable: the given profile is of other models, of another version, or no profile."""
        self._draft, self._verifier, self._history = draft, verifier, history
        self._learned: dict[tuple[object, ...], tuple[BudgetController, ConfidenceAcceptance]]
        self._learned = defaultdict(lambda: (BudgetController(), ConfidenceAcceptance()))
        self.known_profile = None if given is None else read_profile(given, *self.hashes())
        """The pair's profile, if it was given, found or made."""
        self._searched = False

    @cached_property
    def first(self) -> Any:
        """Return what makes a profile of the first replies (`profiling.FirstReplies`)."""
        return mechanism("fitting").FirstReplies(self)

    def hashes(self) -> tuple[str, str]:
        """Return the hashes of both models' files, the draft model's first; the files are read if need be. Raises
        ProfileUnusable: the verifier does not say which model it is."""
        verifier = self._verifier.compute() if isinstance(self._verifier, FileHash) else self._verifier()
        if not verifier:
            raise ProfileUnusable(
                "The verifier does not report its model's hash, so no profile can be bound to it.",
                "Use a gate that needs no profile: always, never, random.",
            )
        return self._draft.compute(), verifier

    def profile(self, needed: bool) -> Profile | None:
        """Return the pair's profile, if any. Not `needed`: None also where the search would take long. Raises
        ProfileUnusable: needed, and the pair's own is damaged or of another version."""
        if self.known_profile is None and not self._searched and (needed or self._hashes_are_cached()):
            try:
                self.known_profile = find_profile(*self.hashes())
                self._searched = True
            except ProfileUnusable:
                if needed:
                    raise
        return self.known_profile

    def use(self, profile: Profile, save: bool = True) -> Path:
        """Use `profile` from now on, also in later processes with `save`, and return its file."""
        self.known_profile = profile
        path = profile_path(*self.hashes())
        if save:
            keep_profile(profile, path)
        with suppress(OSError):
            path.with_suffix(FIRST).unlink(missing_ok=True)
        return path

    def learned(self, options: ReplyOptions) -> tuple[BudgetController, ConfidenceAcceptance]:
        """Return the controller of this gate, budget and length of chunks, and the acceptance of tokens under them: a
        gate chooses chunks that are often wrong."""
        name = options.gate if isinstance(options.gate, str) else type(options.gate).__name__
        return self._learned[name, options.budget, options.gamma]

    @property
    def saves(self) -> bool:
        """Return whether what is derived from prompts and replies may be saved."""
        return self._history and History().on

    def file(self, suffix: str) -> Path | None:
        """Return the pair's file beside its profile, None while nothing derived from prompts may be saved."""
        return profile_path(*self.hashes()).with_suffix(suffix) if self.saves else None

    def _hashes_are_cached(self) -> bool:
        files = [file for file in (self._draft, self._verifier) if isinstance(file, FileHash)]
        return all(file.quick() is not None for file in files)
