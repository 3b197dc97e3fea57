"""What is called while a test runs."""

from typing import Any, TypeAlias

import pytest

Calls: TypeAlias = list[tuple[Any, ...]]
"""The arguments of each, one after the other."""


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Calls:
    """Return the arguments of each call of a function or method from now on, which works all the same."""
    calls: Calls = []
    genuine = getattr(owner, name)

    def call(*given: Any, **more: Any) -> Any:
        calls.append(given)
        return genuine(*given, **more)

    monkeypatch.setattr(owner, name, call)
    return calls
