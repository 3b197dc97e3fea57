"""Thoughts of real models: forced by a limit, or by a script, as no small model was trained to think."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import InputNotText, InvalidOption
from edgellm.llm import LLM
from edgellm.llm.messages import turn_openings
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.spec.stream import Reply
from edgellm.spec.types import Channel, Chunk, Source, Token
from testkit.forced_verifier import ForcedVerifier
from testkit.gguf import random_model
from testkit.thinking_templates import ALWAYS, CHANNELS, LITERAL, OPENED, with_template
from tests.llm.conftest import verifying
from tests.services.scripted import gone, scripted
from tests.spec.real import case

QUESTION = "Where is the mug?"
CLOSING = "</think>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
OpenPair = Callable[..., LLM]
Script = Callable[..., tuple[LLM, list[int]]]


@pytest.fixture(scope="module")
def paths(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """The bundled pair in float32 with templates that have thoughts; the draft model keeps its own."""
    folder = tmp_path_factory.mktemp("templates")
    templates = {"literal": LITERAL, "opened": OPENED, "always": ALWAYS, "channels": CHANNELS}
    return {
        name: (f32_pair[0], with_template(f32_pair[1], folder / f"{name}.gguf", template))
        for name, template in templates.items()
    }


@pytest.fixture(scope="module")
def open_pair(paths: dict[str, tuple[Path, Path]]) -> Iterator[OpenPair]:
    with ExitStack() as closing:
        yield cache(lambda name: closing.enter_context(LLM.open(*paths[name], threads=1)))


@pytest.fixture
def script(paths: dict[str, tuple[Path, Path]]) -> Iterator[Script]:
    """Opens a verifier that writes a given text in reply to QUESTION."""
    with ExitStack() as closing:

        def make(name: str, text: str, **options: object) -> tuple[LLM, list[int]]:
            model = closing.enter_context(Model.load(paths[name][1]))
            context = closing.enter_context(Context(model, ContextSpec(n_ctx=512, threads=1)))
            verifier, end = ForcedVerifier(model, context), model.end_of_turn
            pair = closing.enter_context(LLM(model, verifier=verifier))
            assert end is not None
            reply = model.tokenize(text).tolist()  # <|end|> is plain text here: it would end the turn
            verifier.says(pair.prompt_writer.ids(QUESTION, ReplyOptions(**options)), (*reply, end))  # type: ignore[arg-type]
            return pair, reply

        yield make


def pieces(tokens: list[Token], channel: Channel) -> str:
    return b"".join(token.piece for token in tokens if token.channel is channel).decode()


def written(reply: Reply) -> list[Token]:
    tokens = list(reply)
    summary = reply.summary
    assert pieces(tokens, Channel.THINKING).rstrip() == summary.thinking
    assert pieces(tokens, Channel.ANSWER) == summary.text
    assert sum(token.channel is Channel.THINKING for token in tokens) == summary.thinking_tokens
    assert len(tokens) == summary.tokens or summary.stopped_by
    return tokens


SCRIPTS = [
    ("literal", "<think>\nIt was in the hall.\n</think>\n\nOn the shelf.", "It was in the hall.", "On the shelf."),
    ("literal", "On the shelf.", "", "On the shelf."),
    ("opened", "It was in the hall.\n</think>\n\nOn the shelf.", "It was in the hall.", "On the shelf."),
    ("always", "It was in the hall.</think>On the shelf.", "It was in the hall.", "On the shelf."),
    ("channels", f"<|channel|>analysis<|message|>hm{FINAL}On the shelf.", "hm", "On the shelf."),
]


@pytest.mark.parametrize(("name", "text", "thought", "answer"), SCRIPTS)
def test_a_thought_is_no_part_of_the_answer(script: Script, name: str, text: str, thought: str, answer: str) -> None:
    pair, _ = script(name, text)
    reply = pair.reply(QUESTION, retrieval="off")
    written(reply)
    summary = reply.summary
    assert (summary.thinking, summary.text, summary.finish_reason) == (thought, answer, "stop")
    assert (summary.thinking_tokens > 0) is bool(thought)


@pytest.mark.parametrize("budget", [None, 0.3])
def test_thoughts_are_counted_apart(open_pair: OpenPair, budget: float | None) -> None:
    pair = open_pair("always")
    reply = pair.reply(
        case(5), think=6, max_tokens=24, gamma=1, retrieval="off", budget=budget, seed=1,
        gate="always" if budget is None else "random",
    )  # fmt: skip
    tokens, summary = written(reply), reply.summary
    drafted = {Source.DRAFT, Source.ACCEPTED, Source.CORRECTED, Source.BONUS}
    channels = {token.round: token.channel for token in reversed(tokens) if token.source in drafted}
    verified = {token.round for token in tokens if token.source not in (Source.DRAFT, Source.PARALLEL)}
    thoughts = {number for number, channel in channels.items() if channel is Channel.THINKING}
    assert 0 <= summary.chunks - len(channels) <= 1, "the last one may end the turn at once"
    assert summary.chunks_thinking == len(thoughts) < len(channels)
    assert summary.chunks_verified_thinking == len(verified & thoughts)
    for channel, share in (
        (Channel.THINKING, summary.share_verified_thinking), (Channel.ANSWER, summary.share_verified_answer),
    ):  # fmt: skip
        own = [token for token in tokens if token.channel is channel]
        assert share == sum(token.source is not Source.DRAFT for token in own) / len(own)
        assert budget is not None or share == 1.0
    assert (summary.share_verified == 1.0) is (budget is None)


def test_markup_may_be_control_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Mistral's models: they add nothing to a text, and are known by their names."""
    monkeypatch.setattr(random_model, "CONTROL", (*random_model.CONTROL, "[THINK]", "[/THINK]"))
    path = tmp_path / "control.gguf"
    random_model.write(path, random_model.Shape("llama", 400, 2, 32, 2, 1, 64, 512), "F32")
    with Model.load(path) as model, Context(model, ContextSpec(n_ctx=256, threads=1)) as context:
        verifier = ForcedVerifier(model, context)
        with LLM(model, verifier=verifier, threads=1) as pair:
            text, end = "[THINK]hm, well[/THINK]on the shelf", model.end_of_turn
            assert end is not None
            ids = model.tokenize(text, special=True).tolist()
            assert [model.piece(ids[0]), model.control_text(ids[0])] == [b"", b"[THINK]"]
            verifier.says(pair.prompt_writer.ids(QUESTION), (*ids, end))
            reply, reasons = pair.reply(QUESTION, retrieval="off"), list[str]()
            reply.listen(on_explain=lambda explanation: reasons.append(explanation.text))
            assert [token.id for token in written(reply)] == ids
            assert (reply.summary.thinking, reply.summary.text) == ("hm, well", "on the shelf")
            assert "the model thinks: its vocabulary has the tokens [THINK] and [/THINK]" in reasons


