"""Reading and writing edgellm's own files, such as caches, profiles, keys and lists of devices.

A file may have been damaged, replaced by a link, a pipe or a folder, or written by another version. Reading never
blocks, takes bounded memory, and either returns the result of `parse` or raises `StateDamaged`. Writing replaces the
file in one step. Only the user can read the files and their folders.
"""

import errno
import json
import os
import stat
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from edgellm import system
from edgellm.errors import EdgeError, StateDamaged, TrustUnusable
from edgellm.system import HAS_MODES, NO_LINKS, NOT_BLOCKING, cache_dir, data_dir, state_dir

MAX_BYTES = 64 * 2**20
SMALL = 2**20
"""Most bytes of a key, and of a file that a user writes."""
MONTH = 30 * 86_400.0
"""Seconds for which a measurement counts, and for which unused layers stay."""
LOCK_SECONDS = 10.0  # seconds to wait for another process; each holds a file for some milliseconds

_T = TypeVar("_T")
MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, EdgeError)
"""The errors of code that reads JSON of an unexpected form."""


def read_state(path: Path, max_bytes: int = MAX_BYTES, *, links: bool = False) -> bytes | None:
    """Return a file's bytes, or None if there is no file. Remove other users' access to it. With `links`, `path` may be
    a link, as for files that the user writes; their modes are left as they are. Raise StateDamaged where it is a link,
    a pipe, a folder or larger than `max_bytes`, or it cannot be read."""
    try:
        handle = os.open(path, os.O_RDONLY | NOT_BLOCKING | (0 if links else NO_LINKS))
        if not stat.S_ISREG((found := os.fstat(handle)).st_mode):
            os.close(handle)
            raise _damaged(path, "it is not a plain file")
        with open(handle, "rb") as file:  # noqa: PTH123  a number, not a path
            if HAS_MODES and not links and found.st_mode & 0o077:
                with suppress(OSError):
                    system.close_to_others(handle)
            data = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _damaged(path, "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)) from None
    if len(data) > max_bytes:
        raise _damaged(path, f"it has more than {max_bytes} bytes, the limit for this file")
    return data


def read_json(path: Path, parse: Callable[[Any], _T], max_bytes: int = MAX_BYTES, *, links: bool = False) -> _T | None:
    """Return the result of `parse` on a JSON file, or None if there is no file. `parse` may assume that the data is
    well-formed: the errors that it raises otherwise become `StateDamaged`. Raise StateDamaged where `read_state` does,
    or the file is not JSON, or JSON of another form."""
    return _parsed(path, lambda data: parse(json.loads(data)), read_state(path, max_bytes, links=links))


def read_toml(path: Path) -> dict[str, Any] | None:
    """Return the tables of a TOML file that the user writes, or None if there is none. Raise StateDamaged."""
    return _parsed(path, lambda data: tomllib.loads(data.decode()), read_state(path, SMALL, links=True))


def read_cached(path: Path, parse: Callable[[Any], _T]) -> _T | None:
    """Return the result of `parse` on a JSON file whose content can be made again: None if it is missing or damaged."""
    with suppress(StateDamaged):
        return read_json(path, parse)
    return None


def write_cached(path: Path, value: object) -> None:
    """Write a JSON file whose content can be made again; do nothing where it cannot be written."""
    with suppress(OSError):
        write_state(path, json.dumps(value))


def write_state(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """Write `data` to `path` in one step, replacing its earlier content. A folder in its place is set aside. A
    `durable` file outlives a power cut from the moment when this returns. Raise OSError where it cannot be written; its
    earlier content is unchanged."""
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    temporary.unlink(missing_ok=True)  # a crash left the file
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | NO_LINKS | NOT_BLOCKING
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if path.is_dir() and not path.is_symlink():
            set_aside(path)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_private(path: Path) -> bytes | None:
    """Return the bytes of a file on which trust rests; None if there is none. Raise TrustUnusable."""
    try:
        return read_state(path, SMALL)
    except StateDamaged as error:
        raise TrustUnusable(error.what, "Move it away, and try again.") from None


def write_private(path: Path, data: bytes) -> None:
    """Write a file on which trust rests, in one step. Raise TrustUnusable."""
    with system_errors(TrustUnusable, path, "written"):
        write_state(path, data, durable=True)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make `folder`, closed to other users, and hold its lock until the `with` ends. Raise TrustUnusable."""
    with ExitStack() as held:
        with system_errors(TrustUnusable, folder, "used"):
            held.enter_context(hold_lock(private_folder(folder) / "lock"))
        yield


@contextmanager
def hold_lock(path: Path, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock file at `path` against other processes until the `with` ends, in whatever thread. Wait for it up to
    `seconds`, by default LOCK_SECONDS; forever if they are negative. Raise TimeoutError or NotImplementedError."""
    from filelock import FileLock  # the import takes 40 ms

    timeout = LOCK_SECONDS if seconds is None else seconds
    with FileLock(path, timeout=timeout, mode=0o600, thread_local=False).acquire(poll_interval=0.01):
        yield


@contextmanager
def system_errors(
    kind: type[EdgeError], path: Path, action: str, *, busy: type[EdgeError] | None = None,
    full: type[EdgeError] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Turn the system's errors into errors of a `kind`: `path` cannot be `action`, a participle; another process that
    holds it, and a full disk, may have kinds of their own."""
    try:
        yield
    except TimeoutError as error:
        raise (busy or kind)(f"{path} is in use by another process.", "Try again when it has finished.") from error
    except (OSError, NotImplementedError) as error:
        reason, next_step = str(error), "Check its permissions, or set EDGELLM_HOME to a folder that you own."
        if isinstance(error, NotImplementedError):  # some network drives
            reason, next_step = "the drive has no file locks", "Set EDGELLM_HOME to a folder on another drive."
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, next_step = "the disk is full", "Free some space, or set EDGELLM_HOME to a folder on another drive."
            kind = full or kind
        elif error.strerror:
            reason = error.strerror
        raise kind(f"{path} cannot be {action}: {reason}.", next_step) from error


def set_aside(path: Path) -> Path:
    """Rename the file or folder at `path` to NAME.aside, NAME.aside-2 and so on, and return the new path."""
    aside, number = path.with_name(f"{path.name}.aside"), 2
    while os.path.lexists(aside):
        aside, number = path.with_name(f"{path.name}.aside-{number}"), number + 1
    return path.rename(aside)


def keep_recent(files: Iterable[Path], most: int) -> None:
    """Remove the least recently used files until the others take at most `most` bytes."""
    found = []
    for path in files:
        with suppress(OSError):  # another process has removed it
            found.append((-path.stat().st_mtime, path.stat().st_size, path))
    for _, size, path in sorted(found):
        most -= size
        if most < 0:
            with suppress(OSError):
                path.unlink()


def private_folder(path: Path) -> Path:
    """Return the folder `path`, created if it is missing; close it, and edgellm's folders above it, to other users.
    Raise OSError if it cannot be created, is not a folder, or it or a link in its place belongs to another user."""
    _make_folder(path)
    if HAS_MODES:
        found = path.stat()
        if not (system.is_mine(found) and system.is_mine(path.lstat())):
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder")
        if found.st_mode & 0o077:
            path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
    return path


def close_to_others() -> None:
    """Remove other users' rights to edgellm's folders, and so to everything in them. Links are not followed."""
    for root in _roots():
        _close(root)


def _roots() -> tuple[Path, ...]:
    return data_dir(), state_dir(), cache_dir()


def _make_folder(path: Path) -> None:
    """Create a folder and its parents if they are missing. Close edgellm's own folders among them to other users."""
    if not path.exists():
        path.mkdir(0o700, parents=True, exist_ok=True)
    for folder in (path, *path.parents):
        if any(map(folder.is_relative_to, _roots())):
            _close(folder)


def _close(path: Path) -> None:
    """Remove other users' rights to a folder, if this user may."""
    with suppress(OSError):
        mode = path.lstat().st_mode
        if HAS_MODES and mode & 0o077 and stat.S_ISDIR(mode):
            path.chmod(mode & 0o700)


def from_json(kind: type[_T], found: Mapping[str, Any]) -> _T:
    """Return a dataclass from JSON: every field must be present, or have a default, and be of its declared type. Lists
    become tuples; whole numbers may stand for floats. NaN and infinity are refused. Raise TypeError, ValueError or
    LookupError: a field is missing, unknown or of another type; the message says which."""
    hints = get_type_hints(kind)
    if unknown := set(found) - {one.name for one in fields(cast(Any, kind)) if one.init}:
        raise LookupError(f"it has an unknown field {min(unknown)!r}")
    return kind(**{name: _checked_value(hints[name], value, name) for name, value in found.items()})


def _checked_value(hint: Any, value: Any, name: str) -> Any:
    if hint in (int, str, bool) and type(value) is hint:
        return value
    if hint is float and type(value) in (int, float) and abs(value) < float("inf"):
        return float(value)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple([_checked_value(inner[0], one, name) for one in value])
    if origin is dict and isinstance(value, dict):
        return {key: _checked_value(inner[1], one, name) for key, one in value.items()}
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return from_json(hint, value)
    raise TypeError(f"{name} cannot be {str(value)[:60]}")


def _parsed(path: Path, parse: Callable[[bytes], _T], data: bytes | None) -> _T | None:
    try:
        return None if data is None else parse(data)
    except MALFORMED as error:
        reason = error.what.rstrip(".") if isinstance(error, EdgeError) else str(error) or type(error).__name__
        raise _damaged(path, reason[:200]) from None


def _damaged(path: Path, reason: str) -> StateDamaged:
    return StateDamaged(
        f"{path} cannot be used: {reason}.", "Move it away; edgellm will create a new one if it can.", reason
    )
