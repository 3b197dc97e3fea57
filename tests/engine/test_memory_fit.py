"""What a model will take is known before it is loaded, and what does not fit is refused with what would."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from edgellm.engine import Context, Model, ModelFile, memory_fit, native
from edgellm.engine.hardware import ALL_LAYERS, ComputeDevice, Hardware
from edgellm.engine.memory_fit import MemoryUse, default_context, fit, place, reckon
from edgellm.errors import InvalidOption, MemoryShort
from testkit.architectures import ARCHITECTURES
from tests.conftest import Architectures, Heads

N_CTX = 2_048
_BUFFER = re.compile(r"(?:KV|RS|compute|output|state) buffer size = +([\d.]+) MiB")


def opened(model: Model) -> list[Context]:
    return [Context(model, n_ctx=N_CTX, n_seq=2, threads=1, rolls_back=True)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_reckoning_is_what_llama_cpp_takes(architectures: Architectures, name: str) -> None:
    file = ModelFile.open(architectures(name))
    use = reckon(file, Hardware(), opened)
    with native.log.listen() as lines, Model.load(file, probe=False) as model:
        for context in opened(model):
            context.close()
    taken = sum(float(found[1]) for line in lines for found in _BUFFER.finditer(line)) * 2**20
    assert use.on("CPU") - use.weights["CPU"] == pytest.approx(taken, rel=0.1, abs=0.1 * 2**20)
    assert use.weights["CPU"] == pytest.approx(file.header.file_size, rel=0.25)  # besides its metadata


@pytest.mark.parametrize("own", [True, False])
def test_a_head_counts_with_its_verifier(architectures: Architectures, heads: Heads, own: bool) -> None:
    file, head = ModelFile.open(architectures("llama")), ModelFile.open(heads("llama", own=own))

    def contexts(model: Model) -> list[Context]:
        return [Context(model, n_ctx=N_CTX, n_seq=2, threads=1, unified=False, speculates=True)]

    alone, both = (reckon(file, Hardware(), contexts, eagle3) for eagle3 in (None, head))
    assert both.weights["CPU"] - alone.weights["CPU"] == sum(tensor.nbytes for tensor in head.header.tensors)
    with native.log.listen() as lines, Model.load(file, probe=False, speculates=True, eagle3=head) as model:
        for context in contexts(model):
            context.close()
    taken = sum(float(found[1]) for line in lines for found in _BUFFER.finditer(line)) * 2**20
    assert both.on("CPU") - both.weights["CPU"] == pytest.approx(taken, rel=0.1, abs=0.1 * 2**20)
    assert both.caches["CPU"] == pytest.approx(1.5 * alone.caches["CPU"], rel=0.3)  # a layer more, of twice the heads


def test_a_context_is_as_long_as_memory_allows(draft_path: Path) -> None:
    header = ModelFile.open(draft_path).header
    assert default_context(header, 1_024)[0] == 1_024
    assert default_context(header, 131_072, free=64 * 10**9)[0] == 32_768
    assert default_context(header, 131_072, free=10**8)[0] == 4_096
    assert default_context(header, 131_072, sessions=8, free=10**9)[0] < 32_768


def test_a_longer_context_than_fits_is_refused_with_one_that_does(
    draft_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ModelFile.open(draft_path)
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 40_000_000)
    with pytest.raises(MemoryShort, match="of memory") as refused:
        place(file, Hardware(n_ctx=20_000), Counter(), verifies=True)
    length = int(re.search(r"(\d+) tokens fit", refused.value.next_step)[1])  # type: ignore[index]
    assert 256 <= length < 20_000
    place(file, Hardware(n_ctx=length), Counter(), verifies=True)
    monkeypatch.setenv("EDGELLM_FIT", "off")
    place(file, Hardware(n_ctx=20_000), Counter(), verifies=True)


def test_a_model_beside_another_has_what_that_left(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile.open(draft_path)
    monkeypatch.setattr(memory_fit, "free_memory", lambda: 40_000_000)
    taken = Counter[str]()
    place(file, Hardware(n_ctx=2_048), taken, verifies=True)
    assert taken["CPU"] > 0.9 * file.header.file_size
    taken["CPU"] = 38_000_000
    with pytest.raises(MemoryShort, match="smaller quantisation"):
        place(file, Hardware(n_ctx=2_048), taken, verifies=False)


def test_without_a_graphics_card_none_is_promised(draft_path: Path) -> None:
    file = ModelFile.open(draft_path)
    assert place(file, Hardware(), Counter(), verifies=True).hardware.gpu_layers == 0
    with pytest.raises(InvalidOption, match=r"llama\.cpp finds none"):
        place(file, Hardware(gpu_layers=ALL_LAYERS), Counter(), verifies=True)


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
    found = fit(ModelFile.open(draft_path), Hardware(n_ctx=512), opened)
    assert found.hardware.gpu_layers == layers
    assert found.taken["Card0"] <= max(0, card.device.free - memory_fit._MARGIN)
    assert ("on the processor" in found.reason) == (layers == 0)
    if layers:
        rest = fit(ModelFile.open(draft_path), Hardware(n_ctx=512), opened, found.taken)
        assert rest.taken["Card0"] <= card.device.free - memory_fit._MARGIN
        with pytest.raises(MemoryShort, match="which can give"):
            fit(ModelFile.open(draft_path), Hardware(gpu_layers=8, n_ctx=512), opened, found.taken)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"n_ctx": 0}, {"gpu_layers": -2}, {"cache_type": "q3"},
                                   {"tensor_split": (0.0,)}, {"cache_type": "q8_0", "flash_attn": False}])  # fmt: skip
def test_values_that_llama_cpp_cannot_use_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOption):
        Hardware(**wrong)  # type: ignore[arg-type]


def test_the_record_travels_with_the_model(draft_path: Path) -> None:
    hardware = Hardware(threads=1, n_batch=32, cache_type="q8_0")
    with Model.load(draft_path, hardware=hardware) as model, Context(model, n_ctx=256) as context:
        assert (context.threads, context.n_batch, context.flash) == (1, 32, True)
    with Model.load(draft_path, hardware=Hardware(flash_attn=True)) as model, Context(model, n_ctx=256) as context:
        assert context.flash


def test_memory_is_what_the_control_groups_leave(tmp_path: Path) -> None:
    free, reason = memory_fit.available_memory(tmp_path / "none", tmp_path)
    assert free > 0
    assert "free memory" in reason
    proc = tmp_path / "cgroup"
    old = tmp_path / "memory" / "user" / "box"
    old.mkdir(parents=True)
    for folder, limit, used in ((old, 10**6, 2 * 10**5), (old.parent, 2**62, 0)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    proc.write_text("5:cpu:/\n4:memory:/user/box\n")
    assert memory_fit.available_memory(proc, tmp_path) == (800_000, "the free memory of its control group")
    new = tmp_path / "box"
    new.mkdir()
    (new / "memory.max").write_text("max\n")
    (new / "memory.current").write_text("5\n")
    proc.write_text("0::/box\n")
    assert "free memory" in memory_fit.available_memory(proc, tmp_path)[1]
    (new / "memory.max").write_text("105\n")
    assert memory_fit.available_memory(proc, tmp_path)[0] == 100
    (new / "memory.current").write_text("95\n")
    (new / "memory.stat").write_text("anon 15\nactive_file 20\ninactive_file 60\n")
    assert memory_fit.available_memory(proc, tmp_path)[0] == 90  # files in memory give way
