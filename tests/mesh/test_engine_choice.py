"""Which engine is taken by the predicted times of both, and what is said about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import PlanImpossible
from edgellm.mesh.ggml_rpc.engine_choice import MIN_RPC_SAVING, EngineTimes, faster_engine, without_stages

seconds = st.floats(0.0, 1e6)
times = st.builds(lambda first, rest: EngineTimes(first, first + rest), seconds, seconds)


@pytest.mark.parametrize(
    ("stages", "rpc", "engine", "says"),
    [
        ((2.0, 10.0), (4.0, 20.0), "stages", "the tokens after the first one take 8.00 s less with stages"),
        ((2.0, 10.0), (30.0, 31.0), "stages", "the first token comes 28.00 s sooner with stages"),
        ((2.0, 10.0), (2.0, 10.0), "stages", "there is no difference"),
        ((2.0, 10.0), (1.0, 9.0), "stages", "RPC is taken if it saves 20%"),
        ((2.0, 10.0), (1.0, 8.0), "stages", "RPC is taken if it saves 20%"),
        ((2.0, 10.0), (3.0, 7.0), "rpc", "the tokens after the first one take 4.00 s less over RPC"),
        ((8.0, 10.0), (3.0, 6.0), "rpc", "the first token comes 5.00 s sooner over RPC"),
    ],
)
def test_the_engine_with_which_a_reply_ends_clearly_sooner(
    stages: tuple[float, float], rpc: tuple[float, float], engine: str, says: str
) -> None:
    choice = faster_engine(EngineTimes(*stages), EngineTimes(*rpc), 100)
    assert (choice.engine, choice.by_times, choice.undecided) == (engine, True, False)
    assert choice.reason.startswith("the last of 100 tokens comes after ")
    assert f"{stages[1]:.2f} s with stages" in choice.reason
    assert f"{rpc[1]:.2f} s over llama.cpp's RPC" in choice.reason
    assert says in choice.reason
    assert faster_engine(EngineTimes(*stages), EngineTimes(*rpc), 1).reason.startswith("the first token comes after ")


@given(times, times)
def test_rpc_is_taken_only_if_it_saves_more_than_predictions_are_off_by(stages: EngineTimes, rpc: EngineTimes) -> None:
    choice = faster_engine(stages, rpc, 64)
    assert choice.over_rpc == (rpc.reply_s < (1.0 - MIN_RPC_SAVING) * stages.reply_s)
    assert (choice.stages, choice.rpc) == (stages, rpc)
    assert not choice.over_rpc or " 0.00 s" not in choice.reason.split(": ")[-1]


def test_where_stages_are_impossible_the_reason_says_why_and_what_would_help() -> None:
    choice = without_stages(PlanImpossible("It is too big.", "Deploy it."), EngineTimes(2.0, 6.0))
    assert (choice.engine, choice.by_times) == ("rpc", False)
    assert choice.reason.endswith("a reply takes 6.00 s. It is too big. Deploy it.")
