"""Models cut into layers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.gguf.random_model import Shape, write
from tests.mesh.household import Cut, Home, Whole, cut_model

SHAPES = {
    "qwen2": Shape("qwen2", 400, 6, 64, 2, 1, 96, 512, bias=True),  # biases, tied embeddings
    "qwen3": Shape("qwen3", 400, 6, 64, 2, 1, 96, 512),  # norms of queries and keys, tied
}


@pytest.fixture(scope="session")
def verifier_cut(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """The bundled verifier in f32."""
    return cut_model(f32_pair[1], tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="session")
def cuts(verifier_cut: Cut, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cut]:
    """Of every architecture that is looked at."""
    folder = tmp_path_factory.mktemp("shapes")
    found = {"llama": verifier_cut}
    for name, shape in SHAPES.items():
        path = folder / f"{name}.gguf"
        write(path, shape, "F32")
        found[name] = cut_model(path, folder / "layers")
    return found


@pytest.fixture(scope="module")
def whole(verifier_cut: Cut) -> Iterator[Whole]:
    one = Whole(verifier_cut.path)
    yield one
    one.close()


@pytest.fixture
def home(verifier_cut: Cut) -> Iterator[Home]:
    one = Home(verifier_cut, dict.fromkeys("abc"))
    yield one
    one.verifier.close()
