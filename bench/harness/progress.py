"""A progress bar on standard error, for whatever a benchmark goes through."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

T = TypeVar("T")
_shown: list[Progress] = []


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and show how many have been; within another bar below that one."""
    known = list(items) if total is None else items
    count = len(known) if isinstance(known, list) else total
    with _Bars() as bars:
        task = bars.add_task(what, total=count)
        try:
            for item in known:
                yield item
                bars.advance(task)
        finally:
            bars.remove_task(task)


class _Bars:
    """The bars that are shown together; the last to end takes them away."""

    def __init__(self) -> None:
        self._own: Progress | None = None

    def __enter__(self) -> Progress:
        if not _shown:
            self._own = Progress(console=Console(stderr=True), transient=True)
            self._own.start()
            _shown.append(self._own)
        return _shown[0]

    def __exit__(self, *_raised: object) -> None:
        if self._own is not None:
            _shown.clear()
            self._own.stop()