def test_max_tokens_limits_the_answer_and_max_total_both(script: Script) -> None:
    thought = "It was in the hall, and then in the kitchen, and then in the garden."
    pair, ids = script("opened", f"{thought}{CLOSING}On the shelf in the kitchen.")
    whole = pair.reply(QUESTION, retrieval="off")
    written(whole)
    reply = pair.reply(QUESTION, retrieval="off", max_tokens=3)
    tokens = written(reply)
    assert reply.summary.thinking == thought
    assert [token.id for token in tokens if token.channel is Channel.ANSWER] == ids[whole.summary.thinking_tokens :][:3]
    assert reply.summary.finish_reason == "length"
    reply = pair.reply(QUESTION, retrieval="off", max_total=5)
    assert [token.id for token in written(reply)] == ids[:5]
    assert (reply.summary.text, reply.summary.finish_reason) == ("", "length")


def test_stop_sequences_are_those_of_the_answer(script: Script) -> None:
    pair, _ = script("opened", f"It was in the hall.{CLOSING}On the shelf in the kitchen.")
    reply = pair.reply(QUESTION, retrieval="off", stop=(" the",))
    written(reply)
    assert (reply.summary.thinking, reply.summary.text) == ("It was in the hall.", "On")
    assert reply.summary.stopped_by == " the"


