"""Plays a new user's first hour with real weights and two devices, and writes its transcript: docs/guide/first-hour.md.

    .venv/bin/python -m tools.first_hour

SmolLM2 has to be here (`edgellm pull smollm2:135m`), and curl. Each device is a folder with a home of its own, on
loopback; a command that ends in & runs on until the next `kill` of its device. Keys and folders are not written down.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from edgellm.storage.model_files import resolve
from testkit import ROOT

PAGE = ROOT / "docs" / "guide" / "first-hour.md"
MODEL = "smollm2:135m"
HOUR = ROOT / "tools" / "first_hour.txt"
_COMMAND = re.compile(r"(laptop|desk)\$ (.+)")
_READY, _SECONDS = "Ctrl-C", 120.0  # a server's last line, and how long that may take
_BAR = re.compile(r"^(loading|hashing|measuring) .*: .*\n", re.MULTILINE)
_SECRET = re.compile(r"(#key=)\S+")


class Device:
    """A device of the hour: its home, and the program that runs there."""

    def __init__(self, folder: Path) -> None:
        models, studio = folder / "cache" / "models", folder / ".lmstudio" / "models" / "ann" / "tiny-GGUF"
        models.parent.mkdir(parents=True)
        studio.mkdir(parents=True)
        path = resolve(MODEL)
        models.symlink_to(path.parent)
        for copy in (studio / "tiny-Q8_0.gguf", folder / "smollm2.gguf"):
            shutil.copy(path, copy)
        (folder / "three.txt").write_text("What is rain?\nWhat is snow?\nWhat is hail?\n")
        self._folder, self._running, self._logs = folder, list[subprocess.Popen[bytes]](), count()

    def run(self, command: str) -> str:
        """Run a command, and return what it prints, or has printed by the time that it is ready."""
        if command == "kill":
            self.kill()
            return ""
        goes_on = command.endswith("&")
        shell = f'edgellm() {{ {shlex.quote(sys.executable)} -m edgellm "$@"; }}; {command.removesuffix("&")}'
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELLM_", "HF_"))}
        home = {"HOME": str(self._folder), "EDGELLM_HOME": str(self._folder), "HF_HOME": str(self._folder / "hub")}
        environment |= home | {"EDGELLM_INTERFACE": "127.0.0.1", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
        log = self._folder / f"log-{next(self._logs)}"
        with log.open("wb") as printed:
            begun = subprocess.Popen(
                ["bash", "-c", shell], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, cwd=self._folder,
                env=environment, start_new_session=True,
            )  # fmt: skip
            if goes_on:
                self._running.append(begun)
                until = time.monotonic() + _SECONDS
                while _READY not in log.read_text() and begun.poll() is None and time.monotonic() < until:
                    time.sleep(0.2)
            else:
                begun.wait()
        return _BAR.sub("", log.read_text()).replace(str(self._folder), "~")

    def kill(self) -> None:
        """End what runs here, in the middle of whatever it does."""
        for one in self._running:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait()
        self._running.clear()


def played(hour: str) -> str:
    """Return the transcript of an hour."""
    lines = list[str]()
    with two_devices() as devices:
        for line in hour.splitlines():
            lines.append(line)
            if asked := _COMMAND.fullmatch(line):
                sys.stderr.write(f"{line}\n")
                said = _SECRET.sub(r"\1KEY", devices[asked[1]].run(asked[2])).strip("\n")
                lines += (one.rstrip() for one in said.splitlines())
    return "\n".join(lines)


@contextmanager
def two_devices() -> Iterator[dict[str, Device]]:
    """Make a laptop and a desk; whatever still runs there at the end is killed."""
    with tempfile.TemporaryDirectory() as folder:
        devices = {name: Device(Path(folder) / name) for name in ("laptop", "desk")}
        try:
            yield devices
        finally:
            for device in devices.values():
                device.kill()


def main() -> int:
    introduction, _, _ = PAGE.read_text(encoding="utf-8").partition("```console")
    PAGE.write_text(f"{introduction}```console\n{played(HOUR.read_text(encoding='utf-8'))}\n```\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
