"""Lines that were typed at the prompt of a conversation, for the arrow keys: kept while the history is on."""

from __future__ import annotations

from pathlib import Path

from edgellm.errors import HistoryUnusable, StateDamaged
from edgellm.places import state_dir
from edgellm.storage.chats.history import History
from edgellm.storage.state import read_plain

_TAKEN_OVER = 1000  # lines


def typed_lines() -> History:
    """Return the store of typed lines: questions without replies, with the switch and the limits of the history."""
    return History(name="typed.jsonl")


def old_lines() -> Path:
    """Return the file in which an earlier version kept typed lines, without limits. It need not exist."""
    return state_dir() / "history"


def take_over() -> None:
    """Move the lines of `old_lines`, if there are any, to `typed_lines`, as typed now. While the history is off they
    stay where they are.

    Raises:
        HistoryUnusable: they cannot be written.
    """
    lines = typed_lines()
    if not lines.on:
        return
    try:
        kept = read_plain(old_lines())
        if kept is None:
            return
        texts = _texts(kept.decode("utf-8", "replace"))
        if not texts:  # damaged: it stays until it is cleared
            return
        for text in texts[-_TAKEN_OVER:]:
            lines.add(text, "")
        old_lines().unlink(missing_ok=True)
    except (OSError, StateDamaged) as error:
        raise HistoryUnusable(f"{old_lines()} cannot be taken over: {error}.", "Remove it.") from None


def _texts(kept: str) -> list[str]:
    """Return the typed texts from blocks of lines that begin with "+", as prompt_toolkit writes them."""
    texts: list[str] = []
    within = False
    for line in kept.split("\n"):
        if not line.startswith("+"):
            within = False
        elif within:
            texts[-1] += "\n" + line[1:]
        else:
            texts.append(line[1:])
            within = True
    return texts
