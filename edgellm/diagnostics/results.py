"""Findings about this device and its links, each with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `topic` is a stable word for scripts; `next_step` is empty where all is well."""

    topic: str
    state: State
    what: str
    next_step: str = ""


def fine(topic: str, what: str) -> Finding:
    return Finding(topic, State.OK, what)


def note(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, State.NOTE, what, next_step)


def problem(topic: str, what: str, next_step: str) -> Finding:
    return Finding(topic, State.PROBLEM, what, next_step)
