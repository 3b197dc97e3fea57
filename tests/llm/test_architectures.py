"""A pair of any architecture writes what its verifier writes alone, whatever kind of cache the two have, and whatever
speculator drafts beside copies and a draft model; each choice has its reason."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM
from edgellm.engine import Context, ContextSpec, Ids, Model
from edgellm.engine.gguf.cuttable import RULES
from edgellm.errors import InvalidOption, ModelUnsupported
from tests.conftest import Architectures, Heads
from tests.decodes import greedy
from tests.spec.real import ids

NOTES = "The mug is on the shelf. The key is in the drawer. The mug is on the shelf and the key is in the drawer."
QUESTION = f"{NOTES}\n\nWhere is the mug, and where is the key?"
TOKENS = 40
MODES: dict[str, dict[str, Any]] = {
    "everything verified": {},
    "without copies": {"retrieval": "off"},
    "early exit": {"early_exit": True},
}


def written(llm: LLM, **options: Any) -> tuple[list[int], list[str]]:
    """Return a reply, and what was said of the speculator."""
    reasons: list[str] = []
    reply = llm.reply(QUESTION, max_tokens=TOKENS, **options)
    reply.listen(on_explain=lambda said: reasons.append(said.text))
    tokens = ids(reply)
    assert reply.summary.drafted or "gamma" not in options
    return tokens, [reason for reason in reasons if "MTP" in reason or "EAGLE-3 head" in reason]


def own_text(path: Path, prompt: Ids) -> list[int]:
    """Return the model's own greedy reply."""
    with Model.load(path, faults=()) as model, Context(model, ContextSpec(n_ctx=512, threads=1)) as context:
        return [*takewhile(lambda token: not model.is_eog(token), greedy(context, prompt, TOKENS))]


@pytest.mark.parametrize(
    "name", ["qwen35", "qwen3next", "lfm2", "falcon-h1", "nemotron_h", "gemma3", "gpt-oss", "deepseek2", "mamba2"]
)
def test_a_pair_writes_what_its_verifier_writes_alone(
    architectures: Architectures, name: str, rows_are_cheap: None
) -> None:
    verifier, draft = architectures(name), architectures(name, 0.12)
    with LLM.open(draft, verifier, threads=1, n_ctx=512, history=False) as pair:
        prompt = pair.prompt_writer.ids(QUESTION)
        expected = own_text(verifier, prompt)
        assert len(set(expected)) > 4
        for mode, options in MODES.items():
            if mode == "early exit" and name not in RULES:
                with pytest.raises(InvalidOption, match="recurrent state cannot be rolled back"):
                    written(pair, **options)
                continue
            assert written(pair, **options)[0] == expected, mode
        reply = pair.reply(QUESTION, max_tokens=TOKENS, budget=0.4)
        assert list(reply)
        assert written(pair)[0] == expected, "after a budget"
    with LLM.open(None, verifier, threads=1, n_ctx=512, history=False) as alone:
        assert written(alone)[0] == written(alone)[0] == expected, "copies of its own"


# --- with a speculator ------------------------------------------------------------------------------------------------


OPTIONS: list[dict[str, Any]] = [{}, {"retrieval": "off"}, {"temperature": 0.8, "seed": 7}]


@pytest.mark.parametrize(
    ("name", "how"), [("qwen35", "alone"), ("glm4moe", "verifier"), ("llama", "head"), ("qwen35", "head")]
)
def test_replies_are_those_of_the_same_model_without_the_speculator(
    architectures: Architectures, heads: Heads, name: str, how: str, rows_are_cheap: None
) -> None:
    """`-m MODEL` and `--verifier MODEL` with an MTP layer, and `--draft HEAD --verifier MODEL`."""
    model: tuple[Path | None, Path | None] = (None, architectures(name, mtp="useful"))
    reasons = ["the model's MTP layer drafts where that is faster"]
    if how == "alone":
        model = (model[1], None)
    elif how == "head":
        head = heads(name, own=name == "llama")
        model, told = (head, architectures(name)), f"the EAGLE-3 head {head.name} drafts"
        reasons = [f"{told} where that is faster", f"{told} from its states"]
    with (
        LLM.open(*model, threads=1, n_ctx=512, history=False) as llm,
        LLM.open(None, architectures(name), threads=1, n_ctx=512, history=False) as plain,
    ):
        assert how != "head" or llm.draft_name is None
        for options in OPTIONS:
            found, said = written(llm, **options)
            assert found == written(plain, **options)[0]
            assert [reason in one for reason, one in zip(reasons, said, strict=True)] == [True] * len(reasons)


def test_a_head_without_verifier_is_refused(architectures: Architectures, heads: Heads, verifier_path: Path) -> None:
    head = heads("llama")
    for verifier, why, instead in (
        (None, "there is no verifier", "--verifier"),
        ("localhost:50151", "localhost:50151 is in another", "serve --role verifier"),
        (verifier_path, "does not fit the verifier verifier.gguf", "that it was trained for"),
        (architectures("qwen2"), "hands over no states of qwen2", "that it was trained for"),
    ):
        with pytest.raises(ModelUnsupported, match=why) as refused:
            LLM.open(head, verifier)
        assert instead in refused.value.next_step
    with pytest.raises(ModelUnsupported, match="is an EAGLE-3 head") as refused:
        LLM.open(architectures("llama"), head)
    assert "as the draft model" in refused.value.next_step


def test_where_it_cannot_draft_the_reason_is_told(architectures: Architectures) -> None:
    draft, verifier = architectures("qwen35", 0.12), architectures("qwen35", mtp="useful")
    with LLM.open(draft, verifier, threads=1, n_ctx=512, history=False) as pair:
        for options, reason in (
            ({"budget": 0.3}, "not everything is verified"),
            ({"logprobs": 0}, "log-probabilities are requested"),
            ({"retrieval": "off", "gate": "always", "gamma": 4}, "MTP layer drafts nothing: the draft model drafts"),
        ):
            assert [said.endswith(reason) for said in written(pair, **options)[1]] == [True]


def test_a_speculator_that_ends_the_process_is_not_loaded(
    architectures: Architectures, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgellm.engine import model
    from edgellm.engine.trial.probe import EAGLE3, MTP

    monkeypatch.setattr(model, "faults_of", lambda *_: ((MTP, EAGLE3), False))
    with LLM.open(None, architectures("qwen35", mtp="useful"), threads=1, n_ctx=512, history=False) as llm:
        assert written(llm)[1] == []
        assert [notice for notice in llm.notices if "the MTP layer of" in notice]
    with LLM.open(heads("llama"), architectures("llama"), threads=1, n_ctx=512, history=False) as llm:
        assert not [reason for reason in written(llm)[1] if "where that is faster" in reason]
        assert [notice for notice in llm.notices if "the EAGLE-3 head of" in notice]
