"""Chat templates that take long to compile, do more than they may, or try to escape from the sandbox."""

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
from edgellm.engine.chat.template import MOST_SOURCE, Template
from edgellm.errors import ModelUnsupported
from testkit.hostile.inputs import ESCAPES, HARMLESS, HOSTILE, LONG_TO_COMPILE
from testkit.memory import most_memory

SECONDS = 3.0  # processor seconds: the limit of 2, and Python's start
MEMORY = 128 * 2**20  # bytes of the child with its Python, and additional bytes of this process
_INSIDE = ("<class", "<module", "built-in", "root:")
_MODULE = "edgellm.isolation.template_sandbox"
_MESSAGES = [{"role": "user", "content": "hello"}]


class Watch:
    """Samples the memory of this process's children until it is stopped; `most` is the maximum of one child."""

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
                    if child.cmdline()[4:5] == [_MODULE]:  # until then it shares this process's memory
                        self.most = max(self.most, most_memory(child.pid))


def processor() -> float:
    """Return the processor seconds of this process's ended children, and of this thread."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + time.thread_time()


def rendered(source: str) -> str | None:
    """Return the text that a template writes; None if it is refused."""
    template = Template(source, "a hostile model")
    try:
        return template.render(_MESSAGES, "<bos>", "<eos>")
    except ModelUnsupported:
        return None
    finally:
        template.close()


def exhaust(sources: Mapping[str, str], harmless: Collection[str], _quick: bool) -> Found:
    """Render each template; only harmless ones may be rendered."""
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
    """Render each template; none may write a file or show Python's internals."""
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
        "chat templates that loop, multiply texts and numbers, or write endlessly",
        partial(exhaust, HOSTILE, HARMLESS),
    ),
    Attack("template-escaping", "known escapes from sandboxes, to files, processes and sockets", escape),
)
