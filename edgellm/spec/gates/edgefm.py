"""EdgeFM-LLM, a baseline (Yang et al. 2023, as in Synera, 6.1): whole answers of high perplexity are offloaded."""

from __future__ import annotations

from collections.abc import Iterator

from edgellm.spec.gates.profile import perplexity
from edgellm.spec.gates.rules import NeverGate
from edgellm.spec.loop import Detokenizer, Event, generate
from edgellm.spec.protocols import Drafter, Verifier
from edgellm.spec.state import GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.types import Explanation, Token


def edgefm(
    state: GenerationState,
    *,
    vocabulary: Detokenizer,
    drafter: Drafter,
    verifier: Verifier,
    threshold: float,
    stats: Stats,
) -> Iterator[Event]:
    """Have the draft model write the whole reply first; where its perplexity is above `threshold`, the verifier writes
    it again, alone. Nothing is shown before that is decided. Arguments and errors as for `generate`.
    """
    own, never = Stats(), NeverGate()
    drafted = list(
        generate(
            state.quietly(), vocabulary=vocabulary, drafter=drafter, gate=never, verifier=None, stats=own
        )
    )  # fmt: skip
    found = perplexity([event.confidence or 1.0 for event in drafted if isinstance(event, Token)])
    if state.explain:
        verdict = "the verifier writes it again" if found > threshold else "it stays as it is"
        yield Explanation(0, f"a reply of perplexity {found:.2f} against {threshold:.2f}: {verdict}")
    if found > threshold and not state.stopped():
        yield from generate(state, vocabulary=vocabulary, drafter=None, gate=never, verifier=verifier, stats=stats)
        return
    stats.take_over(own)
    for event in drafted:
        if isinstance(event, Token):
            stats.token(event)
        yield event
