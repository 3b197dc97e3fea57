"""Data that is learned and kept about a pair of models from reply to reply, and its removal.

docs/guide/privacy.md lists it for users.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from edgellm.errors import EdgeError, HistoryUnusable, ModelNotFound, ProfileUnusable
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance
from edgellm.spec.gates.rules import BudgetController
from edgellm.spec.params import ReplyOptions
from edgellm.spec.types import Notice
from edgellm.storage import ALIASES, History
from edgellm.storage.chat_log import Conversations, expired, oldest, typed_lines
from edgellm.storage.fingerprint import FileHash
from edgellm.storage.model_files import bundled
from edgellm.storage.saved_prompts import prompt_files
from edgellm.storage.state import close_to_others, set_aside
from edgellm.system import cache_dir, data_dir, state_dir

if TYPE_CHECKING:
    from edgellm.spec.gates.profile import Profile
    from edgellm.spec.gates.profiler import FirstReply, OnlineProfiler

LOGS_MOST = 20
"""The number of kept crash logs, the newest ones."""


@dataclass(frozen=True, slots=True)
class KeptData:
    """Counts of kept data, by kind. `profiles` are those made from replies, or with tokens of prompts."""

    replies: int = 0
    conversations: int = 0
    typed: int = 0
    profiles: int = 0
    curves: int = 0
    logs: int = 0
    prompts: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __str__(self) -> str:
        counted = (
            (self.replies, "reply", "replies"), (self.conversations, "conversation", "conversations"),
            (self.typed, "typed line", "typed lines"), (self.profiles, "profile", "profiles"),
            (self.curves, "cost curve", "cost curves"), (self.logs, "crash log", "crash logs"),
            (self.prompts, "saved prompt", "saved prompts"),
        )  # fmt: skip
        return (
            ", ".join(f"{count:,} {one if count == 1 else many}" for count, one, many in counted if count) or "nothing"
        )


def kept() -> KeptData:
    """Count kept data, whether the history is on or off.

    Raises:
        HistoryUnusable: the history cannot be read.
    """
    return KeptData(
        History().facts().conversations, len(Conversations().all()), typed_lines().facts().conversations,
        sum(1 for path in _profiles() if _is_personal(path)), len(list(_files(_curves(), "*"))),
        len(list(_files(_logs(), "*"))), len(prompt_files()),
    )  # fmt: skip


def forget() -> KeptData:
    """Remove all kept data, and return the counts. A profile from a file of prompts keeps its measurements, and loses
    the tokens of prompts.

    Raises:
        HistoryUnusable: something cannot be removed.
    """
    counts, failed = (0, 0, 0), None
    try:
        counts = _forget_chats()
    except HistoryUnusable as error:  # The rest is removed first.
        failed = error
    profiles = sum(1 for path in list(_profiles()) if _forget_profile(path))
    curves, logs, prompts = (
        sum(1 for _ in _removed(paths)) for paths in (_files(_curves(), "*"), _files(_logs(), "*"), prompt_files())
    )
    if failed is not None:
        raise failed
    replies, conversations, typed = counts
    return KeptData(replies, conversations, typed, profiles, curves, logs, prompts)


def _forget_chats() -> tuple[int, int, int]:
    """Remove all replies, conversations and typed lines, and return how many there were; 0 where they are damaged."""
    counts = 0, 0, 0
    with suppress(HistoryUnusable):
        counts = (
            History().facts().conversations, len(Conversations().all()), typed_lines().facts().conversations
        )  # fmt: skip
    History().clear()
    return counts


def tidy() -> None:
    """Close kept data to other users, and remove expired data."""
    close_to_others()
    expire()


def expire() -> None:
    """Remove expired data (`chat_log.max_age`). Files that cannot be removed are kept for now."""
    before = oldest()
    with suppress(EdgeError):
        History().expire()
    for path in list(_profiles()):
        if expired(path, before):
            _forget_profile(path)
    kept_files = (*_files(_curves(), "*"), *prompt_files())
    old = (path for path in kept_files if expired(path, before))
    list(_removed(old))
    expire_logs(before)


def expire_logs(before: datetime) -> None:
    """Remove crash logs from before that time, and those beyond the newest `LOGS_MOST`."""
    logs = sorted(_files(_logs(), "crash-*.log"), key=lambda path: path.name, reverse=True)
    list(_removed(path for number, path in enumerate(logs) if number >= LOGS_MOST or expired(path, before)))


def _profiles() -> Iterator[Path]:
    """Yield profiles, first replies, files of both that were set aside, and remains of a crash."""
    return _files(data_dir() / "profiles", "*")


def _is_personal(path: Path) -> bool:
    """Return whether a profile file was made from replies, has tokens of prompts, or is damaged."""
    from edgellm.spec.gates.profile import Profile

    try:
        profile = Profile.load(path, own=True)
    except ProfileUnusable:
        return True
    return profile.has_words or profile.origin != "prompts"


def _forget_profile(path: Path) -> bool:
    """Remove data of prompts and replies from a profile file; return whether there was any."""
    from edgellm.spec.gates.profile import Profile

    if not _is_personal(path):
        return False
    try:
        profile = Profile.load(path, own=True)
        if profile.origin == "prompts":
            profile.without_words().save(path)
            return True
    except (ProfileUnusable, OSError):
        pass
    return bool(list(_removed([path])))


def _removed(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        with suppress(OSError):
            path.unlink()
            yield path


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    with suppress(OSError):
        yield from [path for path in sorted(folder.glob(pattern)) if not path.is_dir() or path.is_symlink()]


def _curves() -> Path:
    return cache_dir() / "curves"


def _logs() -> Path:
    return state_dir() / "logs"


_SHOWN = 16  # characters of a hash in a file's name


def profile_path(draft_hash: str, verifier_hash: str) -> Path:
    """Return the file in the user's data folder for the profile of these two models; it need not exist."""
    return data_dir() / "profiles" / f"{draft_hash[:_SHOWN]}-{verifier_hash[:_SHOWN]}.json"


