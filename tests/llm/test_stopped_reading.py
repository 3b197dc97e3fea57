"""A reply that is stopped while its prompt is still being read: at once, and everything is sound afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm.llm import LLM
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.stream import Reply
from tests.decodes import FEW, Decodes, Watched
from tests.spec.real import case, ids

LONG = "The red mug is on the shelf in the kitchen. " * 30 + "\n\nWhere is the red mug?"
ABORTED = 2


WAYS: dict[str, dict[str, Any]] = {
    "everything": {},
    "the draft model": {"gate": "never"},
    "with calibration": {"retrieval": "context,calibration"},
    "the verifier": {"retrieval": "off", "gate": "always", "gamma": 4},
    "an early exit": {"early_exit": True, "exit_threshold": 0.9, "retrieval": "off"},
    "probabilities": {"logprobs": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_more_is_computed_and_the_next_reply_is_that_of_a_fresh_pair(
    f32_pair: tuple[Path, Path], pair: LLM, rows_are_cheap: None, decodes: Watched, way: str
) -> None:
    seen, meanwhile = decodes
    options = {"max_tokens": 6, **WAYS[way]}
    wanted = [ids(pair.reply(question, **options)) for question in (LONG, case(3))]
    with LLM.open(*f32_pair, threads=1) as other:
        ids(other.reply(case(4), **options))  # measures what it must, and leaves its caches full
        seen.clear()
        reply = other.reply(LONG, **options)
        meanwhile.append(reply.cancel)
        assert ids(reply) == []
        assert [status for rows, status in seen if rows > FEW] == [ABORTED]
        assert reply.summary.finish_reason == "cancelled"
        assert [ids(other.reply(question, **options)) for question in (LONG, case(3))] == wanted


def test_a_wait_for_a_verifier_that_reads_ends_too(
    f32_pair: tuple[Path, Path], server: VerifierServer, decodes: Watched
) -> None:
    """Of one that is across the link, and of one that is served here; the worker drops the prompt between two parts."""
    seen, meanwhile = decodes
    with LLM.open("none", str(server.address), tokenizer=f32_pair[1], threads=1) as linked:
        wanted = ids(linked.reply(LONG, max_tokens=6))
        with LLM(server.model, verifier=server.inside(), threads=1) as inside:
            assert ids(inside.reply(LONG, max_tokens=6)) == wanted  # measures what it must
            for pair in (linked, inside):
                _while_it_reads(pair, seen, meanwhile)
                assert ids(pair.reply(LONG, max_tokens=6)) == wanted


def _while_it_reads(pair: LLM, seen: Decodes, meanwhile: list[Callable[[], None]]) -> None:
    reading, go = threading.Event(), threading.Event()

    def stands() -> None:
        reading.set()
        go.wait()

    meanwhile.append(stands)
    reply: Reply = pair.reply("Again. " + LONG, max_tokens=6)
    written: list[int] = []
    thread = threading.Thread(target=lambda: written.extend(ids(reply)))
    thread.start()
    assert reading.wait(60)
    reply.cancel()
    thread.join(60)
    assert not thread.is_alive()  # although the verifier's worker still stands
    assert (written, reply.summary.finish_reason) == ([], "cancelled")
    seen.clear()
    go.set()
    with pair.reply("Again.", max_tokens=1) as short:
        ids(short)
    assert sum(rows for rows, _ in seen) < 200  # the part it was at, and nothing more of that prompt
