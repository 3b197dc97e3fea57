"""PipeSD beside its baselines: the schedule of its uploads, its triggers, and what travels when."""

from __future__ import annotations

import argparse
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from time import sleep
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.papers.links import CHANGES, METHODS, SCENARIOS, Scenario, asked, at_one, lossless, plot, table
from bench.papers.pipelined import Pipeline, StrategicDrafter, Uploads, acknowledging, distributions
from bench.papers.pipesd import (
    LONGEST,
    STRATEGIES,
    WINDOW,
    Cost,
    Schedule,
    Strategy,
    Trace,
    Trigger,
    arrival,
    batch_sizes,
    replayed,
    tuned,
)
from edgellm.engine import Context, ContextSpec, Model
from edgellm.llm import LLM
from edgellm.services.client.verifier_client import SentRequest, Stream
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Floats
from testkit.network.relay import Network, Relay
from testkit.processes.paced_pair import paced_pair, paced_verifier
from testkit.questions import MOST, Question, questions

BYTES = 20_000  # of a distribution
(ASKED,) = (question for question in questions(1) if question.family == "reply")  # the longest reply
SECONDS = st.floats(0.0, 1.0)
COSTS = st.builds(Cost, SECONDS, SECONDS, SECONDS, SECONDS)
CONFIDENCES = st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=LONGEST)


