"""Downloads of a file over HTTP into a partial file, resumed where the last attempt stopped; and the list of a
repository's files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgellm.errors import DiskFull, PullFailed
from edgellm.storage.fingerprint import SHA256, sha256_of

MAX_LISTING_BYTES = 16 * 2**20
MAX_LISTING_SECONDS = 60.0
_MAX_SIZE = 10**18 - 1  # bytes of a file
_ERROR_HEADERS = ("x-error-code", "x-error-message")
_PLAIN = {"Accept-Encoding": "identity"}
ATTEMPTS = 5  # attempts in a row without a new byte
_SIZE = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository's newest commit, its present name, and its files by name, each with its size in bytes and SHA-256 in
    hex; "" and 0 where the hub does not say."""

    commit: str
    repo_id: str
    files: Mapping[str, tuple[int, str]]


def read_listing(url: str, headers: Mapping[str, str], timeout: float) -> Listing:
    """Return the listing of a repository, except names that a terminal would not show as they are. Raise PullFailed."""
    try:
        answer = json.loads(_body(url, headers, timeout))
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise _invalid_answer(url, "not the JSON of a model")
    siblings = answer.get("siblings")
    files = {
        one["rfilename"]: _listed(one)
        for one in (siblings if isinstance(siblings, list) else ())
        if isinstance(one, dict) and isinstance(one.get("rfilename"), str) and one["rfilename"].isprintable()
    }
    commit, repo_id = (value if isinstance(value := answer.get(key), str) else "" for key in ("sha", "id"))
    return Listing(commit, repo_id, files)


def _listed(sibling: Mapping[str, Any]) -> tuple[int, str]:
    large = sibling.get("lfs")
    size, sha256 = (large.get("size"), large.get("sha256")) if isinstance(large, dict) else (sibling.get("size"), "")
    return (
        size if isinstance(size, int) and 0 < size <= _MAX_SIZE else 0,
        sha256 if isinstance(sha256, str) and SHA256.fullmatch(sha256) else "",
    )


def raise_for_status(response: Any) -> None:
    """Raise the hub's library's error for an error status, without reading a body that may have no end."""
    if response.status_code >= 400:
        from huggingface_hub.utils import hf_raise_for_status

        told = {name: value for name, value in response.headers.items() if name.lower() in _ERROR_HEADERS}
        hf_raise_for_status(type(response)(response.status_code, headers=told, request=response.request))


def _body(url: str, headers: Mapping[str, str], timeout: float) -> bytes:
    from huggingface_hub.utils import get_session

    until, body = time.monotonic() + MAX_LISTING_SECONDS, bytearray()
    with get_session().stream("GET", url, headers={**headers, **_PLAIN}, timeout=timeout) as response:
        raise_for_status(response)
        for block in response.iter_bytes():
            body += block
            if len(body) > MAX_LISTING_BYTES:
                raise _invalid_answer(url, f"more than {MAX_LISTING_BYTES >> 20} MiB")
            if time.monotonic() > until:
                raise PullFailed(f"{url} did not answer within {MAX_LISTING_SECONDS:.0f} s.", "Try again later.")
    return bytes(body)


def _invalid_answer(url: str, what: str) -> PullFailed:
    return PullFailed(f"The answer of {url} is invalid: it is {what}.", "Check HF_ENDPOINT.")


@dataclass(frozen=True, slots=True)
class Transfer:
    """The progress of a download, in bytes: `resumed` were there before."""

    done: int
    total: int
    resumed: int


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file on the hub, or in a package. `etag` is its SHA-256 where it is known before; `size` in bytes."""

    name: str
    url: str
    etag: str
    size: int


Progress = Callable[[int, int], None]
"""Is told how many bytes of a file are here, and how many of them have come just now."""


def download(remote: RemoteFile, headers: Mapping[str, str], partial: Path, progress: Progress) -> None:
    """Download the rest of `remote` into `partial`, and check size and SHA-256; try again after a cut connection."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        with partial.open("ab") as file:
            if file.tell() > remote.size:
                _restart(file)
            _receive_all(remote, headers, file, progress)
    except HfHubHTTPError:  # HfHubHTTPError is an OSError, too
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(partial.parent, remote.size - partial.stat().st_size) from error
        raise PullFailed(
            f"{partial} cannot be written: {error.strerror}.", "Check the folder's permissions."
        ) from error
    if SHA256.fullmatch(remote.etag) and sha256_of(partial) != remote.etag:
        partial.unlink()
        raise PullFailed(
            f"The downloaded {remote.name} is not the file that the hub announced: its SHA-256 differs.",
            "Pull it again.",
        )


def _receive_all(remote: RemoteFile, headers: Mapping[str, str], file: BinaryIO, progress: Progress) -> None:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.errors import HTTPError as AnyHttpError  # the error of the HTTP client that the library uses

    failures = 0
    while file.tell() < remote.size:
        reason = "the connection was closed"
        try:
            for count in _receive(remote, headers, file):
                failures = 0
                progress(file.tell(), count)
        except HfHubHTTPError as error:
            status = error.response.status_code
            reason = f"the server answered {status}"
            if status < 500 and status not in (408, 429):
                raise
        except AnyHttpError as error:
            reason = str(error) or type(error).__name__
        if file.tell() < remote.size:
            failures += 1
            if failures >= ATTEMPTS:
                raise PullFailed(
                    f"The download of {remote.name} stopped at {_mb(file.tell())} of {_mb(remote.size)}: {reason}.",
                    "Pull it again to resume: the downloaded part is kept.",
                )
            time.sleep(min(2.0 ** (failures - 1), 8.0))


def _receive(remote: RemoteFile, headers: Mapping[str, str], file: BinaryIO) -> Iterator[int]:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offset, timeout = file.seek(0, os.SEEK_END), constants.HF_HUB_DOWNLOAD_TIMEOUT
    asked = {**headers, **_PLAIN, **({"Range": f"bytes={offset}-"} if offset else {})}
    with get_session().stream("GET", remote.url, headers=asked, timeout=timeout) as response:
        raise_for_status(response)
        if offset and response.status_code != 206:  # the server sends everything again
            offset = _restart(file)
        length = response.headers.get("Content-Length", "")
        if _SIZE.fullmatch(length) and offset + int(length) != remote.size:
            raise PullFailed(
                f"The server offers {offset + int(length)} bytes, but {remote.size} were announced.",
                "The file may have changed on the hub: pull it again.",
            )
        # Take blocks as they come: with a fixed size, a half-filled block would be lost with the connection.
        for block in response.iter_raw():
            if file.tell() + len(block) > remote.size:
                raise PullFailed(f"The server sent more than the {remote.size} bytes it announced.", "Pull it again.")
            file.write(block)
            yield len(block)


def _restart(file: BinaryIO) -> int:
    file.seek(0)
    return file.truncate()


def check_space(folder: Path, needed: int) -> None:
    """Raise DiskFull where the disk of `folder` has not `needed` bytes."""
    if shutil.disk_usage(folder).free < needed:
        raise _disk_full(folder, needed)


def _disk_full(folder: Path, needed: int) -> DiskFull:
    free = shutil.disk_usage(folder).free
    return DiskFull(
        f"The disk of {folder} is too full: {_mb(needed)} are still needed, {_mb(free)} are free.",
        "Free some space (`edgellm rm` removes models), then pull it again: the downloaded part is kept.",
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
