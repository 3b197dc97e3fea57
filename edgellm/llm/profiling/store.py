"""The files of profiles, and the search for a pair's own."""

from __future__ import annotations

import os
from pathlib import Path

from edgellm.errors import ModelNotFound, ProfileUnusable
from edgellm.spec.gates.profile import Profile
from edgellm.storage import ALIASES, History, bundled, data_dir
from edgellm.storage.state import set_aside

_SHOWN = 16  # characters of a hash in a file's name


def profile_path(draft_hash: str, verifier_hash: str) -> Path:
    """Return the file in the user's data folder for the profile of these two models; it need not exist."""
    return data_dir() / "profiles" / f"{draft_hash[:_SHOWN]}-{verifier_hash[:_SHOWN]}.json"


def find_profile(draft_hash: str, verifier_hash: str) -> Profile | None:
    """Return the user's own profile of the pair, or the one that came with edgellm; None where there is neither.

    Raises:
        ProfileUnusable: the user's own is damaged or of another version.
    """
    path = profile_path(draft_hash, verifier_hash)
    if os.path.lexists(path):
        return read_profile(path, draft_hash, verifier_hash, own=True)
    try:
        shipped = bundled(next(iter(ALIASES))).with_name("profile.json")
        return read_profile(shipped, draft_hash, verifier_hash)
    except (ModelNotFound, ProfileUnusable):  # the profile of another pair, or not installed
        return None


def keep_profile(profile: Profile, path: Path) -> None:
    """Save a profile, without words of prompts while the history is off. An unusable one at `path` is set aside.

    Raises:
        OSError: it cannot be written.
    """
    try:
        if os.path.lexists(path):
            Profile.load(path, own=True)
    except ProfileUnusable:
        set_aside(path)
    (profile if History().on else profile.without_words()).save(path)


def read_profile(path: Path, draft_hash: str, verifier_hash: str, *, own: bool = False) -> Profile:
    """Return the profile in a file; `own` as for `Profile.load`.

    Raises:
        ProfileUnusable: there is none, it is of another version, or of other models than these.
    """
    profile = Profile.load(path, own=own)
    for name, found, wanted in (
        ("draft model", profile.draft_hash, draft_hash),
        ("verifier", profile.verifier_hash, verifier_hash),
    ):
        if found != wanted:
            raise ProfileUnusable(
                f"{path.name} is the profile of another {name} (hash {found[:8]}..., this one has {wanted[:8]}...).",
                "Make one of this pair: edgellm profile --draft A --verifier B --prompts FILE",
            )
    return profile
