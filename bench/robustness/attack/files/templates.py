"""Chat templates that take long to compile."""

from __future__ import annotations

import time

from bench.robustness.attack.harness import Attack, Found
from testkit.hostile.inputs import LONG_TO_COMPILE

ALLOWED = 3.0  # seconds of the processor: the limit is 2, and one step of the compiler may come after it


def _compile(_quick: bool) -> Found:
    from edgellm.engine.chat_template import MOST_SOURCE, Template

    wrong, longest = [], 0.0
    for name, statement in LONG_TO_COMPILE.items():
        began = time.thread_time()
        try:
            Template(statement * (MOST_SOURCE // len(statement)))
        except Exception as error:  # noqa: BLE001  being refused is an answer
            if isinstance(error, MemoryError):
                wrong.append(f"{name}: {error!r}")
        longest = max(longest, time.thread_time() - began)
        if longest > ALLOWED:
            wrong.append(f"{name}: {longest:.1f} s to compile")
    return Found(len(LONG_TO_COMPILE), tuple(wrong), {"longest s": longest})


ATTACKS = (Attack("template-compiling", "64 KiB of statements that take Jinja half a minute to compile", _compile),)
