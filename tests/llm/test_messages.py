"""What is made of a conversation before it is tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from edgellm.engine import Message, Model
from edgellm.engine.model import TEXT_ONLY
from edgellm.llm import LLM
from edgellm.llm.messages import turn_heads
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.spec.types import Chunk
from testkit.thinking_templates import with_template
from tests.services.scripted import scripted


@pytest.mark.parametrize(
    ("text", "question", "heads"),
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
def test_the_heads_of_turns_are_found_around_the_question(text: str, question: str, heads: tuple[str, ...]) -> None:
    assert turn_heads(text, question) == heads
    assert turn_heads(text, [Message("system", "Be brief."), Message("user", question)]) == heads


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
    def lost(_rounds: Iterator[pb.Verify], context: grpc.ServicerContext) -> Iterator[pb.VerifierFrame]:
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield pb.VerifierFrame()

    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}assistant\n"
    path = with_template(draft_path, tmp_path / "draft.gguf", template)
    with (
        Model.load(path, TEXT_ONLY) as text,
        scripted(text.vocabulary, lost) as address,
        LLM.open(path, str(address), threads=1) as pair,
    ):
        reply = pair.reply("When?", drafter=Dictated(text, written), retrieval="off", max_tokens=40)
        assert b"".join(token.piece for token in reply).decode().strip() == shown
