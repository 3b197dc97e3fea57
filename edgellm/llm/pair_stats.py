"""Statistics of a pair of models: their hashes, what budgets were spent on, and their profile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from edgellm.errors import ProfileUnusable
from edgellm.llm.profiling.store import find_profile, keep_profile, profile_path, read_profile
from edgellm.spec.drafters.acceptance import Acceptance
from edgellm.spec.gates.budget import Ledger
from edgellm.spec.gates.online_profiler import FirstReplies, FirstReply
from edgellm.spec.gates.profile import Profile
from edgellm.spec.params import ReplyOptions
from edgellm.spec.types import Notice
from edgellm.storage import History, fingerprint, quick_fingerprint

Terms: TypeAlias = tuple[str, float | None, int | None]
"""A gate, its budget, and the tokens of its chunks."""


_LAST = 0.2  # weight of the last verdict's time


class Knowledge:
    """The knowledge of a pair, kept for as long as it is open. Each file is read when it is needed, and once."""

    def __init__(
        self, draft: Path, verifier: Path | Callable[[], str], given: Path | None = None, *, history: bool = True
    ) -> None:
        """`verifier`: its model's file, or across a link a function that returns the hash (empty: unknown). `given` is
        a profile to use. Without `history`, and while the history is off, what was seen in replies stays in memory.

        Raises:
            ProfileUnusable: the given profile is of other models, of another version, or no profile.
        """
        self._draft, self._verifier, self._history = draft, verifier, history
        self.verdict_seconds: float | None = None
        """The recent time from asking for a verdict on a drafted chunk to having it."""
        self.first = FirstReplies()
        self._ledgers: dict[Terms, Ledger] = {}
        self._acceptances: dict[Terms, Acceptance] = {}
        self._hashes: tuple[str, str] | None = None
        self._profile = None if given is None else read_profile(given, *self.hashes())
        self._looked = False
        self._told = False

    def draft_hash(self) -> str:
        """Return the hash of the draft model's file."""
        return fingerprint(self._draft)

    def hashes(self) -> tuple[str, str]:
        """Return the hashes of both models' files, the draft model's first; the files are read if need be.

        Raises:
            ProfileUnusable: the verifier does not say which model it is.
        """
        if self._hashes is None:
            verifier = fingerprint(self._verifier) if isinstance(self._verifier, Path) else self._verifier()
            if not verifier:
                raise ProfileUnusable(
                    "The verifier does not say which model it is, so no profile can be bound to it.",
                    "Update edgellm there, or use a gate that needs no profile: always, never, random.",
                )
            self._hashes = self.draft_hash(), verifier
        return self._hashes

    def profile(self, needed: bool) -> Profile | None:
        """Return the pair's profile, if it has one. Not `needed`: None also where finding that out would take long.

        Raises:
            ProfileUnusable: needed, and the pair's own is damaged or of another version.
        """
        if self._profile is None and not self._looked and (needed or self._quick()):
            try:
                self._profile = find_profile(*self.hashes())
                self._looked = True
            except ProfileUnusable:
                if needed:
                    raise
        return self._profile

    def use(self, profile: Profile, save: bool = True) -> Path:
        """Use `profile` from now on, also in later processes if it is saved, and return its file.

        While the history is off, the words of prompts are left out of what is saved.
        """
        self._profile = profile
        path = profile_path(profile.draft_hash, profile.verifier_hash)
        if save:
            keep_profile(profile, path)
        with suppress(OSError):
            self._first_file().unlink(missing_ok=True)
        return path

    def waited(self, seconds: float, verdicts: int) -> None:
        """Take in what the last `verdicts` on drafted chunks took, in the mean."""
        before = seconds if self.verdict_seconds is None else self.verdict_seconds
        self.verdict_seconds = seconds + (1.0 - _LAST) ** verdicts * (before - seconds)

    def ledger(self, options: ReplyOptions) -> Ledger:
        """Return what this budget was spent on so far, by this gate and with chunks of this length."""
        return self._ledgers.setdefault(_terms(options), Ledger())

    def acceptance(self, options: ReplyOptions) -> Acceptance:
        """Return the acceptance of tokens in chunks that this gate has verified at this budget: it chooses chunks that
        are often wrong."""
        return self._acceptances.setdefault(_terms(options), Acceptance())

    def begin_first(self, layers: tuple[int, ...]) -> tuple[FirstReply, list[Notice]]:
        """Return the gate of one of the pair's first replies, for which the attention of `layers` is measured; and the
        notices for the user, which are given once."""
        news = []
        if not self._told:
            self._told = True
            if self._keeps():
                self.first.load(self._first_file())
            news.append(
                Notice(
                    f"This pair has no profile yet: its first {self.first.enough} chunks are all verified to make one,"
                    " and only then the budget is kept. `edgellm profile` makes a better one from prompts of yours."
                )
            )
        return FirstReply(layers), news

    def end_first(self, watched: FirstReply, gamma: int, layers: tuple[int, ...]) -> Notice | None:
        """Take in one of the first replies; return a notice for the user if they now make a profile."""
        if self._profile is not None:  # another reply, under way at the same time, has completed it
            return None
        self.first.add(watched)
        draft_hash, verifier_hash = self.hashes()
        try:
            if not self.first.ready:
                if self._keeps():
                    self.first.save(self._first_file())
                return None
            profile = self.first.build(draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=layers)
            if not self._keeps():
                self.use(profile, save=False)
                return Notice("The pair has a profile now, for as long as this process lasts: the history is off.")
            path = self.use(profile)
        except OSError as error:
            return Notice(f"The pair's profile cannot be kept ({error}); it is made anew next time.")
        return Notice(f"The pair has a profile now ({path}), and the budget is kept from the next reply on.")

    def _keeps(self) -> bool:
        return self._history and History().on

    def _first_file(self) -> Path:
        path = profile_path(*self.hashes())
        return path.with_name(path.stem + ".first.jsonl")

    def _quick(self) -> bool:
        paths = [path for path in (self._draft, self._verifier) if isinstance(path, Path)]
        return all(quick_fingerprint(path) is not None for path in paths)


def _terms(options: ReplyOptions) -> Terms:
    name = options.gate if isinstance(options.gate, str) else type(options.gate).__name__
    return name, options.budget, options.gamma
