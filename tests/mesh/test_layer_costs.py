"""What layers take besides their weights is estimated as llama.cpp reserves it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.engine import Block, ContextSpec, Model, check_gguf, cut, native
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.errors import ModelUnsupported
from edgellm.mesh.layer_costs import costs_of
from testkit.gguf.random_model import Shape, write
from tests.engine.headers import LLAMA, file

ROWS = 257
MODELS = {
    "small": Shape("llama", 2000, 4, 192, 6, 3, 512, 4096),
    "wide": Shape("qwen2", 3000, 4, 896, 14, 2, 4864, 4096, bias=True),
    "many ids": Shape("qwen3", 40_000, 4, 256, 4, 2, 768, 4096),
    "large": Shape("llama", 1000, 4, 2048, 32, 8, 5632, 4096),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder, found = tmp_path_factory.mktemp("costs"), {}
    for name, shape in MODELS.items():
        for kind in ("Q4_0", "F32") if name == "small" else ("Q4_0",):
            found[name, kind] = folder / f"{name}-{kind}.gguf"
            write(found[name, kind], shape, kind)
    return found


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What llama.cpp says, all of it."""
    with native.log.listen() as said:
        yield said


def reserved(said: list[str], what: str) -> float:
    found = re.findall(rf"CPU {what} buffer size = +([\d.]+) MiB", "".join(said))
    return sum(map(float, found)) * 2**20


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_quantised_keys_and_values_take_what_is_reserved(
    files: dict[tuple[str, str], Path], log: list[str], cache_type: str
) -> None:
    path = files["large", "Q4_0"]
    with Model.load(path, LoadSpec(Hardware(cache_type=cache_type))) as model:
        log.clear()
        Block(model, ContextSpec(1000, 2, ROWS, threads=1), head=True).close()
    assert costs_of(check_gguf(path), cache_type).cache(4, 1000, 2) == pytest.approx(reserved(log, "KV"), abs=6000)


@pytest.mark.parametrize(("context", "sessions"), [(4096, 1), (1000, 4), (100, 2)])
@pytest.mark.parametrize(("name", "kind"), [*((name, "Q4_0") for name in MODELS), ("small", "F32")])
def test_it_is_about_what_is_reserved(
    files: dict[tuple[str, str], Path],
    log: list[str],
    name: str,
    kind: str,
    context: int,
    sessions: int,
    tmp_path: Path,
) -> None:
    path = files[name, kind]
    costs = costs_of(check_gguf(path))
    for first, last in ((0, 0), (1, 2), (3, 3)):
        ends = first == 0 or last == 3
        cut(path, tmp_path / "block.gguf", first, last, head=last == 3)
        with Model.load(tmp_path / "block.gguf") as model:
            log.clear()
            Block(model, ContextSpec(context, sessions, ROWS, threads=1), head=last == 3).close()
        layers = last - first + 1
        told = reserved(log, "KV")  # in hundredths of a mebibyte
        assert costs.cache(layers, context, sessions) == pytest.approx(told, abs=6000)
        batch = costs.batch(layers, context, min(ROWS, context * sessions), ends=ends)
        assert 0.9 < batch / reserved(log, "compute") < 1.25, (first, last)


def test_pieces_of_a_model_say_the_same_as_the_whole(files: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    whole = costs_of(check_gguf(files["wide", "Q4_0"]))
    cut(files["wide", "Q4_0"], tmp_path / "first.gguf", 0, 0, head=False)
    assert costs_of(check_gguf(tmp_path / "first.gguf")) == whole


def test_a_header_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file(LLAMA))
    with pytest.raises(ModelUnsupported, match=r"does not say its llama\.embedding_length"):
        costs_of(check_gguf(path))
