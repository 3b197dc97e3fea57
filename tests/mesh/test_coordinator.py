"""Devices are lost at any moment, and the text is the same as without; also where this device judges drafts."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edgellm.coldstart import costs, problem
from edgellm.coldstart.costs import LayersOnDevice, ModelCosts, TransformerShape
from edgellm.engine import Block, ContextSpec, Floats, Ids
from edgellm.errors import ContextFull, DeviceLost, MeshBroken, PlanImpossible, Stopped, VerifierBusy
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh, check_shares
from edgellm.mesh.messages import StageLost
from edgellm.mesh.pipeline import Pipeline
from edgellm.mesh.placement import fail_over
from edgellm.mesh.verifier import MeshVerifier
from edgellm.spec.protocols import GenerationState, Session, VerdictTerms, Verifier
from edgellm.spec.types import GREEDY, Chunk, Constraint, Penalties, Sampling, Verdict
from edgellm.verifier.in_process import LocalVerifier
from tests.engine.logits import some_ids
from tests.mesh.household import NOTHING, Cut, Device, Home, Whole, all_at_once, asker, even, home_of, write
from tests.waiting import until
from tests.watching import calls_of

PROMPT = some_ids(40, 2000, 5)


@pytest.mark.parametrize("seed", range(4))
def test_a_device_is_lost_at_a_random_moment(home: Home, whole: Whole, seed: int) -> None:
    rng = random.Random(seed)
    session = home.verifier.open(GenerationState())
    victim, after = rng.choice(list(home.devices)), rng.randrange(30)
    ask = asker(session)

    def step(text: Ids) -> int:
        if len(text) == len(PROMPT) + after:
            pending = session.submit(text, NOTHING)
            home.devices[victim].lose()
            return int(pending.result().tokens[0])
        return ask(text)

    assert write(step, PROMPT, 30) == whole.text(PROMPT, 30)
    assert home.mesh.recoveries == 1
    assert victim not in [share.name for share in home.mesh.shares]
    assert any(f"({victim}: the plug was pulled.)" in told for told in home.told)


def test_two_replies_go_on_when_two_of_three_devices_are_lost(home: Home, whole: Whole) -> None:
    one, other = home.verifier.open(GenerationState()), home.verifier.open(GenerationState())
    prompts = PROMPT, PROMPT[::-1].copy()
    texts = [prompts[0], prompts[1]]
    for at in range(20):
        if at in (7, 13):
            home.devices["a" if at == 7 else "c"].lose()
        pending = [session.submit(text, NOTHING) for session, text in zip((one, other), texts, strict=True)]
        texts = [np.append(text, p.result().tokens).astype(np.int32) for text, p in zip(texts, pending, strict=True)]
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[len(prompt) :].tolist() == whole.text(prompt, 20)
    assert [share.name for share in home.mesh.shares] == ["b"]


def test_where_nobody_holds_what_is_lost_it_says_what_is_needed(verifier_cut: Cut) -> None:
    home = Home(verifier_cut, {"a": range(8), "b": range(6, 12)})
    session = home.verifier.open(GenerationState())
    asker(session)(PROMPT)
    home.devices["b"].lose()
    with pytest.raises(MeshBroken, match=r"Layers 9-12 of .* are on no remaining device \(lost: b\)"):
        session.submit(PROMPT, NOTHING).result()
    home.devices["b"].lost = False  # it is back
    assert session.submit(PROMPT, NOTHING).result().accepted == 0
    home.verifier.close()


def test_a_device_that_is_lost_again_and_again_is_given_up(verifier_cut: Cut) -> None:
    home = Home(verifier_cut, {"a": range(6), "b": range(6, 12)})
    session = home.verifier.open(GenerationState())
    device = home.devices["b"]
    host = device.stage_host

    def broken() -> object:
        made = host()
        made.begin = lambda work, post, pipeline: post(StageLost(DeviceLost("it broke.", "")))  # type: ignore[method-assign]
        return made

    device.stage_host = broken  # type: ignore[assignment,method-assign]
    device.lose()
    device.lost = False
    with pytest.raises(MeshBroken, match="Layers 7-12"):
        session.submit(PROMPT, NOTHING).result()
    home.verifier.close()


def test_what_is_held_is_not_sent_again(home: Home, whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = calls_of(monkeypatch, Pipeline, "ask")
    session = home.verifier.open(GenerationState())
    own = whole.text(PROMPT, 8)
    chunk = Chunk(np.array([*own[:3], 1], dtype=np.int32))
    verdict = session.submit(PROMPT, chunk).result()
    assert (verdict.accepted, verdict.tokens.tolist()) == (3, own[3:4])
    text = np.concatenate((PROMPT, own[:4])).astype(np.int32)
    assert write(asker(session), text, 4) == own[4:8]
    session.close()
    again = home.verifier.open(GenerationState())  # the next turn finds what the last one has left
    again.submit(np.concatenate((text, own[4:8], [5])).astype(np.int32), NOTHING).result()
    rows = [(start, len(ids)) for _, _, start, ids, *_ in sent]
    assert rows == [(0, 44), (43, 1), (44, 1), (45, 1), (46, 1), (47, 2)]


def test_a_verdict_that_is_not_waited_for_changes_nothing(home: Home, whole: Whole) -> None:
    session = home.verifier.open(GenerationState())
    session.submit(PROMPT, Chunk(some_ids(9, 2000, 1)))
    session.submit(PROMPT[:30], Chunk(some_ids(4, 2000, 2)))
    assert session.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)


def test_who_leaves_does_not_wait_for_the_stages_and_the_next_reply_is_as_ever(
    home: Home, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_again = threading.Event()
    forward = Block.forward

    def slow(self: Block, given: Ids | Floats, **place: Any) -> Floats:
        assert open_again.wait(60)
        return forward(self, given, **place)

    monkeypatch.setattr(Block, "forward", slow)
    session = home.verifier.open(GenerationState(should_stop=lambda: True))
    with pytest.raises(Stopped):
        session.wait(session.submit(PROMPT, NOTHING))
    session.close()
    open_again.set()
    again = home.verifier.open(GenerationState())
    assert write(asker(again), PROMPT, 10) == whole.text(PROMPT, 10)


def test_who_finds_no_sequence_is_told_that_the_mesh_is_busy(home: Home, whole: Whole) -> None:
    one, two, three = (home.verifier.open(GenerationState()) for _ in range(3))
    for session in (one, two):
        session.submit(PROMPT, NOTHING).result()
    assert not three.ready()
    with pytest.raises(VerifierBusy, match="hold at most 2 replies"):
        three.submit(PROMPT, NOTHING).result()
    one.close()
    assert three.ready()
    assert three.submit(PROMPT, NOTHING).result().tokens.tolist() == whole.text(PROMPT, 1)
    with pytest.raises(MeshBroken, match="closed"):
        one.submit(PROMPT, NOTHING).result()


def test_who_has_its_layers_loaded_keeps_them() -> None:
    every, big = frozenset(range(8)), ModelCosts.of(TransformerShape(8, 4096, 32, 8, 128, 14336))
    devices = [
        costs.Device.unmeasured(name, LayersOnDevice(every, frozenset(loaded)))
        for name, loaded in (("cold", range(0)), ("other", range(4, 8)), ("warm", range(4)))
    ]
    assert fail_over(problem.Home(devices, big, 1), devices) == (
        StageShare("warm", LayerRange(0, 4)),
        StageShare("other", LayerRange(4, 8)),
    )


def test_a_text_that_is_read_again_moves_to_the_device_that_reads_faster() -> None:
    """The measured speeds decide, of the very curve that the first plan had."""
    every, big = LayersOnDevice(frozenset(range(8))), ModelCosts.of(TransformerShape(8, 4096, 32, 8, 128, 14336))
    reads, writes = (costs.Device.unmeasured(name, every) for name in ("reads", "writes"))
    devices = [replace(reads, flops=1e14, bandwidth=8e9), writes]
    assert fail_over(problem.Home(devices, big, 1), devices, 8_000, 1) == (StageShare("reads", LayerRange(0, 8)),)
    assert fail_over(problem.Home(devices, big, 1), devices, 1, 1_000) == (StageShare("writes", LayerRange(0, 8)),)


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ([StageShare("a", LayerRange(0, 4)), StageShare("b", LayerRange(5, 8))], "range 6-8 of b"),
        ([StageShare("a", LayerRange(0, 4))], "ends with layer 4"),
        ([StageShare("a", LayerRange(0, 4)), StageShare("x", LayerRange(4, 8))], "No device is called 'x'"),
        ([StageShare("a", LayerRange(0, 4)), StageShare("a", LayerRange(4, 8))], "has two ranges"),
        ([StageShare("b", LayerRange(3, 8))], "range 4-8 of b"),
    ],
)
def test_a_split_that_cannot_be_meant(shares: list[StageShare], says: str) -> None:
    with pytest.raises(PlanImpossible, match=says):
        check_shares(shares, 8, ["a", "b"])


def test_a_text_that_does_not_fit_is_refused(home: Home) -> None:
    session = home.verifier.open(GenerationState())
    with pytest.raises(ContextFull, match="400 tokens and 0 drafted ones do not fit the 256"):
        session.submit(some_ids(400), NOTHING).result()


SHORT = some_ids(24, 2000, 3)
SCHEMA = '{"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}'
HEAVY = Penalties(repeat=1.3, frequency=2.0, presence=1.0, bias=((7, 3.0),), start=len(SHORT))
RULES = {
    "penalties": Sampling(penalties=HEAVY),
    "penalties, drawn": Sampling(0.9, seed=5, penalties=HEAVY),
    "min-p": Sampling(2.0, seed=5, min_p=0.01),
    "schema": Sampling(constraint=Constraint(SCHEMA, len(SHORT))),
    "schema, drawn": Sampling(0.9, seed=5, constraint=Constraint(SCHEMA, len(SHORT))),
}


@pytest.fixture(scope="module")
def mesh(verifier_cut: Cut, whole: Whole) -> Iterator[MeshVerifier]:
    devices = [Device(f"device {at}", verifier_cut.layers) for at in range(2)]
    work = verifier_cut.work
    opened = Mesh(devices, even(work, [one.name for one in devices]), work, home_of(work))
    verifier = MeshVerifier(opened, whole.model.is_eog, grammar=whole.model.grammar)
    yield verifier
    verifier.close()


@pytest.fixture(scope="module")
def local(whole: Whole) -> Iterator[LocalVerifier]:
    verifier = LocalVerifier(whole.model, ContextSpec(n_ctx=256, threads=1))
    yield verifier
    verifier.close()


def verdicts(verifier: Verifier, state: GenerationState, tokens: int) -> list[Verdict]:
    """The verdicts of a reply whose drafts are its own tokens, then others."""
    text, found = SHORT, []
    session = verifier.open(state)
    while len(text) < len(SHORT) + tokens:
        ahead = session.submit(text, Chunk()).result().tokens
        draft = np.append(ahead, np.array([9, 11], dtype=np.int32)).astype(np.int32)
        found.append(session.submit(text, Chunk(draft, retrieved=True)).result())
        text = np.concatenate((text, draft[: found[-1].accepted], found[-1].tokens)).astype(np.int32)
    session.close()
    return found


def told(all_of_them: list[Verdict]) -> list[tuple[int, list[int], object]]:
    return [(verdict.accepted, verdict.tokens.tolist(), verdict.plausible) for verdict in all_of_them]


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_those_of_the_whole_model(mesh: MeshVerifier, local: LocalVerifier, rule: str) -> None:
    state = GenerationState(SHORT, RULES[rule])
    over_devices = verdicts(mesh, state, 16)
    assert told(over_devices) == told(verdicts(local, state, 16))
    assert sum(verdict.accepted for verdict in over_devices) > 0
    assert told(over_devices) != told(verdicts(mesh, GenerationState(SHORT), 16))  # the rule changes the text


def test_log_probabilities_are_those_of_the_whole_model(mesh: MeshVerifier, local: LocalVerifier) -> None:
    assert mesh.capabilities.logprobs
    state = GenerationState(SHORT, terms=VerdictTerms(3))
    pairs = zip(verdicts(mesh, state, 12), verdicts(local, state, 12), strict=True)
    for here, there in pairs:
        assert len(here.logprobs) == len(there.logprobs) == here.accepted + len(here.tokens)
        for one, other in zip(here.logprobs, there.logprobs, strict=True):
            assert one.own == pytest.approx(other.own, abs=1e-4)
            assert one.ids.tolist() == other.ids.tolist()


def test_no_more_of_a_draft_is_sent_than_there_is_room_for_logits(
    mesh: MeshVerifier, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    monkeypatch.setattr("edgellm.mesh.verifier.MAX_BYTES", 3 * 4 * mesh.mesh.work.n_vocab)
    own: Ids = np.array(whole.text(SHORT, 6), dtype=np.int32)
    plain = mesh.open(GenerationState(SHORT))
    assert plain.submit(SHORT, Chunk(own[:5])).result().accepted == 5
    plain.close()
    session = mesh.open(GenerationState(SHORT, terms=VerdictTerms(0)))
    verdict = session.submit(SHORT, Chunk(own[:5])).result()
    assert (verdict.accepted, verdict.tokens.tolist()) == (2, own[2:3].tolist())
    session.close()


# --- the next placement -----------------------------------------------------------------------------------------------


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


def test_if_the_present_placement_is_lost_the_next_one_is_not_waited_for(home: Home, whole: Whole) -> None:
    home.mesh.move([alone("b")])
    session = home.verifier.open(GenerationState())

    def then(tokens: int) -> None:
        if tokens == 2:
            settle(home.mesh)
            home.devices["a"].lose()

    assert write(after_each(session, then), PROMPT, TOKENS) == whole.text(PROMPT, TOKENS)
    assert "a" not in {share.name for share in home.mesh.shares}
    assert not home.mesh.take_overs
    assert home.mesh.coming() is None


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
    home.mesh.move([alone("c")], between=True)
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
    home.mesh.move([alone("c")], between=True)
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
