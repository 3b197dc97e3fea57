"""Runs the loop on fakes, and says whether what it wrote can be right."""

from collections.abc import Generator, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from edgellm.spec.gates.rules import AlwaysGate
from edgellm.spec.loop import Detokenizer, generate
from edgellm.spec.protocols import Drafter, Gate, GenerationLimits, GenerationState, Verifier
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Chunk, Decision, Event, Ids, Notice, Source, Token
from tests.spec.fakes import EOG, FakeDrafter, FakeVerifier, Letters, Logits, chain

PROMPT = np.array([3, 1, 4], dtype=np.int32)
BIG = chain(1)
SMALL = chain(2, like=BIG)


class CoinGate(Gate):
    """Open and shut as the given list says, again and again."""

    def __init__(self, sides: list[bool]) -> None:
        self.sides = sides
        self.turn = 0

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        assert state.written < state.limits.max_tokens
        self.turn += 1
        return Decision(self.sides[self.turn % len(self.sides)], "the coin said so")


def going(
    state: GenerationState, drafter: Drafter | None, verifier: Verifier | None, gate: Gate | None = None, *,
    vocabulary: Detokenizer = Letters(), stats: Summary | None = None, **more: Any,
) -> Generator[Event, None, None]:  # fmt: skip
    """Return the events of a reply, by default verified and in letters."""
    return generate(
        state, vocabulary=vocabulary, drafter=drafter, gate=gate or AlwaysGate(), verifier=verifier,
        stats=stats or Summary(), **more,
    )  # fmt: skip


def run(
    drafter: FakeDrafter | None, verifier: FakeVerifier | None, gate: Gate | None = None, *, max_tokens: int = 30,
    context: int = 1000, gamma: int = 4, extra: int = 0, explain: bool = False,
) -> tuple[list[Event], Summary]:  # fmt: skip
    stats, limits = Summary(len(PROMPT)), GenerationLimits(max_tokens, context, gamma, extra)
    state = GenerationState(PROMPT, GREEDY, limits, explain=explain)
    events = list(going(state, drafter, verifier, gate, stats=stats))
    assert verifier is None or all(session.closed for session in verifier.sessions)
    return events, stats


def tokens(events: Iterable[Event]) -> list[Token]:
    return [event for event in events if isinstance(event, Token)]


def ids(events: Iterable[Event]) -> list[int]:
    return [token.id for token in tokens(events)]


def notices(events: list[Event]) -> list[Notice]:
    return [event for event in events if isinstance(event, Notice)]


def alone(logits: Logits, n: int) -> list[int]:
    """What a model writes alone, greedily: at most `n` tokens, up to the end of its turn."""
    text: Ids = PROMPT
    while len(text) < len(PROMPT) + n:
        token = int(logits(text).argmax())
        if token == EOG:
            break
        text = np.append(text, token).astype(np.int32)
    return text[len(PROMPT) :].tolist()


def check_provenance(written: list[Token], big: Logits, small: Logits) -> None:
    """Each token is what its source would say after all tokens before it: with `chain`, none is lost or repeated."""
    text = PROMPT
    for token in written:
        drafted, wanted = int(small(text).argmax()), int(big(text).argmax())
        match token.source:
            case Source.DRAFT:
                assert token.id == drafted
            case Source.ACCEPTED:
                assert token.id == drafted == wanted
            case Source.CORRECTED:
                assert token.id == wanted != drafted
            case _:
                assert token.id == wanted
        assert (token.confidence is not None) == (token.source in {Source.DRAFT, Source.ACCEPTED})
        assert token.piece == Letters().piece(token.id)
        text = np.append(text, token.id).astype(np.int32)
    assert all(0 <= b.round - a.round <= 1 for a, b in pairwise(written))