def find_profile(draft_hash: str, verifier_hash: str) -> Profile | None:
    """Return the user's own profile of the pair, else the shipped profile, if any.

    Raises:
        ProfileUnusable: the user's own is damaged or of another version.
    """
    path = profile_path(draft_hash, verifier_hash)
    if os.path.lexists(path):
        return read_profile(path, draft_hash, verifier_hash, own=True)
    try:
        shipped = bundled(next(iter(ALIASES))).with_name("profile.json")
        return read_profile(shipped, draft_hash, verifier_hash)
    except (ModelNotFound, ProfileUnusable):  # The shipped profile is of another pair, or not installed.
        return None


def keep_profile(profile: Profile, path: Path) -> None:
    """Save a profile, without tokens of prompts while the history is off. An unusable file at `path` is set aside.

    Raises:
        OSError: it cannot be written.
    """
    from edgellm.spec.gates.profile import Profile

    try:
        if os.path.lexists(path):
            Profile.load(path, own=True)
    except ProfileUnusable:
        set_aside(path)
    (profile if History().on else profile.without_words()).save(path)


def read_profile(path: Path, draft_hash: str, verifier_hash: str, *, own: bool = False) -> Profile:
    """Return the profile in a file; `own` as for `Profile.load`.

    Raises:
        ProfileUnusable: the profile is missing, of another version, or of other models.
    """
    from edgellm.spec.gates.profile import Profile

    profile = Profile.load(path, own=own)
    for name, found, wanted in (
        ("draft model", profile.draft_hash, draft_hash),
        ("verifier", profile.verifier_hash, verifier_hash),
    ):
        if found != wanted:
            raise ProfileUnusable(
                f"{path.name} is the profile of another {name} (hash {found[:8]}..., this one has {wanted[:8]}...).",
                "Make one for this pair: edgellm profile --draft A --verifier B --prompts FILE",
            )
    return profile


Terms: TypeAlias = tuple[str, float | None, int | None]
"""A gate, its budget, and the tokens of its chunks."""


LEARNED = 512
"""Chunks of replies after which a profile is complete."""
_LAST = 0.2  # weight of the last verdict's time


