"""`python -m tests.cli.endless ...` is `edgellm ...` with a model that never ends a reply."""

import time
from collections.abc import Callable, Generator

from edgellm import llm
from edgellm.cli import main
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply
from edgellm.spec.types import Event, Source, Token


def _write(stats: Summary, explain: bool, stopped: Callable[[], bool], *_: object) -> Generator[Event, None, None]:
    number = 0
    while not stopped():
        token = Token(number, b"on ", Source.ACCEPTED, round=number)
        stats.token(token)
        stats.show(token)
        yield token
        number += 1
        time.sleep(0.01)


if __name__ == "__main__":
    llm.LLM.reply = lambda *_, **__: Reply(_write, prompt_tokens=1, seed=0)  # type: ignore[method-assign]
    main()