def compositions(n: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to cut n tokens into batches."""
    if n == 0:
        yield ()
    for first in range(1, n + 1):
        for rest in compositions(n - first):
            yield (first, *rest)


def floats(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


@given(st.integers(1, 8), COSTS)
def test_no_other_batches_arrive_sooner(tokens: int, cost: Cost) -> None:
    sizes = batch_sizes(tokens, cost)
    assert sum(sizes) == tokens
    assert min(sizes) > 0
    best = min(arrival(others, tokens, cost) for others in compositions(tokens))
    assert arrival(sizes, tokens, cost) == pytest.approx(best)


def test_batches_grow_while_the_link_is_busy_and_are_whole_where_it_is_slow_to_start() -> None:
    assert batch_sizes(4, Cost(draft=1.0, startup=0.0, per_token=0.1, verdict=0.0)) == (1, 1, 1, 1)
    assert batch_sizes(4, Cost(draft=0.1, startup=9.0, per_token=0.1, verdict=0.0)) == (4,)
    cost = Cost(draft=0.03, startup=0.02, per_token=0.05, verdict=0.0)
    sizes = batch_sizes(16, cost)
    assert 1 < len(sizes) < 16
    assert arrival(sizes, 16, cost) < min(arrival((16,), 16, cost), arrival((1,) * 16, 16, cost))


def test_a_draft_that_ends_early_cuts_its_last_batch() -> None:
    cost = Cost(draft=1.0, startup=10.0, per_token=0.5, verdict=0.0)
    assert arrival((2, 3), 4, cost) == 2.0 + 11.0 + 11.0
    assert arrival((2, 3), 2, cost) == 2.0 + 11.0


def test_the_schedule_repeats_a_window_as_long_as_drafts_are() -> None:
    cost, schedule = Cost(draft=1.0, startup=0.5, per_token=1.0, verdict=0.0), Schedule()
    first = batch_sizes(WINDOW, cost)
    assert tuple(islice(schedule.sizes(cost), 2 * len(first))) == first * 2
    schedule.record(3)
    schedule.record(4)
    again = batch_sizes(4, cost)  # 3.5, rounded to even
    assert tuple(islice(schedule.sizes(cost), 2 * len(again))) == again * 2


def test_two_thresholds_fire_each_by_itself() -> None:
    trigger = Trigger(most=4, sequence=0.5, token=0.6)
    assert not trigger.fires(floats(0.9, 0.8))
    assert trigger.fires(floats(0.9, 0.59))  # an unsure token
    assert trigger.fires(floats(0.7, 0.7))  # all of them together
    assert trigger.fires(floats(1.0, 1.0, 1.0, 1.0))
    assert not Trigger(token=0.6).fires(floats(0.7, 0.7))
    assert not Trigger(sequence=0.5).fires(floats(0.9, 0.59))


@given(CONFIDENCES, st.sampled_from([one.trigger for every in STRATEGIES.values() for one in every]))
def test_a_draft_ends_where_its_trigger_fires_first(values: list[float], trigger: Trigger) -> None:
    confidence = floats(*values)
    n = trigger.length(confidence)
    assert not any(trigger.fires(confidence[:fewer]) for fewer in range(1, n))
    assert n == len(confidence) or trigger.fires(confidence[:n])


def test_the_adaptive_threshold_falls_where_all_is_accepted_and_rises_by_the_share_that_is_not() -> None:
    trigger = Trigger(sequence=0.4)
    assert trigger.adapted(floats(0.9, 0.5), 2).sequence == 0.2
    assert trigger.adapted(floats(0.9, 0.4), 1).sequence == pytest.approx(0.4 / 0.6)  # the root of 0.36
    assert trigger.adapted(floats(0.1, 0.1), 0).sequence == 1.0


def test_replayed_time_is_that_of_drafting_sending_and_waiting() -> None:
    sure, unsure = (floats(0.9, 0.9, 0.9), 3), (floats(0.2, 0.9, 0.9), 0)
    cost = Cost(draft=1.0, startup=0.5, per_token=2.0, verdict=10.0)
    assert replayed([Trace([unsure])], Strategy(Trigger(2)), cost) == 2 * 3.0 + 10.0
    assert replayed([Trace([sure, sure, sure])], Strategy(Trigger(2)), cost) == (2 * 3.0 + 10.0) / 3
    piped = Strategy(Trigger(2), pipelined=True)
    assert replayed([Trace([sure, sure, sure])], piped, cost) < (2 * 3.0 + 10.0) / 3
    # the second draft was made in the wait, but for its sending
    twice = Trace([sure] * 4)
    waits, goes_on = (replayed([twice], Strategy(Trigger(1), ahead=ahead), cost) for ahead in (False, True))
    assert (waits, goes_on) == ((3.0 + 10.0) / 2, (2 * (3.0 + 10.0) - 1.0) / 4)


def test_the_best_candidate_is_chosen_and_both_triggers_are_no_worse_than_one() -> None:
    rng = np.random.default_rng(0)
    traces = []
    for _ in range(6):
        chances = rng.beta(4.0, 1.0, 40 + LONGEST)
        right = rng.random(len(chances)) < chances
        drafts = []
        for at in range(40):
            wrong = np.flatnonzero(~right[at : at + LONGEST])
            drafts.append((floats(*chances[at : at + LONGEST]), int(wrong[0]) if len(wrong) else LONGEST))
        traces.append(Trace(drafts))
    cost = Cost(draft=0.03, startup=0.02, per_token=0.02, verdict=0.08)
    chosen = {name: replayed(traces, tuned(name, traces, cost), cost) for name in STRATEGIES}
    for name, every in STRATEGIES.items():
        assert chosen[name] == min(replayed(traces, one, cost) for one in every)
    one_trigger = [Strategy(Trigger(token=0.9), ahead=True, pipelined=True)]
    assert chosen["pipesd"] <= min(replayed(traces, one, cost) for one in one_trigger)
    assert chosen["pipesd"] < chosen["hsl"]


@contextmanager
def held_back() -> Iterator[tuple[int, threading.Event]]:
    """Yield the port of a server that acknowledges nothing before the event is set."""
    may = threading.Event()
    with acknowledging() as port, socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            near, _ = door.accept()
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                threading.Thread(target=forward, args=(near, far), daemon=True).start()
                while data := far.recv(1):
                    may.wait()
                    near.sendall(data)

        def forward(near: socket.socket, far: socket.socket) -> None:
            while data := near.recv(4096):
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        yield door.getsockname()[1], may


def test_batches_go_one_after_another_and_those_that_have_not_begun_are_dropped() -> None:
    with held_back() as (port, may):
        uploads = Uploads(port, BYTES)
        assert uploads.arrived.done()
        uploads.send(1)
        while not uploads.tokens:
            sleep(0.001)
        first = uploads.arrived
        uploads.send(3)
        uploads.drop()
        uploads.send(2)
        assert not first.done()
        may.set()
        uploads.arrived.result()
        assert uploads.tokens == 1 + 2
        uploads.close()


def test_a_batch_that_does_not_arrive_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        uploads = Uploads(door.getsockname()[1], BYTES)
        near, _ = door.accept()
        near.close()
        uploads.send(100)
        assert isinstance(uploads.arrived.exception(), OSError)
        uploads.close()


def test_all_doors_of_a_relay_share_its_count_and_lead_to_their_own_targets() -> None:
    with acknowledging() as one, acknowledging() as other, Relay(one, Network(1000.0, 0.0, down=500.0)) as relay:
        first, second = Uploads(relay.port, 1000), Uploads(relay.door(other), 2000)
        for uploads in (first, second):
            uploads.send(1)
            uploads.arrived.result()
        relay.change(Network(2000.0, 0.001))
        first.send(1)
        first.arrived.result()
        assert relay.carried == (1004 + 2004 + 1004, 3)
        first.close()
        second.close()


class Counts(Drafter):
    """Drafts the number after the last one."""

    def __init__(self) -> None:
        self.drafted = 0

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        assert gamma == 1
        self.drafted += 1
        sure = floats(0.9)
        return Chunk(np.array([int(state.ids[-1]) + 1], dtype=np.int32), sure, sure)


def reply_so_far(*ids: int) -> GenerationState:
    return GenerationState(np.array(ids, dtype=np.int32))


@pytest.mark.parametrize("polls", [2, 99])
def test_what_was_drafted_ahead_is_kept_behind_just_the_guessed_text(polls: int) -> None:
    for kept in (True, False):
        counts = Counts()
        drafter = StrategicDrafter(counts, Strategy(Trigger(3), ahead=True), lambda token: token > 90)
        drafter.begin(reply_so_far(5))
        chunk = drafter.propose(reply_so_far(5), 3)
        assert chunk.ids.tolist() == [6, 7, 8]
        answers = chain([False] * polls, repeat(True))
        drafter.look_ahead(reply_so_far(5), chunk, 3, partial(next, answers))
        ahead = min(3, polls - 1)
        assert counts.drafted == 3 + 1 + ahead  # the guess, and what follows it
        after = drafter.propose(reply_so_far(5, 6, 7, 8, 9 if kept else 20), 3)
        assert after.ids.tolist() == ([10, 11, 12] if kept else [21, 22, 23])
        assert after.ahead == (ahead if kept else 0)
        assert counts.drafted == 3 + 1 + ahead + 3 - after.ahead


def test_nothing_is_drafted_ahead_behind_the_end_and_no_more_than_may_be_written() -> None:
    counts = Counts()
    drafter = StrategicDrafter(counts, Strategy(Trigger(3), ahead=True), lambda token: token > 90)
    ends = drafter.propose(reply_so_far(89), 3)
    assert ends.ids.tolist() == [90, 91]
    drafter.look_ahead(reply_so_far(89), ends, 3, lambda: False)
    assert counts.drafted == 2
    chunk = drafter.propose(reply_so_far(5), 3)
    drafter.look_ahead(reply_so_far(5), chunk, 3, lambda: False)
    assert drafter.propose(reply_so_far(5, 6, 7, 8, 9), 2).ids.tolist() == [10, 11]


WRITERS = {
    "vanilla": Strategy(Trigger(3)),
    "hsl": Strategy(Trigger(token=0.9)),
    "edgellm": Strategy(Trigger(sequence=0.5), adapts=True, ahead=True),
    "pipesd": Strategy(Trigger(most=8, sequence=0.3, token=0.5), ahead=True, pipelined=True),
}
COST = Cost(draft=0.001, startup=0.001, per_token=0.002, verdict=0.005)


@pytest.fixture(scope="module")
def own(verifier_path: Path) -> list[int]:
    with LLM.open("none", verifier_path, threads=1, history=False) as alone:
        return [token.id for token in alone.reply(ASKED.messages, max_tokens=MOST, retrieval="off")]


@pytest.fixture(scope="module")
def relay(verifier_path: Path) -> Iterator[Relay]:
    with paced_verifier(verifier_path, 0.002, Network(80.0, 0.004)) as opened:
        yield opened


def written(question: Question, pair: LLM, drafter: StrategicDrafter, strategy: Strategy) -> list[int]:
    reply = pair.reply(
        question.messages, max_tokens=MOST, retrieval="off", gate="always", drafter=drafter, gamma=strategy.trigger.most
    )
    tokens = [token.id for token in reply]
    assert reply.summary.share_verified == 1.0
    return tokens


@pytest.mark.parametrize("name", WRITERS)
def test_every_strategy_writes_the_verifiers_text_and_sends_the_distributions_of_its_drafts(
    draft_model: Model, relay: Relay, own: list[int], name: str
) -> None:
    strategy, received = WRITERS[name], 0
    behind: list[int] = []  # by how much the distributions at hand are fewer than the tokens, at each request

    with acknowledging() as sink:
        uploads = Uploads(relay.door(sink), BYTES)
        pipeline = Pipeline(uploads, COST) if strategy.pipelined else None
        send, carry, drafted, asked = Stream.send, Uploads._carry, list[int](), list[int]()

        def sent(stream: Stream, pending: SentRequest, data: bytes) -> None:
            asked.append(len(data) // BYTES)
            drafted.append(len(pending.request.draft))
            behind.append(sum(drafted) - sum(asked) - received)
            send(stream, pending, data)

        def carried(this: Uploads, tokens: int) -> None:
            nonlocal received
            carry(this, tokens)
            received += tokens  # once it is acknowledged

        inner = ModelDrafter(draft_model, Context(draft_model, ContextSpec(n_ctx=1024, threads=1)))
        drafter = StrategicDrafter(inner, strategy, draft_model.is_eog, pipeline)
        before = relay.carried[0]
        with (
            paced_pair("edgellm-draft", f"127.0.0.1:{relay.port}", 0.001) as pair,
            patch.object(Stream, "send", sent),
            patch.object(Uploads, "_carry", carried),
            distributions(BYTES, pipeline),
        ):
            assert written(ASKED, pair, drafter, strategy) == own
        drafter.close()
        uploads.close()
    assert max(behind) <= 0  # nothing is verified before its distribution has come
    assert relay.carried[0] - before >= BYTES * sum(drafted)
    if strategy.pipelined:
        assert received > 0
        assert sum(asked) < sum(drafted)
    else:
        assert asked == drafted
    assert max(drafted) <= strategy.trigger.most


def test_scenarios_are_the_papers() -> None:
    assert list(SCENARIOS) == ["laptop", "phone", "iot", "changing"]
    assert all(SCENARIOS[name].rates == ((20.0, 200.0),) for name in ("laptop", "phone", "iot"))
    (low, high), (least, most) = CHANGES
    rates = SCENARIOS["changing"].rates
    assert all(low <= up <= high and least <= down <= most for up, down in rates)
    assert SCENARIOS["changing"].network(len(rates) + 1, 0.02) == Network(rates[1][0], 0.02, rates[1][1])


def test_a_small_run_has_a_row_for_each_method_in_both_tables(
    draft_path: Path, verifier_path: Path, tmp_path: Path
) -> None:
    arguments = argparse.Namespace(
        pair="home", draft="edgellm-draft", verifier="edgellm-verifier", profile=None, cases=1, budget=0.2,
        vocabulary=250, pass_ms=2.0, round_trip_ms=1.0,
    )  # fmt: skip
    given = asked(draft_path, verifier_path, [one for one in questions(1) if one.family in ("reply", "qa")], [ASKED])
    rows = at_one(arguments, given, Scenario(0.001, ((500.0, 500.0), (250.0, 500.0))))
    setting = {key: getattr(arguments, key) for key in ("cases", "budget", "vocabulary", "pass_ms", "round_trip_ms")}
    found = {"pair": "home", "setting": setting, "scenarios": {"laptop": rows}}
    assert (tuple(rows["everything"]), tuple(rows["budget"])) == (METHODS, METHODS[:-1])
    assert lossless(found)
    assert len([line for line in table(found).splitlines() if line.startswith("laptop")]) == 2 * len(METHODS) - 1
    everything, budgeted = rows["everything"], rows["budget"]
    assert everything["alone"]["share_of_tokens_verified"] == 0.0
    assert everything["verifier"]["share_of_tokens_verified"] == 1.0
    drafting = (*STRATEGIES, "ours")
    assert all(everything[name]["share_of_drafts_verified"] == 1.0 for name in drafting)
    assert all(0.0 < budgeted[name]["share_of_drafts_verified"] < 0.9 for name in drafting)
    for name in STRATEGIES:  # a distribution for each drafted token, and some were not accepted
        assert everything[name]["bytes_up_per_token"] > 0.5 * 4 * arguments.vocabulary
    assert everything["ours"]["bytes_up_per_token"] < 0.5 * 4 * arguments.vocabulary
    drawn = plot(found, tmp_path / "links.png")
    assert drawn is None or drawn.read_bytes().startswith(b"\x89PNG")
