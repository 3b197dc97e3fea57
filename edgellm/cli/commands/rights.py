"""The rights of a paired device, in words that both screens show alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from edgellm.errors import InvalidOption
from edgellm.rpc.trust.rights import Right, Rights

# What each right allows, and the consequence that both devices should know.
MEANS = {
    Right.VERIFY: (
        "have drafts checked by the verifier that {host} serves",
        "{host} then reads the prompts and replies of {guest}",
    ),
    Right.COMPUTE: (
        "have {host} compute layers of models",
        "{host} then sees activations, from which prompts can be guessed; {guest} can keep {host} busy, or crash it",
    ),
    Right.FILES: (
        "copy models from {host}, and keep layers of models on it",
        "{guest} then sees which models {host} has, and takes room on its disk, up to a limit",
    ),
}


def read_grant(text: str) -> Rights:
    """Parse rights such as `verify,files`, `all` or `none`.

    Raises:
        InvalidOption: there is no such right.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if words == ["none"]:
        return frozenset()
    if words == ["all"]:
        return frozenset(Right)
    known = {right.value: right for right in Right}
    for word in words:
        if word not in known:
            raise InvalidOption(f"There is no right {word!r}.", f"There are: {', '.join(known)}; or all, or none.")
    if not words:
        raise InvalidOption("No right is named.", f"There are: {', '.join(known)}; or all, or none.")
    return frozenset(known[word] for word in words)


def explained(rights: Iterable[Right], host: str, guest: str) -> Iterator[tuple[str, str]]:
    """Yield each right that `guest` has at `host`: its name and what it allows, then "" and what follows from it."""
    had = set(rights)
    if not had:
        yield "nothing", ""
    for right in Right:
        if right in had:
            allows, follows = MEANS[right]
            yield right.value, allows.format(host=host, guest=guest)
            yield "", follows.format(host=host, guest=guest)


def right_names(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield rights for shell completion; the last of those already typed is completed."""
    *before, last = incomplete.split(",")
    for right, (allows, _) in MEANS.items():
        if right.value.startswith(last.lower()) and right.value not in before:
            yield ",".join([*before, right.value]), allows.format(host="this device", guest="it")
