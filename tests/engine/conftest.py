"""Small models with random weights, for shapes and templates that the bundled pair does not have."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgellm.engine import Context, ContextSpec, Model
from testkit.gguf.random_model import CHAT_TEMPLATE, Shape, write

TINY = Shape("llama", 400, 2, 32, 2, 1, 64, 512)

MakeModel = Callable[..., Model]


@pytest.fixture
def make_model(tmp_path: Path) -> Iterator[MakeModel]:
    """Writes and loads a random model; closed after the test."""
    models: list[Model] = []

    def make(chat_template: str = CHAT_TEMPLATE) -> Model:
        path = tmp_path / f"model-{len(models)}.gguf"
        write(path, TINY, "F32", chat_template=chat_template)
        models.append(Model.load(path))
        return models[-1]

    yield make
    for model in models:
        model.close()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 400 tokens, Q8_0: small enough to mutate."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write(path, TINY, "Q8_0")
    return path


@pytest.fixture(scope="session")
def exact_model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    """The bundled draft model in float32."""
    with Model.load(f32_pair[0]) as model:
        yield model


@pytest.fixture
def context(exact_model: Model) -> Iterator[Context]:
    """Three sequences of 256 positions over the draft model in float32."""
    with Context(exact_model, ContextSpec(n_ctx=256, n_seq=3, threads=1)) as opened:
        yield opened
