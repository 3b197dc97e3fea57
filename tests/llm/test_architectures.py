"""A pair of any architecture writes what its verifier writes alone, whatever kind of cache the two have."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Ids, Model
from edgellm.engine.gguf.cuttable import RULES
from edgellm.errors import InvalidOption
from tests.conftest import Architectures
from tests.decodes import greedy

NOTES = "The mug is on the shelf. The key is in the drawer. The mug is on the shelf and the key is in the drawer."
QUESTION = f"{NOTES}\n\nWhere is the mug, and where is the key?"
TOKENS = 40
HYBRIDS = ("qwen35", "qwen3next", "lfm2", "falcon-h1", "nemotron_h")
OTHERS = ("gemma3", "gpt-oss", "deepseek2", "mamba2")
MODES: dict[str, dict[str, Any]] = {
    "everything verified": {},
    "without copies": {"retrieval": "off"},
    "early exit": {"early_exit": True},
}


def written(llm: LLM, **options: Any) -> list[int]:
    return [token.id for token in llm.reply(QUESTION, max_tokens=TOKENS, **options)]


def alone(path: Path, prompt: Ids) -> list[int]:
    """Return the model's own greedy reply."""
    with Model.load(path, faults=()) as model, Context(model, ContextSpec(n_ctx=512, threads=1)) as context:
        return [*takewhile(lambda token: not model.is_eog(token), greedy(context, prompt, TOKENS))]


@pytest.mark.parametrize("name", HYBRIDS + OTHERS)
def test_a_pair_writes_what_its_verifier_writes_alone(
    architectures: Architectures, name: str, rows_are_cheap: None
) -> None:
    verifier, draft = architectures(name), architectures(name, 0.12)
    with LLM.open(draft, verifier, threads=1, n_ctx=512, history=False) as pair:
        prompt = pair.prompts.ids(QUESTION)
        expected = alone(verifier, prompt)
        assert len(set(expected)) > 4
        for mode, options in MODES.items():
            if mode == "early exit" and name not in RULES:
                with pytest.raises(InvalidOption, match="recurrent state cannot be rolled back"):
                    written(pair, **options)
                continue
            assert written(pair, **options) == expected, mode
        reply = pair.reply(QUESTION, max_tokens=TOKENS, budget=0.4)
        assert list(reply)
        again = [*pair.reply(QUESTION, max_tokens=TOKENS)]
        assert [token.id for token in again] == expected, "after a budget"


@pytest.mark.parametrize("name", HYBRIDS)
def test_one_model_alone_copies_and_stays_itself(architectures: Architectures, name: str, rows_are_cheap: None) -> None:
    path = architectures(name)
    with LLM.open(None, path, threads=1, n_ctx=512, history=False) as llm:
        prompt = llm.prompts.ids(QUESTION)
        expected = alone(path, prompt)
        assert written(llm) == written(llm) == expected


def test_a_gate_that_needs_attention_is_refused_where_there_is_none(architectures: Architectures) -> None:
    paths: list[Path] = [architectures("mamba2", 0.12), architectures("mamba2")]
    with LLM.open(*paths, threads=1, n_ctx=512, history=False) as pair:
        assert list(pair.reply(QUESTION, max_tokens=8, budget=0.4))
        with pytest.raises(InvalidOption, match="needs attention"):
            list(pair.reply(QUESTION, max_tokens=8, budget=0.4, gate="synera"))