class PairStats:
    """The statistics of a pair, kept while the pair is open. Each file is read when needed, and once."""

    def __init__(
        self, draft: FileHash, verifier: FileHash | Callable[[], str], given: Path | None = None, *,
        history: bool = True,
    ) -> None:  # fmt: skip
        """Use the hashes of both files; across a link, `verifier` is a function that returns the hash (empty: unknown).
        `given` is a profile to use. Without `history`, and while the history is off, observations stay in
        memory.

        Raises:
            ProfileUnusable: the given profile is of other models, of another version, or no profile.
        """
        self._draft, self._verifier, self._history = draft, verifier, history
        self.verdict_seconds: float | None = None
        """The recent wait for a verdict on a drafted chunk."""
        self._first: OnlineProfiler | None = None  # observations of the first replies
        self._controllers: dict[Terms, BudgetController] = {}
        self._acceptances: dict[Terms, ConfidenceAcceptance] = {}
        self._hashes: tuple[str, str] | None = None
        self._profile = None if given is None else read_profile(given, *self.hashes())
        self._profile_searched = False
        self._announced = False

    @property
    def first(self) -> OnlineProfiler:
        """Return the observations of the first replies."""
        if self._first is None:
            from edgellm.spec.gates.profiler import OnlineProfiler

            self._first = OnlineProfiler()
        return self._first

    def draft_hash(self) -> str:
        """Return the hash of the draft model's file."""
        return self._draft.compute()

    def hashes(self) -> tuple[str, str]:
        """Return the hashes of both models' files, the draft model's first; the files are read if need be.

        Raises:
            ProfileUnusable: the verifier does not say which model it is.
        """
        if self._hashes is None:
            verifier = self._verifier.compute() if isinstance(self._verifier, FileHash) else self._verifier()
            if not verifier:
                raise ProfileUnusable(
                    "The verifier does not report its model's hash, so no profile can be bound to it.",
                    "Use a gate that needs no profile: always, never, random.",
                )
            self._hashes = self.draft_hash(), verifier
        return self._hashes

    def profile(self, needed: bool) -> Profile | None:
        """Return the pair's profile, if any. Not `needed`: None also where the search would take long.

        Raises:
            ProfileUnusable: needed, and the pair's own is damaged or of another version.
        """
        if self._profile is None and not self._profile_searched and (needed or self._hashes_are_cached()):
            try:
                self._profile = find_profile(*self.hashes())
                self._profile_searched = True
            except ProfileUnusable:
                if needed:
                    raise
        return self._profile

    def use(self, profile: Profile, save: bool = True) -> Path:
        """Use `profile` from now on, also in later processes with `save`, and return its file.

        While the history is off, tokens of prompts are not saved.
        """
        self._profile = profile
        path = profile_path(profile.draft_hash, profile.verifier_hash)
        if save:
            keep_profile(profile, path)
        with suppress(OSError):
            self._first_file().unlink(missing_ok=True)
        return path

    def observe_verdicts(self, seconds: float, verdicts: int) -> None:
        """Record the mean seconds of the last `verdicts` on drafted chunks."""
        before = seconds if self.verdict_seconds is None else self.verdict_seconds
        self.verdict_seconds = seconds + (1.0 - _LAST) ** verdicts * (before - seconds)

    def controller(self, options: ReplyOptions) -> BudgetController:
        """Return the controller of this budget, gate and length of chunks."""
        return self._controllers.setdefault(_terms(options), BudgetController())

    def acceptance(self, options: ReplyOptions) -> ConfidenceAcceptance:
        """Return the acceptance of tokens under this gate and budget: a gate chooses chunks that are often wrong."""
        return self._acceptances.setdefault(_terms(options), ConfidenceAcceptance())

    def learns(self) -> bool:
        """Return whether replies improve the profile: it is missing, or made of too few replies."""
        if not self._hashes_are_cached():
            return False
        return self._profile is None or (self._profile.origin == "first replies" and self._profile.chunks < LEARNED)

    def begin_first(self, layers: tuple[int, ...], *, improves: bool) -> tuple[FirstReply, list[Notice]]:
        """Return the gate of a first reply of the pair, which measures the attention of `layers`; and the notices for
        the user, given once. With `improves` the user has asked for the profile, and gets none."""
        from edgellm.spec.gates.profiler import ENOUGH, FirstReply

        notices = []
        if not self._announced:
            self._announced = True
            if self._saves_first():
                self.first.load(self._first_file())
            if not improves:
                notices.append(Notice(
                    f"This pair has no profile yet. Its first {ENOUGH} chunks are all verified to make one;"
                    " the budget is kept from then on. `edgellm profile` makes a better one from your own prompts."
                ))  # fmt: skip
        return FirstReply(layers, improves=improves), notices

    def end_first(self, gate: FirstReply, gamma: int, layers: tuple[int, ...]) -> Notice | None:
        """Add a first reply; return a notice for the user once the first replies make a profile."""
        from edgellm.spec.gates.fitting import build

        if self._profile is not None and not (gate.improves and self.learns()):  # A concurrent reply was first.
            return None
        self.first.add(gate)
        draft_hash, verifier_hash = self.hashes()
        try:
            known = 0 if self._profile is None else self._profile.chunks
            if not self.first.ready or self.first.chunks < 2 * known:
                if self._saves_first():
                    self.first.save(self._first_file())
                return None
            profile = build(
                self.first.runs, draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=layers,
                origin="first replies",
            )  # fmt: skip
            if not self._saves_first():
                self.use(profile, save=False)
                return Notice("The pair has a profile now. It is not saved, because the history is off.")
            path = self.use(profile)
            if gate.improves and profile.chunks < LEARNED:
                self.first.save(self._first_file())
        except OSError as error:
            return Notice(f"The pair's profile cannot be saved ({error}). It will be made again next time.")
        if known:
            return Notice(f"The pair's profile is made of {profile.chunks} chunks now.")
        return Notice(f"The pair has a profile now ({path}). The budget is kept from the next reply on.")

    def progress_file(self) -> Path | None:
        """Return the file of an unfinished profile, None while nothing derived from prompts may be saved."""
        path = profile_path(*self.hashes())
        return path.with_name(path.stem + ".progress.jsonl") if self._saves_first() else None

    def _saves_first(self) -> bool:
        return self._history and History().on

    def _first_file(self) -> Path:
        path = profile_path(*self.hashes())
        return path.with_name(path.stem + ".first.jsonl")

    def _hashes_are_cached(self) -> bool:
        files = [file for file in (self._draft, self._verifier) if isinstance(file, FileHash)]
        return all(file.quick() is not None for file in files)


def _terms(options: ReplyOptions) -> Terms:
    name = options.gate if isinstance(options.gate, str) else type(options.gate).__name__
    return name, options.budget, options.gamma
