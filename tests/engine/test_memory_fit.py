"""What a model will take is known before it is loaded, and what does not fit is refused with what would."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model, ModelFile, check_gguf, memory_fit, native
from edgellm.engine.hardware import ALL_LAYERS, N_BATCH, ComputeDevice, Hardware
from edgellm.engine.memory_fit import MemoryUse, Placed, default_context, fit, place_model, place_sessions, reckon
from edgellm.engine.model import PREDICTED_ROWS, LoadSpec, output_rows
from edgellm.errors import InvalidOption, MemoryShort
from testkit.gguf.architectures import ARCHITECTURES
from testkit.gguf.random_model import SHAPES, write
from tests.conftest import Architectures, Heads

N_CTX = 2_048
_BUFFER = re.compile(r"(?:KV|RS|compute|output|state) buffer size = +([\d.]+) MiB")


def contexts(n_ctx: int = N_CTX, **options: Any) -> Callable[[Model], list[Context]]:
    """Return what opens a context of a model."""
    return lambda model: [Context(model, ContextSpec(n_ctx=n_ctx, **options))]


opened = contexts(n_seq=2, threads=1, rolls_back=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_reckoning_is_what_llama_cpp_takes(architectures: Architectures, name: str) -> None:
    file = ModelFile.open(architectures(name))
    use, few = reckon(file, Hardware(), opened, reserved=True), reckon(file, Hardware(), opened)
    with native.log.listen() as lines, Model.load(file, faults=()) as model:
        for context in opened(model):
            context.close()
        logits = 4 * model.n_vocab
    taken = sum(float(found[1]) for line in lines for found in _BUFFER.finditer(line)) * 2**20
    assert use.caches["CPU"] + use.compute["CPU"] == pytest.approx(taken, rel=0.1, abs=0.1 * 2**20)
    assert use.weights["CPU"] == pytest.approx(file.header.file_size, rel=0.25)  # besides its metadata
    assert (few.weights, few.caches, few.checkpoints) == (use.weights, use.caches, use.checkpoints)
    assert 0 <= use.compute["CPU"] - few.compute["CPU"] <= 1.1 * logits * (N_BATCH - PREDICTED_ROWS)


@pytest.mark.parametrize("own", [True, False])
def test_a_head_counts_with_its_verifier(architectures: Architectures, heads: Heads, own: bool) -> None:
    file, head = ModelFile.open(architectures("llama")), ModelFile.open(heads("llama", own=own))
    drafting = contexts(n_seq=2, threads=1, unified=False, speculates=True)
    alone, both = (reckon(file, Hardware(), drafting, eagle3, reserved=True) for eagle3 in (None, head))
    assert both.weights["CPU"] - alone.weights["CPU"] == head.header.weight_bytes
    with native.log.listen() as lines, Model.load(file, LoadSpec(speculates=True, eagle3=head), faults=()) as model:
        for context in drafting(model):
            context.close()
    taken = sum(float(found[1]) for line in lines for found in _BUFFER.finditer(line)) * 2**20
    assert both.caches["CPU"] + both.compute["CPU"] == pytest.approx(taken, rel=0.1, abs=0.1 * 2**20)
    assert both.caches["CPU"] == pytest.approx(1.5 * alone.caches["CPU"], rel=0.3)  # a layer more, of twice the heads


CHECKPOINTED = (
    "gemma3", "gpt-oss", "gemma3n", "qwen35", "lfm2", "nemotron_h", "falcon-h1", "kimi-linear", "minimax-01", "mamba2",
    "rwkv7", "deepseek4",
)  # fmt: skip
"""Sliding windows, recurrent states of every kind, and hybrids."""


@pytest.mark.parametrize("name", ["qwen3", "deepseek2", *CHECKPOINTED])
@pytest.mark.parametrize(("n_seq", "unified"), [(1, True), (3, False), (2, True)])
def test_no_checkpoints_take_more_than_was_reckoned(
    architectures: Architectures, name: str, n_seq: int, unified: bool
) -> None:
    file = ModelFile.open(architectures(name))
    several = contexts(512, n_seq=n_seq, n_batch=64, threads=1, unified=unified)
    most = reckon(file, Hardware(), several).checkpoints
    with Model.load(file, faults=()) as model, several(model)[0] as context:
        for seq in range(n_seq):
            text = np.arange(200, dtype=np.int32) % 2_000 + 300 + seq
            for _ in range(4):  # a prompt of several batches, a draft of single tokens, and another end
                context.decode(text[context.sync(text, seq) :], seq=seq)
                for _ in range(3):
                    context.decode(text[:1], seq=seq)
                text = np.concatenate((text, text[:50]))[: 200 + len(text) // 4]
        kept = [one for seq in context._cache._sequences for one in (*seq.anchors, seq.newest) if one is not None]
        taken = sum(len(one.state) for one in kept)
    assert taken <= most
    assert bool(taken) == bool(most) == (name in CHECKPOINTED)


def fitting(file: ModelFile, sessions: int, n_ctx: int) -> int:
    """Return the bytes that a verifier of that many sessions takes."""
    serving = contexts(n_ctx, n_seq=sessions, unified=sessions == 1, rolls_back=True, speculates=True)
    return reckon(file, Hardware(n_ctx=n_ctx), serving).on("CPU")


@pytest.mark.parametrize("name", ["qwen35", "gemma3", "llama"])
def test_a_verifier_has_as_many_sessions_as_fit(
    architectures: Architectures, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, n_ctx = ModelFile.open(architectures(name)), 1_024
    needs = [fitting(file, sessions, n_ctx) for sessions in (1, 3, 4, 8)]
    assert needs == sorted(needs)

    monkeypatch.setattr(memory_fit, "_PLENTY", 0.0)  # of a small model, batches take more than weights and sessions

    def placed(free: int, fewer: bool = False) -> Placed:
        monkeypatch.setattr(memory_fit, "free_memory", lambda: free)
        return place_sessions(file, Hardware(n_ctx=n_ctx), sessions=8, fewer=fewer)

    assert placed(needs[3], fewer=True).sessions == 8
    found = placed((needs[1] + needs[2]) // 2, fewer=True)
    assert found.sessions == 3
    assert re.search(
        r"3 sessions at once, not 8: .* takes .* GB .* for 8 sessions of 1024 tokens.* are free", found.reason
    )
    assert ("checkpoints" in found.reason) == (name != "llama")
    with pytest.raises(MemoryShort, match="fewer sessions, 3 fit"):
        placed((needs[1] + needs[2]) // 2)
    with pytest.raises(MemoryShort, match=r"for the context.* are free"):
        placed(needs[0] - 1, fewer=True)


def test_what_surely_fits_is_told_by_all_sessions(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reckoning of llama.cpp's, which takes a while."""
    file, n_ctx = ModelFile.open(draft_path), 8_192
    one = file.header.file_size + n_ctx * file.header.cache_bytes_per_token
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 3 * one)
    assert place_model(file, Hardware(n_ctx=n_ctx), Counter(), verifies=True).sessions == 1
    assert place_sessions(file, Hardware(n_ctx=n_ctx), sessions=8, fewer=True).sessions < 8


