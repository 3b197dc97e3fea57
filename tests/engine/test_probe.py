"""Loading in a child process first: what ends the child is refused, and asked once."""

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import Model, ModelFile, check_gguf
from edgellm.engine.gguf import reader
from edgellm.engine.hardware import ALL_LAYERS, ComputeDevice, Hardware
from edgellm.engine.memory_fit import Placed
from edgellm.engine.model import LoadSpec
from edgellm.engine.trial import probe
from edgellm.engine.trial.probe import EAGLE3, MTP
from edgellm.errors import EngineFailed, InvalidOption, ModelCorrupt, ModelUnsupported
from testkit.gguf.random_model import write
from testkit.hostile.crafted_gguf import BASE, KNOWN, Crafted, crafted, made
from tests.conftest import Architectures, Heads
from tests.engine.conftest import TINY


@pytest.fixture
def guarded(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guard at work, with verdicts of its own; returns their folder."""
    monkeypatch.delenv("EDGELLM_PROBE")
    return home / "cache" / "probed"


class Children:
    """The guard at work, whose child processes are counted, and can run another program than the trial. Verdicts are
    in `folder`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.started, self.popen = 0, subprocess.Popen
        self.program: str | None = None  # what they run in place of the trial
        self.then: Callable[[subprocess.Popen[bytes]], None] = lambda _child: None
        monkeypatch.setattr(subprocess, "Popen", self)

    def __call__(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        self.started += 1
        if self.program is not None:
            command = [*command[:2], "-c", self.program, *command[4:]]  # of python -P -m serving
        child = self.popen(command, **options)  # type: ignore[call-overload]
        self.then(child)
        return child


SERVE = """
from edgellm.isolation.serving import serve
serve(child.functions)
"""
IGNORANT = f"""
from edgellm.engine.gguf import reader
from edgellm.engine.trial.probe import EAGLE3, MTP
from edgellm.engine.trial import first_load as child
reader.tensor_flaw = lambda tensor: ""
{SERVE}"""


@pytest.fixture
def children(guarded: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(guarded, monkeypatch)


@pytest.fixture
def killer(tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that ends the process that loads it, and a check that does not know such files, here and in children."""
    monkeypatch.setattr(reader, "tensor_flaw", lambda _tensor: "")
    children.program = IGNORANT
    sound, path = tmp_path / "sound.gguf", tmp_path / "killer.gguf"
    write(sound, BASE, "F32")
    path.write_bytes(Crafted.of(sound).retyped("blk.0.attn_norm.weight", "F16").bytes())
    return path


def test_what_ends_a_child_is_refused_for_good_with_its_words(children: Children, killer: Path) -> None:
    for _ in range(2):
        with pytest.raises(
            ModelUnsupported, match=r"ends the process that loads it: SIG[A-Z]+.*; .*binary_op.*F16|SIG"
        ):
            Model.load(killer)
    assert children.started == 1
    assert len(list(children.folder.iterdir())) == 1
    killer.write_bytes(killer.with_name("sound.gguf").read_bytes())
    Model.load(killer).close()  # it has changed


@pytest.mark.parametrize("kind", [MTP, EAGLE3])
def test_a_model_whose_speculator_ends_the_child_is_used_without_it(
    guarded: Path, architectures: Architectures, heads: Heads, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def ended(trial: probe.Probe, *_: object, **__: str) -> probe.TrialOutcome:
        tried.append(trial.speculator)
        return probe.TrialOutcome(fatal="SIGABRT" if trial.speculator else "")

    monkeypatch.setattr(probe, "try_in_child", ended)
    path = architectures("qwen35", mtp="useful") if kind == MTP else architectures("llama")
    head = ModelFile.open(heads("llama")) if kind == EAGLE3 else None
    for _ in range(2):
        with Model.load(path, LoadSpec(speculates=True, eagle3=head)) as model:
            assert model.speculator is None
            assert model.faults == {kind}
    assert tried == [kind, ""]


def test_a_head_is_tried_with_its_verifier(children: Children, architectures: Architectures, heads: Heads) -> None:
    head = ModelFile.open(heads("llama", own=True))
    for _ in range(2):
        with Model.load(architectures("llama"), LoadSpec(speculates=True, eagle3=head)) as model:
            assert model.speculator is not None
    assert children.started == 1


RECORDING = f"""
from pathlib import Path
from edgellm.engine.trial import first_load as child
load = child.Model.load
def recorded(path, spec, **given):
    Path(path).with_suffix(".hardware").write_text(repr(spec.hardware))
    return load(path, spec, **given)
child.Model.load = recorded
{SERVE}"""


def told(path: Path) -> str:
    """Return the hardware that a child was told for the file at `path`."""
    return path.with_suffix(".hardware").read_text(encoding="utf-8")


def test_a_trial_computes_as_the_model_will(children: Children, architectures: Architectures, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(architectures("qwen3").read_bytes())
    children.program = RECORDING
    Model.load(path, LoadSpec(Hardware(cache_type="q8_0", flash_attn=True, threads=1))).close()
    assert told(path) == repr(Hardware(gpu_layers=0, cache_type="q8_0", flash_attn=True))
    there = Hardware(gpu_layers=3, devices=("Card1", "Card0"), tensor_split=(3.0, 1.0))
    with pytest.raises(InvalidOption, match="no device Card1"):
        probe.try_in_child(probe.Probe(ModelFile.open(path), there))
    assert told(path) == repr(there)


def key(path: Path, **hardware: Any) -> str:
    """Return the key of the verdict on a file."""
    return probe.Probe(ModelFile.open(path), Hardware(**hardware)).key()


def test_a_verdict_holds_for_one_kind_of_cache(tiny_path: Path) -> None:
    assert key(tiny_path) == key(tiny_path, cache_type="f16", n_ctx=512, threads=1) == key(tiny_path, n_batch=64)
    assert len({key(tiny_path), key(tiny_path, cache_type="q4_0"), key(tiny_path, flash_attn=True)}) == 3


CARDS = {
    "CUDA0": ComputeDevice("CUDA0", "a card", "gpu", 0, 0),
    "CUDA1": ComputeDevice("CUDA1", "a card", "gpu", 0, 0),
    "Vulkan0": ComputeDevice("Vulkan0", "a card", "gpu", 0, 0),
    "Vulkan1": ComputeDevice("Vulkan1", "a processor's part", "igpu", 0, 0),
}


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(names: Sequence[str] = ()) -> list[ComputeDevice]:
        return [card for name, card in CARDS.items() if not names or name in names]

    monkeypatch.setattr(probe, "offload_devices", listed)


@pytest.mark.usefixtures("cards")
def test_a_verdict_holds_for_its_kind_of_devices_alone(tiny_path: Path) -> None:
    ways = [(), ("CUDA0",), ("Vulkan0",), ("Vulkan1",), ("CUDA0", "CUDA1")]
    on_cards = {key(tiny_path, gpu_layers=7, devices=way) for way in ways}
    assert len({*on_cards, key(tiny_path)}) == len(ways) + 1
    # It does not matter which of several alike, and how many layers.
    assert key(tiny_path, gpu_layers=7, devices=("CUDA0",)) == key(tiny_path, gpu_layers=ALL_LAYERS, devices=("CUDA1",))
    assert key(tiny_path) == key(tiny_path, gpu_layers=0, devices=("CUDA0",))


def test_a_verdict_ends_with_the_build(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for built in (["CPU"], ["Vulkan", "CPU"], ["CUDA", "CPU"], ["CPU", "CUDA", "CUDA[10.0.0.1:1]"]):
        monkeypatch.setattr(probe, "backends", lambda built=built: built)
        keys.append(key(tiny_path))
    assert len(set(keys[:3])) == 3
    assert keys[2] == keys[3]


def test_a_sound_file_is_tried_once_wherever_it_lies(children: Children, tiny_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_path.read_bytes())
    shares: list[float] = []
    for path in (tiny_path, tiny_path, copy):
        Model.load(path, progress=shares.append).close()
    assert children.started == 1
    assert shares[-1] == 1
    kept = json.loads(next(children.folder.iterdir()).read_text(encoding="utf-8"))
    assert kept == {"fatal": "", "faults": []}


def test_the_bundled_pair_is_trusted_under_its_own_name_alone(
    children: Children, draft_path: Path, tmp_path: Path
) -> None:
    Model.load(draft_path).close()
    assert children.started == 0
    elsewhere = tmp_path / "draft.gguf"
    elsewhere.write_bytes(draft_path.read_bytes())
    Model.load(elsewhere).close()
    assert children.started == 1


def test_the_vocabulary_alone_is_tried_without_the_weights(children: Children, tiny_path: Path) -> None:
    for text_only in (True, True, False):
        Model.load(tiny_path, LoadSpec(text_only=text_only)).close()
    assert children.started == 2


def test_a_refusal_is_the_one_that_loading_would_raise(guarded: Path, tmp_path: Path) -> None:
    sound, path = tmp_path / "sound.gguf", tmp_path / "short.gguf"
    write(sound, TINY, "F32")
    path.write_bytes(Crafted.of(sound).put("blk.0.attn_q.weight", None).bytes())
    with pytest.raises(ModelUnsupported, match=r"cannot load .*short\.gguf.*blk\.0\.attn_q"):
        Model.load(path)
    assert not guarded.exists()


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from edgellm.engine.trial import first_load as child
"""
RAISES = f"""
from edgellm.engine.trial import first_load as child
def fail(*_, **__):
    raise ModuleNotFoundError("No module named 'numpy'")
child.Context = fail
{SERVE}"""
OUT_OF_MEMORY = RAISES.replace("ModuleNotFoundError", "MemoryError")


@pytest.mark.parametrize(
    ("program", "says"),
    [(None, "was ended by SIGKILL"), (WITHOUT_NUMPY, "does not start: .*numpy"),
     (RAISES, r"The trial of .* failed: .*numpy")],
    ids=["ended by somebody", "while it starts", "in the trial"],
)  # fmt: skip
def test_the_end_of_a_child_or_an_error_of_python_says_nothing_of_the_file(
    children: Children, tiny_path: Path, program: str | None, says: str
) -> None:
    """As while edgellm is installed once more."""
    children.program, goes_on = program, children.then
    if program is None:
        children.then = lambda child: child.kill()
    with pytest.raises(EngineFailed, match=says):
        Model.load(tiny_path)
    children.program, children.then = None, goes_on
    Model.load(tiny_path).close()
    assert children.started == 2


def test_a_file_taking_more_memory_than_granted_is_refused(children: Children, tiny_path: Path) -> None:
    children.program = OUT_OF_MEMORY
    for _ in range(2):
        with pytest.raises(ModelUnsupported, match="it exceeds its memory limit"):
            Model.load(tiny_path)
    assert children.started == 1


def test_before_its_memory_is_reckoned_here_a_file_is_tried(children: Children, tiny_path: Path) -> None:
    placed = Placed(ModelFile.open(tiny_path), Hardware())
    assert placed.use() == placed.use()
    assert children.started == 1
    children.program = OUT_OF_MEMORY
    with pytest.raises(ModelUnsupported, match="ends the process that loads it"):
        replace(placed, hardware=Hardware(cache_type="q8_0")).use()


def test_what_stops_the_loading_stops_the_child(children: Children, tiny_path: Path) -> None:
    there: list[subprocess.Popen[bytes]] = []
    children.then = there.append

    def stop(_share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model.load(tiny_path, progress=stop)
    assert there[0].poll() is not None


@pytest.mark.parametrize("damage", ["[]", '{"fatal": 7}'])
def test_a_damaged_verdict_is_made_again(children: Children, tiny_path: Path, damage: str) -> None:
    for _ in range(2):
        Model.load(tiny_path).close()
        next(children.folder.iterdir()).write_text(damage, encoding="utf-8")
    assert children.started == 2


def test_the_ten_that_killed_do_not_pass_the_check(tmp_path: Path) -> None:
    path = tmp_path / "crafted.gguf"
    for _, (name, data) in zip(KNOWN, crafted(tmp_path), strict=False):
        assert name in KNOWN
        path.write_bytes(data)
        with pytest.raises((ModelCorrupt, ModelUnsupported)):
            check_gguf(path)


@pytest.mark.parametrize("name", ["d2t", "blk.0.ffn_gate_tid2eid.weight", "masked_embd_ordering.weight"])
def test_indices_may_be_integers_and_belong_to_the_verdict(tmp_path: Path, tiny_path: Path, name: str) -> None:
    keys = set()
    for fill in (1, 2):
        path = tmp_path / f"{fill}.gguf"
        path.write_bytes(Crafted.of(tiny_path).put(name, made((8,), "I32", fill)).bytes())
        keys.add(key(path))
    assert len(keys) == 2


def test_weights_do_not_belong_to_the_verdict(tmp_path: Path, tiny_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(tiny_path.read_bytes()[:-1] + b"\x07")
    assert key(path) == key(tiny_path)
