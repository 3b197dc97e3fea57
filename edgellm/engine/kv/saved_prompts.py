"""Prompts that models have read, with their keys and values, so that a later process need not read them again.

A file is one sequence as llama.cpp saves it: a heading, the token ids, and the state. Its name says of which model's
files and which kind of context it is, and the hash of its bytes, without which it is not used: llama.cpp reads sizes
and positions from it. So a file whose writing was cut off, or that the disk has damaged, is found out and removed.
"""

import hashlib
import logging
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgellm import system
from edgellm.engine.vocabulary import Ids, common_prefix
from edgellm.state import keep_recent, private_folder
from edgellm.system import NO_LINKS

LEAST = 256
"""Least tokens that a restored sequence saves reading, and that a kept sequence has beyond those on disk."""
SAVED, UNFINISHED = ".kv", ".new"
"""Endings of names."""
_HEADING = struct.Struct("<III")  # magic, version, number of tokens
_SHARE = 0.5  # share of the free disk space that a file may take
_log = logging.getLogger(__name__)


class SavedPrompts:
    """The kept prompts of all models, in at most `limit` bytes. A context does without them, so its calls raise
    nothing. `kind` names all that a sequence's state depends on, the model's files and the kind of context. `epoch`
    counts the calls of `forget`."""

    def __init__(self, limit: int, allowed: Callable[[], bool] = lambda: True) -> None:
        """Keep and use nothing where `limit` is 0, or `allowed` returns False."""
        self.limit, self.allowed, self.epoch = limit, allowed, 0

    def forget(self) -> None:
        """Remove all kept prompts, and do not keep the models' current ones: the user took something back."""
        self.epoch += 1
        remove_prompts()

    def find(self, kind: str, ids: Ids, known: int, *, whole: bool) -> Path | None:
        """Return the file of the sequence with the longest common prefix with `ids` (n,), if longer than `known`, of
        contexts of this `kind`. `whole`: it cannot be cut, so all of it must be a prefix of `ids`."""
        if not (self.limit and self.allowed()):
            return None
        found = [(common_prefix(tokens, ids), path, len(tokens)) for path, tokens in _sequences(_key(kind))]
        for common, path, length in sorted(found, reverse=True):
            if common <= known or (whole and common < length):
                continue
            with suppress(OSError):
                if _digest(path) == path.stem.rpartition("-")[2]:
                    os.utime(path)  # the least recently used files are removed first
                    _log.info("%d of %d tokens were read before, and are restored from disk", common, len(ids))
                    return path
            _log.warning("%s is damaged, and removed", path)
            removed(path)
        return None

    def keep(self, kind: str, ids: Ids, size: int, write: Callable[[Path], bool], *, whole: bool) -> None:
        """Keep a sequence of `ids` (n,) and `size` bytes, unless a kept sequence saves nearly as much reading; replace
        sequences that it makes needless. `write` writes it to an existing file, and returns whether it could."""
        if not (self.limit and self.allowed()):
            return
        key = _key(kind)
        known = [(path, len(tokens), common_prefix(tokens, ids)) for path, tokens in _sequences(key)]
        if any(len(ids) - common < LEAST and (not whole or common == length) for _, length, common in known):
            return
        try:
            if not _write(key, size, self.limit, write):
                return
        except OSError as error:
            _log.info("what was read is not kept: %s", error)
            return
        most = 0 if whole else LEAST - 1  # tokens of another sequence that may be lost
        for other, length, common in known:
            if length - common <= most:  # the new file replaces the old one
                removed(other)
        keep_recent(prompt_files(), self.limit)  # also what a crash has left


def _key(kind: str) -> str:
    return hashlib.sha256(kind.encode()).hexdigest()[:32]


def _write(key: str, size: int, limit: int, write: Callable[[Path], bool]) -> bool:
    """Have `write` write a file of `size` bytes, named by its hash; return whether there was room and it succeeded."""
    folder = private_folder(prompts_folder())
    if size > min(limit, _SHARE * shutil.disk_usage(folder).free):
        return False
    new = folder / f"{key}-{secrets.token_hex(8)}{UNFINISHED}"
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS, 0o600))
    try:
        if written := write(new):
            new.replace(new.with_name(f"{key}-{_digest(new)}{SAVED}"))
        return written
    finally:
        removed(new)


def _sequences(key: str) -> Iterator[tuple[Path, Ids]]:
    for path in prompt_files(f"{key}-*{SAVED}"):
        try:
            with path.open("rb") as file:
                _magic, _version, count = _HEADING.unpack(file.read(_HEADING.size))
                tokens = np.frombuffer(file.read(4 * count), np.int32)
        except OSError:
            continue
        except (struct.error, ValueError):  # the file ends before the state
            removed(path)
            continue
        yield path, tokens


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def prompts_folder() -> Path:
    """Return the folder of all kept prompts; it need not exist."""
    return system.cache_dir() / "prompts"


def prompt_files(pattern: str = "*") -> list[Path]:
    """Return the files whose names match, including files being written."""
    with suppress(OSError):
        return [path for path in prompts_folder().glob(pattern) if path.suffix in (SAVED, UNFINISHED)]
    return []


def remove_prompts() -> int:
    """Remove all kept prompts, and return their number."""
    return sum(map(removed, prompt_files()))


def removed(path: Path) -> bool:
    """Remove a file, and return whether it was there and could be removed."""
    with suppress(OSError):
        path.unlink()
        return True
    return False
