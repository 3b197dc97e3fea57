"""Models cut into layers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mesh.household import Cut, Home, Whole, cut_model


@pytest.fixture(scope="session")
def verifier_cut(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """The bundled verifier in f32."""
    return cut_model(f32_pair[1], tmp_path_factory.mktemp("layers"))


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