WAYS: dict[str, dict[str, object]] = {
    "the pair": {},
    "the draft model's drafts": {"retrieval": "off", "gate": "always", "gamma": 4},
    "sampled": {"retrieval": "off", "temperature": 1.0, "seed": 7},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_thought_ends_at_its_limit_and_the_answer_is_the_verifiers(open_pair: OpenPair, way: str, limit: int) -> None:
    """The rest is what the verifier writes after the prompt, the thought and the markup; the draft model, which has
    another template, drafts for that, too."""
    pair, options = open_pair("always"), {"max_tokens": 12, **WAYS[way]}
    reply = pair.reply(case(3), think=limit, **options)  # type: ignore[arg-type]
    tokens = written(reply)
    assert reply.summary.thinking_tokens == limit
    prompt = pair.prompt_writer.ids(case(3)).tolist()
    markup = pair._text_model.tokenize(CLOSING, special=True).tolist()
    thought = [token.id for token in tokens[:limit]]
    free = pair.complete([*prompt], **{**options, "max_tokens": max(1, limit)})  # type: ignore[arg-type]
    assert thought == [token.id for token in free][:limit]
    rest = pair.complete([*prompt, *thought, *markup], **options)  # type: ignore[arg-type]
    assert [token.id for token in tokens[limit:]] == [token.id for token in rest]
    assert reply.summary.text == rest.summary.text.lstrip()
    assert "gamma" not in options or Source.ACCEPTED in {token.source for token in tokens}


def test_a_thought_without_an_end_ends_the_reply(paths: dict[str, tuple[Path, Path]], open_pair: OpenPair) -> None:
    """The context has no room for the markup."""
    prompt = len(open_pair("always").prompt_writer.ids(QUESTION))
    with LLM.open("none", paths["always"][1], n_ctx=prompt + 3, threads=1) as small:
        reply = small.reply(QUESTION, think=0)
        assert written(reply) == []
        assert reply.summary.finish_reason == "length"


def test_a_thought_that_the_model_begins_itself_can_be_ended_at_once(script: Script) -> None:
    pair, ids = script("literal", "<think>\nIt was in the hall.\n</think>\n\nOn the shelf.", think=0)
    opening = len(pair._text_model.tokenize("<think>", special=True))
    reply = pair.reply(QUESTION, think=0, retrieval="off", max_tokens=4)
    tokens = written(reply)
    assert [token.id for token in tokens[:opening]] == ids[:opening]
    assert reply.summary.thinking == ""
    assert reply.summary.thinking_tokens == opening


def test_think_sets_what_the_template_reads(open_pair: OpenPair) -> None:
    pair = open_pair("opened")
    text = pair._text_model.detokenize
    by_think = {
        think: text(pair.prompt_writer.ids(QUESTION, ReplyOptions(think=think))).decode()
        for think in (None, True, 5, False)
    }
    assert by_think[None] == by_think[True] == by_think[5]
    assert by_think[None].endswith("<think>\n")
    assert by_think[False].endswith("<think>\n\n</think>\n\n")
    given = pair.prompt_writer.ids(QUESTION, ReplyOptions(think=True, template_args={"enable_thinking": False}))
    assert text(given).decode() == by_think[False]


def test_an_argument_that_the_template_does_not_read_is_refused(open_pair: OpenPair) -> None:
    with pytest.raises(InvalidOption, match=r"'enable_thought' is not an argument .* It reads enable_thinking"):
        open_pair("opened").reply(QUESTION, template_args={"enable_thought": True})
    for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
        with pytest.raises(InvalidOption, match=f"'{name}' is not an argument"):
            open_pair("opened").reply(QUESTION, template_args={name: ""})
    with pytest.raises(InvalidOption, match="cannot be written as JSON"):
        open_pair("opened").reply(QUESTION, template_args={"enable_thinking": object()})
    text = open_pair("channels")
    ids = text.prompt_writer.ids(QUESTION, ReplyOptions(template_args={"reasoning_effort": "high"}))
    assert "Reasoning: high" in text._text_model.detokenize(ids).decode()


def test_a_model_without_thoughts_cannot_be_told_to_think(pair: LLM) -> None:
    for think in (True, 5):
        with pytest.raises(InvalidOption, match="is not known to think"):
            pair.reply(QUESTION, think=think)
    reply = pair.reply(QUESTION, think=False, max_tokens=3)
    assert [token.channel for token in reply] == [Channel.ANSWER] * 3
    with pytest.raises(InvalidOption, match="It reads none"):
        pair.reply(QUESTION, template_args={"enable_thinking": False})


def test_a_later_turn_has_the_answer_alone(open_pair: OpenPair) -> None:
    """The client may send back the answer, all that the model wrote, or both parts."""
    pair, after = open_pair("channels"), Message("user", "Thanks. And the red one?")
    raw = f"<|channel|>analysis<|message|>hm{FINAL}On the shelf."
    wanted = pair.prompt_writer.ids([Message("user", QUESTION), Message("assistant", "On the shelf."), after])
    for turn in (Message("assistant", raw), Message("assistant", "On the shelf.", "hm")):
        assert np.array_equal(pair.prompt_writer.ids([Message("user", QUESTION), turn, after]), wanted)


def test_a_turn_that_is_no_text_is_refused(open_pair: OpenPair) -> None:
    for turn in (Message("assistant", "\ud800</think>a"), Message("assistant", "a", "\ud800")):
        with pytest.raises(InputNotText):
            open_pair("always").reply([Message("user", QUESTION), turn, Message("user", "And?")])


def test_a_template_gets_the_thought_of_the_turn_that_it_wants(open_pair: OpenPair) -> None:
    pair = open_pair("literal")
    talk = [Message("user", QUESTION), Message("assistant", "On the shelf.", "in the <|end|> hall")]
    text = pair._text_model.detokenize(pair.prompt_writer.ids(talk)).decode()
    assert "<think>\nin the <|end|> hall\n</think>\n\nOn the shelf." in text  # its control token is plain text


@pytest.mark.parametrize("draft", ["a draft model", "none"])
def test_a_served_verifiers_template_is_used(
    paths: dict[str, tuple[Path, Path]], open_pair: OpenPair, f32_pair: tuple[Path, Path], draft: str
) -> None:
    """The device has a model with another template; thoughts are ended across the link as they are here."""
    local, small = open_pair("always"), f32_pair[0] if draft != "none" else None
    with (
        verifying(paths["always"][1], 2) as server,
        LLM.open(small, str(server.address), tokenizer=f32_pair[1], threads=1) as linked,
    ):
        assert np.array_equal(linked.prompt_writer.ids(case(3)), local.prompt_writer.ids(case(3)))
        for limit in (0, 5):
            reply, wanted = (pair.reply(case(3), think=limit, max_tokens=12) for pair in (linked, local))
            assert [token.id for token in written(reply)] == [token.id for token in written(wanted)]
            assert reply.summary.thinking_tokens == limit


def test_an_endless_template_is_not_sent(f32_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The greeting has a limit; devices then use their own template."""
    long = with_template(f32_pair[1], tmp_path / "long.gguf", ALWAYS + "{# " + "-" * 2**16 + " #}")
    with (
        verifying(long, 2) as server,
        LLM.open("none", str(server.address), tokenizer=f32_pair[1], threads=1) as linked,
    ):
        assert linked._text_model.thinking is None
        assert len(list(linked.reply(QUESTION, max_tokens=3))) == 3


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "question", "openings"),
    [
        ("system\nBe brief.\nuser\nWhen?\nassistant\n", "When?", ("\nuser\n", "\nassistant\n")),  # ChatML
        ("user\n\nWhen?assistant\n\n", "When?", ("\nuser\n", "\nassistant\n")),  # Llama 3
        ("user\nWhen?\nmodel\n", "When?", ("\nuser\n", "\nmodel\n")),  # Gemma
        ("User: When?\nAssistant:", " When? ", ("\nUser:", "\nAssistant:")),
        ("A chat.\n\n## Ask:\nWhen?\n\n## Say:\n", "When?", ("\n## Ask:\n", "\n## Say:\n")),
        ("[INST] When? [/INST]", "When?", ("\n[INST]", "\n[/INST]")),
        ("user\nWhen?\nassistant\nAt 8.\nuser\nWhen?\nassistant\n", "When?", ("\nuser\n", "\nassistant\n")),
        ("When?", "When?", ()),
        ("user\nWhen?\nassistant\n", "Where?", ()),  # the template has rewritten it
        ("user\n\nassistant\n", "", ()),
        ("user" + "r" * 99 + "\nWhen?", "When?", ()),
    ],
)
def test_the_openings_of_turns_are_around_the_question(text: str, question: str, openings: tuple[str, ...]) -> None:
    assert turn_openings(text, question) == openings
    assert turn_openings(text, [Message("system", "Be brief."), Message("user", question)]) == openings


class Dictated(Drafter):
    """A drafter whose model goes on with the conversation where its turn ends."""

    def __init__(self, model: Model, text: str) -> None:
        self._ids = [*model.tokenize(text), next(filter(model.is_eog, range(model.n_vocab)))]

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        done = len(state.ids) - state.prompt_tokens
        return Chunk(np.array(self._ids[done : done + gamma], dtype=np.int32))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("At 8.\nuser\nAnd where is it?", "At 8."),
        ("At 8.\nassistant\nAt 9.", "At 8."),
        ("The user asks.\nAt 8.", "The user asks.\nAt 8."),
    ],
)
def test_a_draft_model_alone_writes_no_other_turn(written: str, shown: str, draft_path: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}assistant\n"
    path = with_template(draft_path, tmp_path / "draft.gguf", template)
    with (
        Model.load(path, TEXT_ONLY) as text,
        scripted(text.vocabulary, gone) as address,
        LLM.open(path, str(address), threads=1) as pair,
    ):
        reply = pair.reply("When?", drafter=Dictated(text, written), retrieval="off", max_tokens=40)
        assert b"".join(token.piece for token in reply).decode().strip() == shown