def test_a_context_is_as_long_as_memory_allows(draft_path: Path) -> None:
    header = ModelFile.open(draft_path).header
    assert default_context(header, 1_024)[0] == 1_024
    assert default_context(header, 131_072, free=64 * 10**9)[0] == 32_768
    assert default_context(header, 131_072, free=10**8)[0] == 4_096
    assert default_context(header, 131_072, sessions=8, free=10**9)[0] < 32_768


def test_too_long_a_context_is_refused_with_one_that_fits(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(draft_path)
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 40_000_000)
    with pytest.raises(MemoryShort, match="of memory") as refused:
        place_model(file, Hardware(n_ctx=20_000), Counter(), verifies=True)
    length = int(re.search(r"(\d+) tokens fit", refused.value.next_step)[1])  # type: ignore[index]
    assert 256 <= length < 20_000
    place_model(file, Hardware(n_ctx=length), Counter(), verifies=True)


def test_a_model_beside_another_has_what_that_left(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(draft_path)
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 40_000_000)
    taken = Counter[str]()
    place_model(file, Hardware(n_ctx=2_048), taken, verifies=True)
    assert taken["CPU"] > 0.9 * file.header.file_size
    taken["CPU"] = 38_000_000
    with pytest.raises(MemoryShort, match="smaller quantisation"):
        place_model(file, Hardware(n_ctx=2_048), taken, verifies=False)


