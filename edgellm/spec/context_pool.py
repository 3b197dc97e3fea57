"""Contexts that replies take and give back."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.engine import Context


class ContextPool:
    """Contexts over one model, one for each reply under way. What a context has cached serves the next reply."""

    def __init__(self, new_context: Callable[[], Context]) -> None:
        self._new_context = new_context
        self._idle: list[Context] = []
        self._all: list[Context] = []

    def take(self) -> Context:
        """Return the context that was given back last, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            context = self._new_context()
            self._all.append(context)
            return context

    def give(self, context: Context) -> None:
        self._idle.append(context)

    @property
    def shared(self) -> int:
        """Return how many decodes of all contexts had fewer threads than a context alone has."""
        return sum(context.shared for context in self._all)

    def close(self) -> None:
        """Close every context, including those still in use."""
        self._idle.clear()
        while self._all:
            self._all.pop().close()
