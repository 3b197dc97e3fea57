"""Chat templates that take long to compile, do more than they may, or look for a way out of the sandbox."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench.robustness.attack.harness import Attack, Found
from edgellm.engine.chat_template import MOST_SOURCE, Template
from edgellm.errors import ModelUnsupported
from testkit.hostile.inputs import ESCAPES, HARMLESS, HOSTILE, LONG_TO_COMPILE
from testkit.memory import most_memory

SECONDS = 3.0  # seconds of the processor: the limit is 2, and Python starts besides
MEMORY = 128 * 2**20  # bytes of the child with its Python, and of this process beyond what it had before
_INSIDE = ("<class", "<module", "built-in", "root:")
_MODULE = "edgellm.isolation.template_child"
_MESSAGES = [{"role": "user", "content": "hello"}]


class Watch:
    """Looks at the memory of this process's children until it is stopped; `most` is the most that one had at once."""

    def __init__(self) -> None:
        self.most, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            for child in psutil.Process().children():
                with suppress(psutil.Error, OSError, KeyError):  # it has just ended
                    if child.cmdline()[3:4] == [_MODULE]:  # before, it shares this process's memory
                        self.most = max(self.most, most_memory(child.pid))


def processor() -> float:
    """Return the seconds of the processor that the ended children of this process have used, and this thread."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + time.thread_time()


def rendered(source: str) -> str | None:
    """Return what a template writes; None where it is refused."""
    template = Template(source, "a hostile model")
    try:
        return template.render(_MESSAGES, "<bos>", "<eos>")
    except ModelUnsupported:
        return None
    finally:
        template.close()


def exhaust(sources: Mapping[str, str], harmless: Collection[str], _quick: bool) -> Found:
    """Render each; only the harmless ones may have an answer."""
    wrong, longest, before = [], 0.0, most_memory()
    watch = Watch()
    for name, source in sources.items():
        began = processor()
        text = rendered(source)
        seconds = processor() - began
        longest = max(longest, seconds)
        if seconds > SECONDS:
            wrong.append(f"{name}: {seconds:.1f} s")
        if text is not None and name not in harmless:
            wrong.append(f"{name}: rendered as {text[:100]!r}")
    watch.stop()
    here = most_memory() - before
    if max(here, watch.most) > MEMORY:
        wrong.append(f"{here >> 20} MiB here, {watch.most >> 20} MiB in a child")
    figures = {"longest_s": longest, "child_mib": watch.most / 2**20, "here_mib": here / 2**20}
    return Found(len(sources), tuple(wrong), figures)


def escape(_quick: bool) -> Found:
    """Render each; nothing may be written into a file, or told about Python's insides."""
    wrong = []
    for name, source in ESCAPES.items():
        with TemporaryDirectory() as folder:
            text = rendered(source.replace("MARK", f"{folder}/written")) or ""
            if any(word in text for word in _INSIDE) or any(Path(folder).iterdir()):
                wrong.append(f"{name}: rendered as {text[:100]!r}")
    return Found(len(ESCAPES), tuple(wrong))


COMPILED = {name: statement * (MOST_SOURCE // len(statement)) for name, statement in LONG_TO_COMPILE.items()}

ATTACKS = (
    Attack(
        "template-compiling",
        "64 KiB of statements that take Jinja half a minute to compile",
        partial(exhaust, COMPILED, COMPILED),
    ),
    Attack(
        "template-rendering",
        "chat templates that loop, multiply texts and numbers, or write without an end",
        partial(exhaust, HOSTILE, HARMLESS),
    ),
    Attack("template-escaping", "ways out of sandboxes that were known once, to files, processes and sockets", escape),
)