def test_without_a_graphics_card_none_is_promised(draft_path: Path) -> None:
    file = ModelFile.open(draft_path)
    assert place_model(file, Hardware(), Counter(), verifies=True).hardware.gpu_layers == 0
    with pytest.raises(InvalidOption, match=r"llama\.cpp finds none"):
        place_model(file, Hardware(gpu_layers=ALL_LAYERS), Counter(), verifies=True)


class Card:
    """A graphics card in place of llama.cpp's: of `layers` layers each takes `size` bytes, the head as much as one."""

    def __init__(self, free: int, size: int, layers: int) -> None:
        self.device, self.size, self.layers = ComputeDevice("Card0", "a card", "gpu", free, free), size, layers
        self.tried: list[int] = []

    def reckon(self, _file: object, hardware: Hardware, *_: object) -> MemoryUse:
        n = self.layers + 1 if hardware.gpu_layers == ALL_LAYERS else hardware.gpu_layers or 0
        self.tried.append(n)
        return MemoryUse(Counter(Card0=n * self.size, CPU=(self.layers + 1 - n) * self.size), Counter(), Counter())


@pytest.mark.parametrize(("free", "layers"), [(16, ALL_LAYERS), (10, 6), (1, 0)])
def test_as_many_layers_as_fit_go_on_a_card(
    draft_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, layers: int
) -> None:
    card = Card(free * 10**9 // 2, 700_000_000, 8)
    monkeypatch.setattr(memory_fit, "offload_devices", lambda _names: [card.device])
    monkeypatch.setattr(memory_fit, "reckon", card.reckon)
    placed = Placed(ModelFile.open(draft_path), Hardware(n_ctx=512))
    taken, room = Counter[str](), max(0, card.device.free - memory_fit._MARGIN)
    found = fit(placed, taken)
    assert found.hardware.gpu_layers == layers
    assert taken["Card0"] <= room
    assert ("on the processor" in found.reason) == (layers == 0)
    if layers:
        fit(placed, taken)
        assert taken["Card0"] <= room
        with pytest.raises(MemoryShort, match="which can give"):
            fit(replace(placed, hardware=Hardware(gpu_layers=8, n_ctx=512)), taken)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"n_ctx": 0}, {"gpu_layers": -2}, {"cache_type": "q3"},
                                   {"tensor_split": (0.0,)}, {"cache_type": "q8_0", "flash_attn": False},
                                   {"reproducible": True, "flash_attn": True}])  # fmt: skip
def test_values_that_llama_cpp_cannot_use_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        Hardware(**wrong)  # type: ignore[arg-type]


def test_the_record_travels_with_the_model(draft_path: Path) -> None:
    hardware = Hardware(threads=1, n_batch=32, cache_type="q8_0")
    with Model.load(draft_path, LoadSpec(hardware)) as model, Context(model, ContextSpec(n_ctx=256)) as context:
        assert (context.native.threads, context.n_batch, context.native_spec.flash) == (1, 32, True)


SHAPE = replace(SHAPES["tiny-draft"], n_layer=1, n_embd=256, n_ff=768)


def test_a_vocabulary_takes_memory_for_each_token_and_merge(tmp_path: Path) -> None:
    for n in (1_000, 50_000):
        write(tmp_path / f"{n}.gguf", replace(SHAPE, n_vocab=n), "Q8_0")
    few, many = (check_gguf(tmp_path / f"{n}.gguf") for n in (1_000, 50_000))
    assert 250 < (many.vocabulary_bytes - few.vocabulary_bytes) / 49_000 < 350
    none = replace(few, metadata={"general.architecture": "llama"})
    assert 0 == none.vocabulary_bytes < few.vocabulary_bytes


def test_rows_of_logits_are_those_of_predictions_or_of_all_sequences() -> None:
    assert output_rows(1, 512) == PREDICTED_ROWS
    assert output_rows(1, 8) == 8
    assert PREDICTED_ROWS < output_rows(8, 512) < 512
    assert output_rows(200, 512) == 512
