"""Another placement takes over behind a reply, or cannot, and the text is that of the uncut model."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from edgellm.engine import Ids
from edgellm.errors import DeviceLost, PlanImpossible
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import StageLost
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import GREEDY
from tests.engine.logits import some_ids
from tests.mesh.household import Home, Whole, all_at_once, asker, write
from tests.waiting import until

PROMPT = some_ids(40, 2000, 5)
TOKENS = 20


def alone(name: str) -> tuple[StageShare, ...]:
    return (StageShare(name, LayerRange(0, 12)),)


def after_each(session: Session, then: Callable[[int], None]) -> Callable[[Ids], int]:
    """Ask, and call `then` with the number of tokens before every token."""
    ask = asker(session)

    def step(text: Ids) -> int:
        then(len(text) - len(PROMPT))
        return ask(text)

    return step


def settle(mesh: Mesh) -> None:
    """Wait until the next pipeline has loaded and read what it was given, or is lost."""
    until(lambda: (coming := mesh.coming()) is not None and (coming.pipeline.lost is not None or not coming.busy))


def test_a_placement_takes_over_behind_a_reply(home: Home, whole: Whole) -> None:
    home.mesh.move([alone("b"), alone("c")])
    session = home.verifier.open(GenerationState())

    def then(tokens: int) -> None:
        if tokens % 2 == 0 and tokens and len(home.mesh.take_overs) < 2:  # loaded first, and then read
            settle(home.mesh)

    assert write(after_each(session, then), PROMPT, TOKENS) == whole.text(PROMPT, TOKENS)
    assert [take_over.shares for take_over in home.mesh.take_overs] == [alone("b"), alone("c")]
    assert home.mesh.shares == alone("c")
    assert home.mesh.recoveries == 0
    assert home.told == []
    first = home.mesh.take_overs[0]
    assert first.began <= first.loaded <= first.ready <= first.at
    assert len(PROMPT) + 2 <= first.tokens <= len(PROMPT) + 4


def test_two_replies_move_together(home: Home, whole: Whole) -> None:
    home.mesh.move([alone("b")])
    prompts = [PROMPT, PROMPT[::-1].copy()]
    assert all_at_once(home.verifier, GREEDY, prompts, TOKENS) == [whole.text(one, TOKENS) for one in prompts]


@pytest.mark.parametrize("seed", range(6))
def test_a_device_is_lost_in_the_middle_of_a_move(home: Home, whole: Whole, seed: int) -> None:
    """Whether it is one of the present placement or the one that is to take over, loading, reading or there already."""
    rng = random.Random(seed)
    victim, after, settled = "abc"[seed % 3], rng.randrange(1, 8), rng.randrange(8)
    home.mesh.move([alone("b")])
    session = home.verifier.open(GenerationState())

    def then(tokens: int) -> None:
        if tokens == settled and home.mesh.coming() is not None:
            settle(home.mesh)
        if tokens == after:
            home.devices[victim].lose()

    assert write(after_each(session, then), PROMPT, TOKENS) == whole.text(PROMPT, TOKENS)
    assert victim not in {share.name for share in home.mesh.shares}


def test_if_the_present_placement_is_lost_the_next_one_takes_over_at_once(home: Home, whole: Whole) -> None:
    home.mesh.move([alone("b")])
    session = home.verifier.open(GenerationState())

    def then(tokens: int) -> None:
        if tokens == 2:
            settle(home.mesh)
            home.devices["a"].lose()

    assert write(after_each(session, then), PROMPT, TOKENS) == whole.text(PROMPT, TOKENS)
    assert home.mesh.shares == alone("b")
    assert len(home.mesh.take_overs) == 1
    assert "Those that were to take over do so now" in home.told[0]


def test_a_device_that_cannot_take_over_costs_nothing(home: Home, whole: Whole) -> None:
    home.mesh.move([alone("b")])
    session = home.verifier.open(GenerationState())
    home.devices["b"].posts.clear()

    def then(tokens: int) -> None:
        if tokens == 2:
            settle(home.mesh)
            posts = home.devices["b"].posts  # of the next pipeline only
            posts[-1](StageLost(DeviceLost("no room.", "")))

    assert write(after_each(session, then), PROMPT, TOKENS) == whole.text(PROMPT, TOKENS)
    assert [share.name for share in home.mesh.shares] == ["a", "b", "c"]
    assert home.told == ["b cannot take over (no room.) The layers stay where they are."]
    assert home.mesh.recoveries == 0


def test_after_the_reply_the_model_lies_where_the_next_one_is_fastest(home: Home, whole: Whole) -> None:
    home.mesh.move([], rest=alone("c"))
    session = home.verifier.open(GenerationState())
    first = write(asker(session), PROMPT, 4)
    assert home.mesh.coming() is None
    session.close()
    settle(home.mesh)
    session = home.verifier.open(GenerationState())
    text = [*PROMPT.tolist(), *first, 5, 6, 7]
    following = np.array(text, dtype=np.int32)
    assert write(asker(session), following, 6) == whole.text(following, 6)
    assert home.mesh.shares == alone("c")
    session.close()
    assert home.mesh.coming() is None


def test_a_next_pipeline_that_was_idle_for_long_comes_again_after_the_next_reply(home: Home) -> None:
    home.mesh.move([], rest=alone("c"))
    session = home.verifier.open(GenerationState())
    write(asker(session), PROMPT, 2)
    session.close()
    settle(home.mesh)
    home.devices["c"].posts[-1](StageLost(DeviceLost("nothing was asked for a while.", ""), blamed=False))
    session = home.verifier.open(GenerationState())
    write(asker(session), PROMPT, 2)
    assert home.mesh.coming() is None
    session.close()
    settle(home.mesh)
    assert home.told == []


def test_a_placement_has_to_be_whole(home: Home) -> None:
    with pytest.raises(PlanImpossible, match="ends with layer 6"):
        home.mesh.move([(StageShare("a", LayerRange(0, 6)),)])
