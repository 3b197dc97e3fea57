"""Sleep of this machine: kept off while it works for others, and ended by a magic packet where the system allows it."""

import ctypes
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Literal, TypeAlias

_BLOCKERS = {
    "linux": ("systemd-inhibit", "--what=sleep:idle", "--who=edgellm", "--why=It computes for others.", "cat"),
    "darwin": ("caffeinate", "-i", "cat"),
}
"""Programs that keep a system awake until their input ends, as it does with this process."""


class KeepAwake:
    """Keeps this machine awake while work is under way, and `linger` seconds longer; not at all until `begin`. A second
    without work always passes first, so that the rounds of a reply are one piece of work."""

    def __init__(self, system: str = sys.platform) -> None:
        self._system = system
        self._tell: Callable[[str], None] = lambda _why: None
        self._linger: float | None = None
        self._count, self._until = 0, 0.0
        self._changed = threading.Condition()
        self._holder: threading.Thread | None = None

    def begin(self, linger: float, tell: Callable[[str], None]) -> None:
        """Keep the machine awake from now on; `tell` is called, once, with the reason where it cannot be kept awake."""
        self._linger, self._tell = linger, tell

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a piece of work while the `with` lasts. Any thread may do so."""
        with self._changed:
            self._count += 1
            if self._linger is not None and self._holder is None:
                self._holder = threading.Thread(target=self._hold, name="edgellm-awake", daemon=True)
                self._holder.start()
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._until = monotonic() + max(1.0, self._linger or 0.0)
                self._changed.notify()

    def touch(self) -> None:
        """Count a piece of work that has just ended."""
        with self.working():
            pass

    def _hold(self) -> None:
        try:
            with _blocked(self._system), self._changed:
                while self._count or monotonic() < self._until:
                    self._changed.wait(None if self._count else self._until - monotonic())
                self._holder = None
        except OSError as error:
            with self._changed:  # One that began meanwhile fails, too.
                told, self._linger = self._linger is None, None  # It is not tried again.
            if not told:
                self._tell(f"This machine may fall asleep while it works for others: {error}.")


@contextmanager
def _blocked(system: str) -> Iterator[None]:
    """Keep the system awake while the `with` lasts, in one thread. Raise OSError, with the reason, where that fails."""
    if system == "win32":
        state = ctypes.CDLL("kernel32").SetThreadExecutionState
        state(0x80000001)  # ES_CONTINUOUS and ES_SYSTEM_REQUIRED
        yield
        state(0x80000000)
        return
    if (words := _BLOCKERS.get(system)) is None:
        raise OSError(f"edgellm does not know how on {system}")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as blocker:
        yield
        _, said = blocker.communicate()
    if blocker.returncode:
        raise OSError(f"{words[0]}: {said.decode(errors='replace').strip().rstrip('.')}")


AWAKE = KeepAwake()
"""Of this process, which has one machine."""

Waking: TypeAlias = tuple[Literal["ok", "note"], str, str]
"""A state, what is said of it, and what to do next."""


def _output(words: Sequence[str]) -> str:
    """Return what a program of the system prints; "" where it is missing or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, check=True, text=True, timeout=5.0).stdout
    return ""


def waking(
    card: str, system: str = sys.platform, run: Callable[[Sequence[str]], str] = _output,
    cards: Path = Path("/sys/class/net"),
) -> Waking:  # fmt: skip
    """Return whether a magic packet to a network `card` wakes this machine up, by Linux's `cards` or by what a program
    of the system prints, which `run` returns."""
    by, allow = card, f"To allow it: sudo ethtool -s {card} wol g"
    wakes: bool | None = None
    if system == "linux":
        folder = cards / card
        if not (folder / "device").exists():
            what = f"{card} is no network card, so no magic packet wakes this machine by it."
            return "note", what, "Use a network card of the machine itself."
        wireless = (folder / "wireless").exists()
        by = f"{card} ({'Wi-Fi' if wireless else 'wired'})"
        allow = "To allow it: sudo iw phy phy0 wowlan enable magic-packet" if wireless else allow
        if found := re.search(r"^\s*Wake-on: (\w+)", run(["ethtool", card]), re.MULTILINE):
            wakes = "g" in found[1]
        with suppress(OSError):  # a device without this file cannot say
            wakes = wakes if (folder / "device/power/wakeup").read_text().strip() == "enabled" else False
    elif system == "darwin":
        allow = "To allow it: sudo pmset -a womp 1"
        if found := re.search(r"^\s*womp\s+(\d)", run(["pmset", "-g"]), re.MULTILINE):
            wakes = found[1] == "1"
    elif system == "win32":
        armed = run(["powercfg", "/devicequery", "wake_armed"])
        allow = 'To allow it: powercfg /deviceenablewake "NAME", with a name of powercfg /devicequery wake_programmable'
        wakes = bool(re.search("ethernet|lan|wi-?fi|network|gbe", armed, re.IGNORECASE)) if armed.strip() else None
    if wakes is None:
        return "note", f"It is unknown whether a magic packet wakes this machine by {by}.", allow
    if not wakes:
        return "note", f"No magic packet wakes this machine by {by}: that is switched off.", allow
    return "ok", f"A magic packet wakes this machine by {by}.", ""
