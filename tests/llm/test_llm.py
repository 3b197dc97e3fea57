"""The Python API on the real bundled pair."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgellm
from edgellm.engine import Context, Message, Model, memory_fit
from edgellm.engine.hardware import Hardware
from edgellm.errors import InputNotText, InvalidOption, MemoryShort, PromptTooLong
from edgellm.llm import DEFAULT, LLM, compose, generate, is_address
from edgellm.llm.model_loading import EngineConfig, place_pair
from edgellm.spec.stream import Reply
from edgellm.spec.types import PromptProgress
from testkit.gguf.changed import with_sampling
from tests.decodes import FEW, Decodes, Watched
from tests.llm.conftest import verifying
from tests.spec.real import case, ids, told
from tests.watching import calls_of

# --- stopping, and starting again -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def references(alone: LLM) -> tuple[list[int], list[int]]:
    """What the verifier replies alone to the cases 8 and 9."""
    return ids(alone.reply(case(8), max_tokens=24)), ids(alone.reply(case(9), max_tokens=24))


@pytest.mark.parametrize("after", [0, 1, 2, 3, 6, 11])
@pytest.mark.parametrize("how", ["close", "cancel", "drop", "interrupt"])
def test_a_reply_left_halfway_leaves_the_pair_sound(
    pair: LLM, references: tuple[list[int], list[int]], after: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, other = references
    reply = pair.reply(case(8), max_tokens=24)
    started = ids(reply, after)
    if how == "close":
        reply.close()
    elif how == "cancel":
        reply.cancel()
        assert list(reply) == []
        assert reply.summary.finish_reason == "cancelled"
    elif how == "interrupt":
        decode = Context.decode

        def interrupted(self: Context, *given: Any, **more: Any) -> Any:
            decode(self, *given, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Context, "decode", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(reply)
        assert reply.summary.finish_reason == "cancelled"
    del reply
    assert started == reference[:after]
    assert ids(pair.reply(case(8), max_tokens=24)) == reference
    assert ids(pair.reply(case(9), max_tokens=24)) == other


def test_replies_side_by_side_do_not_disturb_each_other(pair: LLM, alone: LLM) -> None:
    numbers = (11, 12, 13)
    replies = [pair.reply(case(number), max_tokens=20) for number in numbers]
    written: list[list[int]] = [[] for _ in numbers]
    for _ in range(20):
        for reply, so_far in zip(replies, written, strict=True):
            so_far.extend(ids(reply, 1))
    assert written == [ids(alone.reply(case(number), max_tokens=20)) for number in numbers]


def test_closing_a_pair_stops_its_replies(f32_pair: tuple[Path, Path]) -> None:
    opened = LLM.open(*f32_pair, threads=1)
    reply = opened.reply(case(0), max_tokens=30)
    next(reply)
    unread = opened.reply(case(0))
    opened.close()
    assert list(reply) == list(unread) == []
    with pytest.raises(InvalidOption, match="closed"):
        opened.reply("Hello?")
    opened.close()


def test_the_progress_of_a_long_prompt_is_reported_by_model_and_a_cancel_stops_it(f32_pair: tuple[Path, Path]) -> None:
    long, reports = "Where is the mug? " * 40, list[PromptProgress]()
    with LLM.open(*f32_pair, n_ctx=512, threads=1, hardware=Hardware(n_batch=32)) as opened:
        reply = opened.reply(long, max_tokens=4, retrieval="off", gate="always", gamma=4)
        reply.listen(on_progress=reports.append)
        list(reply)
        prompt = reply.prompt_tokens
        assert {report.model for report in reports} == {opened.draft_name, opened.verifier_name}
        for model in (opened.draft_name, opened.verifier_name):
            done = [report.done for report in reports if report.model == model]
            assert done == [*range(0, prompt, 32), prompt]
        reports.clear()
        stopped = opened.reply(f"Now: {long}", max_tokens=4)

        def cancelling(report: PromptProgress) -> None:
            reports.append(report)
            stopped.cancel()

        stopped.listen(on_progress=cancelling)
        assert list(stopped) == []
        assert len(reports) == 1, "no batch is computed after the cancellation"
        assert ids(opened.reply(long, max_tokens=4)) == ids(opened.reply(long, max_tokens=4))


# --- the context ----------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(f32_pair: tuple[Path, Path]) -> None:
    with LLM.open(*f32_pair, n_ctx=256, threads=1) as small:
        long = "Where is the mug? " * 200
        with pytest.raises(PromptTooLong, match=r"^The prompt is too long: \d{3,} tokens > 255, ") as caught:
            small.reply(long)
        assert f" {len(small._text_model.chat_prompt(compose(long)))} tokens" in str(caught.value)


@pytest.mark.parametrize("room", [1, 2, 5, 6])
def test_a_reply_that_fills_the_context_ends_with_a_notice(f32_pair: tuple[Path, Path], alone: LLM, room: int) -> None:
    messages = case(2)
    prompt = len(alone.prompt_writer.ids(messages))
    reference = ids(alone.reply(messages, max_tokens=room))
    assert len(reference) == room
    with LLM.open(*f32_pair, n_ctx=prompt + room, threads=1) as tight:
        reply = tight.reply(messages)
        assert str(prompt + room) in told(reply)[-1]
        assert (reply.summary.ids, reply.summary.finish_reason) == (reference, "length")


def test_more_context_than_the_model_was_trained_for_is_refused_before_it_is_loaded(
    f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Model, "load")
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 10**6)  # which is no reason to advise half of it
    long = Hardware(n_ctx=10**6)
    asked: list[dict[str, Any]] = [
        {"n_ctx": 10**6}, {"hardware": long}, {"hardware": Hardware(), "draft_hardware": long},
        {"hardware": long, "draft": None}, {"hardware": long, "verifier": None},
    ]  # fmt: skip
    for options in asked:
        words = {"draft": f32_pair[0], "verifier": f32_pair[1], **options}
        with pytest.raises(InvalidOption, match=r"1000000 tokens is asked for, and .* was trained for 1024") as refused:
            LLM.open(**words)
        assert "at most 1024" in refused.value.next_step


# --- options and messages -------------------------------------------------------------------------------------------


def test_a_pair_writes_as_many_replies_as_fit(f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = Hardware(n_ctx=512)
    monkeypatch.setattr(memory_fit, "_PLENTY", 0.0)

    def taken(replies: int) -> int:
        config = EngineConfig(hardware=hardware, threads=1, replies=replies)
        return place_pair(*f32_pair, config).taken["CPU"]

    free = (taken(2) + taken(3)) // 2
    assert taken(1) < taken(2) < free < taken(3)
    monkeypatch.setattr(memory_fit, "free_memory", lambda: free)
    with pytest.raises(MemoryShort, match="--replies 2"):
        LLM.open(*f32_pair, hardware=hardware, threads=1, replies=4)
    with LLM.open(*f32_pair, hardware=hardware, threads=1, replies=4, fewer_replies=True) as pair:
        assert pair.replies == 2
        notice = next(one for one in pair.notices if one.startswith("2 replies are written at once, not 4: "))
        assert re.search(r"takes [\d.]+ GB of memory.* and [\d.]+ GB are free", notice)
    with LLM.open(*f32_pair, hardware=hardware, threads=1, replies=2, fewer_replies=True) as pair:
        assert (pair.replies, pair.notices) == (2, ())
        assert pair.memory.by_device["CPU"] == taken(2)
    one = taken(1)
    monkeypatch.setattr(memory_fit, "free_memory", lambda: one - 1)
    with pytest.raises(MemoryShort, match="are free"):
        LLM.open(*f32_pair, hardware=hardware, threads=1, replies=4, fewer_replies=True)


def test_context_texts_come_first_then_a_blank_line_then_the_question() -> None:
    history = [Message("user", "Hi"), Message("assistant", "Hello!")]
    assert compose("Where?") == [Message("user", "Where?")]
    assert compose("Where?", context=["a\n", " ", "\nb\n\n"]) == [Message("user", "a\n\nb\n\nWhere?")]
    assert compose("Where?", history=history, system="Be brief.") == [
        Message("system", "Be brief."),
        *history,
        Message("user", "Where?"),
    ]
    begun = [Message("system", "Be brief."), *history]
    assert compose("Where?", history=begun, system="Be brief.")[:3] == begun


def test_a_prompt_that_is_empty_or_no_text_is_refused(pair: LLM) -> None:
    prompts: list[str | list[Message]] = ["", "  \n", []]
    for empty in prompts:
        with pytest.raises(InvalidOption, match="empty"):
            pair.reply(empty)
    with pytest.raises(InputNotText):
        pair.reply("a lone surrogate: \udcff")
    for bad in ("", [10**6], [-1]):
        with pytest.raises(InvalidOption):
            pair.complete(bad)


# --- opening --------------------------------------------------------------------------------------------------------


def test_neither_model_is_refused() -> None:
    for draft, verifier in ((None, None), ("none", "none"), ("none", None)):
        with pytest.raises(InvalidOption, match="none"):
            LLM.open(draft, verifier)


def test_a_served_verifier_says_what_its_model_wants(f32_pair: tuple[Path, Path], tmp_path: Path) -> None:
    verifier = with_sampling(f32_pair[1], tmp_path / "verifier.gguf", temp=5.0, top_k=0, top_p=1.0)
    with (
        verifying(verifier) as server,
        LLM.open(f32_pair[0], str(server.address), threads=1) as linked,
        LLM.open(f32_pair[0], verifier, threads=1) as local,
    ):
        assert linked.sampling.figures() == local.sampling.figures()
        assert linked.sampling.origin == "the verifier's device"
        assert ids(linked.reply(case(6), seed=9, max_tokens=24)) == ids(local.reply(case(6), seed=9, max_tokens=24))


def test_what_is_an_address_and_what_a_model() -> None:
    assert all(map(is_address, ("localhost:8000", "127.0.0.1:1", "[::1]:50051", "desk.local:65535")))
    models = ("none", DEFAULT, "user/repo:Q4_K_M", "user/repo:8", "./a:1", "a.gguf", "localhost:", "::1")
    assert not any(map(is_address, models))


def test_progress_is_told(f32_pair: tuple[Path, Path]) -> None:
    heard: list[tuple[str, float]] = []
    LLM.open(*f32_pair, progress=lambda name, share: heard.append((name, share))).close()
    assert {name for name, _ in heard} == {path.stem for path in f32_pair}
    assert heard[-1][1] == pytest.approx(1.0)


def test_one_call_with_the_bundled_pair() -> None:
    reply = generate(
        "Where is the mug?", context=["The mug is in the hall."], system="Be brief.", max_tokens=6, threads=1
    )
    assert len(list(reply)) == reply.summary.tokens <= 6
    with pytest.raises(InvalidOption):
        generate("Where is the mug?", max_tokens=0)


def test_a_reply_in_one_call_that_is_never_read_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = calls_of(monkeypatch, LLM, "close")
    reply = generate("Where is the mug?")
    del reply
    assert len(closed) == 1


def test_what_the_package_exports() -> None:
    for name in edgellm.__all__:
        assert getattr(edgellm, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        edgellm.nonsense  # noqa: B018


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
    f32_pair: tuple[Path, Path], address: str, inside: LLM, decodes: Watched
) -> None:
    """Of one that is across the link, and of one that is served here; the worker drops the prompt between two parts."""
    seen, meanwhile = decodes
    with LLM.open("none", address, tokenizer=f32_pair[1], threads=1) as linked:
        wanted = ids(linked.reply(LONG, max_tokens=6))
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
