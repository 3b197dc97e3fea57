"""What the tests of the code pair share."""

from collections.abc import Iterator

import pytest

from models.code import stdlib
from models.code.stdlib import library


@pytest.fixture(scope="module")
def short_files_alone() -> Iterator[None]:
    """The whole library takes seconds to parse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib, "LARGEST", 20_000)
        library.cache_clear()
        yield
    library.cache_clear()
