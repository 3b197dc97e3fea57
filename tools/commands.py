"""Runs other programs, says how they ended, and ends them."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence


def works(command: Sequence[str]) -> bool:
    return output_of(command) is not None


def output_of(command: Sequence[str]) -> str | None:
    """Return what a command prints on standard output; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def failure(command: Sequence[str]) -> str:
    """Return why a command fails, as it says; "" if it does not."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return ""
    return done.stderr.strip() or f"the process that tries it ends with {done.returncode}."


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    if sys.platform == "win32":
        works(["taskkill", "/T", "/F", "/PID", str(process.pid)])
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def processor_seconds() -> float:
    """Return the processor time of all processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system
