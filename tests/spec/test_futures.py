"""Waiting for what others compute."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from edgellm.errors import Stopped
from edgellm.spec.verifier import wait_for_result


def test_what_the_work_raises_is_raised_even_where_it_is_a_timeout() -> None:
    future: Future[int] = Future()
    threading.Timer(0.1, lambda: future.set_exception(TimeoutError("of its own"))).start()
    with pytest.raises(TimeoutError, match="of its own"):
        wait_for_result(future, lambda: False)


def test_nobody_waits_for_what_is_not_wanted_any_more() -> None:
    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) == 3

    with pytest.raises(Stopped):
        wait_for_result(Future(), stopped)
    assert len(asked) == 3
