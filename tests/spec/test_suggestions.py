"""What is suggested to the draft model saves decodes, and changes nothing of what it drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Floats, Ids, Model
from edgellm.spec.draft_length import CostCurve
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.state import DraftRules, GenerationState, Suggestions
from edgellm.spec.types import GREEDY, Sampling
from tests.spec.real import case

GAMMA = 12
FREE = CostCurve((1, 64), (1.0, 1.0))  # rows beyond the first cost nothing


class Known(Suggestions):
    """Suggests what stands in `text`; from place `wrong` of it on, other tokens."""

    def __init__(self, text: Sequence[int] = (), wrong: int = 0, least: Sequence[float] = ()) -> None:
        self._text, self._wrong, self._least = text, wrong, least

    def floors(self, seconds: float = 0.0) -> Sequence[float]:
        return self._least

    def suggest(self, state: GenerationState, drafted: Sequence[int], floors: Sequence[float]) -> list[int]:
        here = list(enumerate(self._text))[len(drafted) : len(drafted) + len(floors)]
        return [token if at < self._wrong else token ^ 1 for at, token in here]


class Counting(Context):
    """Counts decodes."""

    decodes = 0

    def decode(self, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        self.decodes += 1
        return super().decode(ids, seq=seq, outputs=outputs)


@pytest.fixture(scope="module")
def exact(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[0]) as model:
        yield model


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, seed=3)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("wrong", [0, 5, GAMMA])
@pytest.mark.parametrize("number", [0, 1, 6])
def test_a_suggested_chunk_is_the_chunk(exact: Model, sampling: Sampling, wrong: int, number: int) -> None:
    prompt = exact.chat_prompt(case(number))
    with Counting(exact, ContextSpec(512, threads=1)) as one, Counting(exact, ContextSpec(512, threads=1)) as other:
        alone, helped = ModelDrafter(exact, one), ModelDrafter(exact, other, curve=lambda: FREE)
        wanted = alone.propose(GenerationState(prompt, sampling), GAMMA)
        state = GenerationState(prompt, sampling, suggestions=Known(wanted.ids.tolist(), wrong))
        helped.begin(state)
        found = helped.propose(state, GAMMA)
        assert found.ids.tolist() == wanted.ids.tolist()
        assert np.allclose(found.confidence, wanted.confidence, atol=1e-4)
        assert np.allclose(found.margin, wanted.margin, atol=1e-4)
        assert other.decodes == max(1, one.decodes - min(wrong, len(wanted) - 1))
        behind = np.concatenate((prompt, wanted.ids[:2]))  # the cache is sound for what comes next
        assert (
            helped.propose(GenerationState(behind, sampling), 4).ids.tolist()
            == alone.propose(GenerationState(behind, sampling), 4).ids.tolist()
        )


def test_a_chunk_ends_where_its_chance_is_too_small(exact: Model) -> None:
    prompt = exact.chat_prompt(case(2))
    with Context(exact, ContextSpec(n_ctx=512, threads=1)) as context:
        drafter = ModelDrafter(exact, context)
        whole = drafter.propose(GenerationState(prompt), GAMMA)
        alive = np.cumprod(whole.confidence)
        cut = int(np.argmax(alive < alive[0]))  # the first place that is surer to be wrong than the first
        known = Known(least=[0.0] * cut + [float(alive[cut]) + 1e-3])
        rules = DraftRules(while_it_pays=True)
        short = drafter.propose(GenerationState(prompt, rules=rules, suggestions=known), GAMMA)
        assert short.ids.tolist() == whole.ids[: cut + 1].tolist()
        assert 0 < len(short) < len(whole)
