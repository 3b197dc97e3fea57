"""What works with a model is known from its header, and is what really happens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm import LLM
from edgellm.engine import Capture, Context, ContextSpec, ModelFile
from edgellm.engine.graph_hooks import SCORES
from edgellm.engine.hardware import Hardware
from edgellm.engine.memory_fit import MemoryUse, reckon
from edgellm.errors import InvalidOption
from edgellm.llm.abilities import Ability, abilities, context_memory
from testkit.gguf.random_model import SHAPES, write
from testkit.memory import index_bytes
from tests.conftest import Architectures, Heads


def found(path: Path, *others: Path) -> dict[str, Ability]:
    listed = {other.stem: ModelFile.open(other) for other in others}
    return {ability.name: ability for ability in abilities(ModelFile.open(path), listed)}


def test_the_bundled_pair_can_do_everything(draft_path: Path, verifier_path: Path) -> None:
    able = found(verifier_path, draft_path, verifier_path)
    assert [name for name, ability in able.items() if not ability.able] == ["MTP drafts"]  # it has no such layer
    assert able["pair"].reason == f"with the draft model {draft_path.stem}"
    assert found(draft_path, verifier_path)["pair"].reason == f"with the verifier {verifier_path.stem}"


def test_drafts_of_another_vocabulary_are_translated(verifier_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write(other, SHAPES["tiny-draft"], "F32", 0)
    with_other = found(verifier_path, other)["pair"]
    assert with_other.able
    assert "other: the model has another tokenizer, so drafts are translated" in with_other.reason
    assert not found(verifier_path)["pair"].able


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen35", "mamba2", "deepseek2", "smollm3"])
def test_what_is_said_is_what_happens(architectures: Architectures, name: str, verifier_path: Path) -> None:
    path = architectures(name)
    able = found(path, verifier_path)
    assert able["pair"].able
    with LLM.open(path, verifier_path, threads=1, n_ctx=256, history=False) as pair:
        if able["importance gates"].able:
            list(pair.reply("Where is the mug?", max_tokens=4, budget=0.5, gate="importance"))
        else:
            with pytest.raises(InvalidOption, match="needs attention"):
                list(pair.reply("Where is the mug?", max_tokens=4, budget=0.5, gate="importance"))
        assert list(pair.reply("Where is the mug?", max_tokens=4, retrieval="context"))
        if able["early exit"].able:
            assert list(pair.reply("Where is the mug?", max_tokens=4, early_exit=True))
        else:
            with pytest.raises(InvalidOption, match="There is no early exit") as refused:
                list(pair.reply("Where is the mug?", max_tokens=4, early_exit=True))
            assert able["early exit"].reason in str(refused.value)


def test_an_mtp_layer_is_told(architectures: Architectures) -> None:
    for mtp, able in (("none", False), ("useless", True)):
        told = found(architectures("qwen35", mtp=mtp))["MTP drafts"]
        assert told.able == able
        assert "predicts further tokens (MTP)" in told.reason


def test_what_a_head_is_and_for_whom_is_told(architectures: Architectures, heads: Heads) -> None:
    head, llama, qwen2 = heads("llama"), architectures("llama"), architectures("qwen2")
    chat, drafts = found(head, llama, qwen2).values()
    assert (chat.able, chat.reason) == (False, "it is an EAGLE-3 head: it drafts from another model's states")
    assert (drafts.able, drafts.reason) == (
        True, f"as the draft model of {llama.stem}, from the inputs of layers 1, 2, 3",
    )  # fmt: skip
    assert [ability.able for ability in found(head).values()] == [False, False]
    assert context_memory(ModelFile.open(head).header) == []
    pair = found(llama, head)["pair"]
    assert (pair.able, pair.reason) == (True, f"with the EAGLE-3 head {head.stem}")
    assert not found(qwen2, head)["pair"].able


def test_stages_and_exits_may_differ(architectures: Architectures) -> None:
    able = found(architectures("smollm3 of 8 layers"))
    assert (able["mesh"].able, able["early exit"].able) == (True, False)
    assert able["mesh"].reason == "its 8 layers can be cut into stages that begin with layers 1, 5"
    assert "can be cut behind: 4" in able["early exit"].reason
    assert found(architectures("gemma3"))["early exit"].reason == "as a draft model, behind layer 5"


@pytest.mark.parametrize("damage", ["tokens", "context_length"])
def test_a_header_that_says_little_is_no_error(architectures: Architectures, damage: str) -> None:
    file = ModelFile.open(architectures("llama"))
    metadata = {key: value for key, value in file.header.metadata.items() if damage not in key}
    file = replace(file, header=replace(file.header, metadata=metadata))
    able = {ability.name: ability.able for ability in abilities(file)}
    assert not able["chat" if damage == "tokens" else "context"]
    assert bool(context_memory(file.header)) == (damage == "tokens")


def test_a_model_that_does_not_fit_says_so(verifier_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context_memory(ModelFile.open(verifier_path).header)
    monkeypatch.setattr("edgellm.llm.abilities.free_memory", lambda: 10**6)
    context = found(verifier_path)["context"]
    assert (context.able, context.reason) == (False, "its weights take 0.0 GB, and 0.0 GB are free")
    assert context_memory(ModelFile.open(verifier_path).header) == []


def test_the_memory_of_a_context_is_what_it_takes(tmp_path: Path) -> None:
    write(tmp_path / "half.gguf", replace(SHAPES["qwen2.5-0.5b"], n_layer=4, n_vocab=8_000), "Q4_0")
    file = ModelFile.open(tmp_path / "half.gguf")
    rows = context_memory(file.header)
    assert [row.tokens for row in rows] == sorted({row.tokens for row in rows})

    def taken(tokens: int, capture: Capture | None = None) -> MemoryUse:
        return reckon(
            file, Hardware(n_ctx=tokens), lambda model: [Context(model, ContextSpec(n_ctx=tokens), capture=capture)]
        )

    rng = np.random.default_rng(0)
    texts = np.minimum(rng.zipf(1.3, 20_000), 50_000), rng.integers(0, 50_000, 20_000)
    indexes = [index_bytes(text) / 20_000 for text in texts]
    for row in (rows[0], rows[-1]):
        plain, captured = taken(row.tokens), taken(row.tokens, Capture(attention=(1,)))
        assert row.cache == plain.caches["CPU"] == captured.caches["CPU"]
        assert 0.9 * SCORES < row.attention <= SCORES
        assert captured.compute["CPU"] < row.attention + 0.5 * plain.compute["CPU"]
        for taken_by_a_token in indexes:
            assert 0.6 < taken_by_a_token / (row.index / row.tokens) <= 1.05
