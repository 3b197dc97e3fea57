"""EdgeFM-LLM, a baseline (Yang et al. 2023, as in Synera, 6.1): whole answers of high perplexity are offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from edgellm.spec.gates.profile import perplexity
from edgellm.spec.gates.rules import NeverGate
from edgellm.spec.loop import Alphabet, Event, GenerationLimits, generate
from edgellm.spec.protocols import Drafter, Verifier
from edgellm.spec.stats import Stats
from edgellm.spec.types import Explanation, Ids, Sampling, Token


def edgefm(
    prompt: Ids,
    *,
    alphabet: Alphabet,
    drafter: Drafter,
    verifier: Verifier,
    threshold: float,
    sampling: Sampling,
    limits: GenerationLimits,
    stats: Stats,
    explain: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """The draft model writes the whole reply first; where its perplexity is above `threshold`, the verifier writes it
    anew, alone. Nothing is shown before that is decided. Arguments and errors as for `generate`.
    """
    own = Stats()
    drafted = list(
        generate(
            prompt, alphabet=alphabet, drafter=drafter, gate=NeverGate(), verifier=None, sampling=sampling,
            limits=limits, stats=own, stopped=stopped,
        )
    )  # fmt: skip
    found = perplexity([event.confidence or 1.0 for event in drafted if isinstance(event, Token)])
    if explain:
        verdict = "the verifier writes it anew" if found > threshold else "it stays as it is"
        yield Explanation(0, f"a reply of perplexity {found:.2f} against {threshold:.2f}: {verdict}")
    if found > threshold and not stopped():
        yield from generate(
            prompt, alphabet=alphabet, drafter=None, gate=NeverGate(), verifier=verifier, sampling=sampling,
            limits=limits, stats=stats, explain=explain, stopped=stopped,
        )  # fmt: skip
        return
    stats.take_over(own)
    for event in drafted:
        if isinstance(event, Token):
            stats.token(event)
        yield event
