"""A model's chat template: a program that writes a conversation as one text.

It is a stranger's program. A child process (`edgellm.isolation.template_child`) runs Jinja's own sandbox within
the system's limits, and is kept for the next conversation. A template in KNOWN is rendered in this process by the same
function: we have written it, and it takes time and memory in proportion to the conversation. So the bundled pair waits
for no second Python, which takes 80 ms of a core to start. Another model's child starts while the model loads. A
rendering in the child takes about 0.4 ms more than one here, however long the conversation
(`python -m bench.engine.chat_templates`).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported
from edgellm.isolation.child_process import ChildFailed, ChildProcess, Limits
from edgellm.isolation.template_child import (
    MEMORY,
    MEMORY_PER_BYTE,
    RENDERED,
    SECONDS,
    Renderer,
    arguments,
    compile_template,
    describe,
)

KNOWN = frozenset({"6b336c08d92c5d40ca5f840ba10c40952a20d3b9c58bf8de920ed04fd703cc9b"})
"""SHA-256 of templates that are harmless: the bundled pair's."""
MOST_SOURCE = 2**16  # characters of a template; known ones have 20,000 at most
_STARTING = Limits(seconds=30.0, memory=2**30, answer=0)  # Python starts and imports Jinja
_ANSWER, _ANSWER_PER_BYTE = 2**20, 16  # bytes of a rendered text, and for each byte of the conversation
_SAID = 400  # characters of what the child says about an error
_MODULE = "edgellm.isolation.template_child"
T = TypeVar("T")
_KEPT = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")  # variables that Python may need to start, or the date


class TemplateRaised(ModelUnsupported):
    """A chat template does not want the conversation as it is."""


class Template:
    """A chat template and the name of its `model`; several threads may render it at the same time, by turns."""

    def __init__(self, source: str, model: str) -> None:
        """Set up; `model` is the name for messages. Nothing is compiled yet, and no process started."""
        self.source, self.model = source, model
        self._is_known = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest() in KNOWN
        self._child: ChildProcess | None = None
        self._has_source = False  # of the child
        self._known_arguments: Sequence[str] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child process where one is needed, without waiting for it, so that the first rendering need not.
        Where none can be started, the first rendering says why."""
        if not self._is_known:
            with self._lock, suppress(EngineFailed):
                self._running()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        bos: str,
        eos: str,
        arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text, followed by the opening of the assistant's turn. `arguments` are further
        variables of the template.

        Raises:
            ModelUnsupported: the template is not valid Jinja, or too long, or it fails, or takes more than its limits.
            InvalidOption: an argument cannot be written as JSON.
            EngineFailed: the child process could not be started, or was ended from outside.
        """
        conversation = {**arguments, "messages": messages, "bos_token": bos, "eos_token": eos}
        return self._do(lambda: self._renderer(conversation), lambda child: self._render(child, conversation))

    def arguments(self) -> Sequence[str]:
        """Return the names of the arguments that the template reads, sorted. Raises what `render` raises."""
        if self._known_arguments is None:
            self._known_arguments = self._do(lambda: arguments(self.source), self._arguments)
        return self._known_arguments

    def _do(self, here: Callable[[], T], there: Callable[[ChildProcess], T]) -> T:
        """Return the result of `here` for a known template, else that of `there`."""
        if self._is_known:
            try:
                return here()
            except Exception as error:  # noqa: BLE001  as in the child
                raise self._refused(describe(error), TemplateRaised) from None
        if len(self.source) > MOST_SOURCE:
            raise self._refused(f"it has {len(self.source)} characters; at most {MOST_SOURCE} are allowed")
        with self._lock:
            for _ in range(2):
                with suppress(BrokenPipeError):  # it has ended since the last time
                    return there(self._running())
        raise EngineFailed("The process that renders chat templates exits at once.", "Try again.")

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            if self._child is not None:
                self._child.close()

    @cached_property
    def _renderer(self) -> Renderer:
        return compile_template(self.source)

    def _running(self) -> ChildProcess:
        """Return the child process, another one where it has ended."""
        if self._child is None or not self._child.alive:
            kept = {name: value for name in _KEPT if (value := os.environ.get(name)) is not None}
            self._child, self._has_source = ChildProcess(_MODULE, environment=kept), False
        return self._child

    def _render(self, child: ChildProcess, conversation: Mapping[str, object]) -> str:
        if not self._has_source:
            self._await_start(child)
            self._ask(child, {"source": self.source})
            self._has_source = True
        return self._ask(child, conversation)

    def _arguments(self, child: ChildProcess) -> list[str]:
        if not self._has_source:
            self._await_start(child)
        try:
            names = json.loads(self._ask(child, {"arguments_of": self.source}))
        except (ValueError, RecursionError) as error:
            raise self._refused(f"its arguments are unknown: {error}") from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self._refused("its arguments are unknown")
        return names

    @staticmethod
    def _await_start(child: ChildProcess) -> None:
        try:
            child.ask(b"", _STARTING)
        except ChildFailed as error:
            raise EngineFailed(
                f"The process that renders chat templates does not start: {error}.", "Install edgellm again."
            ) from None

    def _ask(self, child: ChildProcess, asked: Mapping[str, object]) -> str:
        """Return the text of the child's answer, about which nothing is taken for granted."""
        try:
            request = json.dumps(asked).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(
                f"An argument of the chat template cannot be written as JSON: {error}.", "Give plain values."
            ) from None
        size = len(request)
        limits = Limits(SECONDS, MEMORY + MEMORY_PER_BYTE * size, _ANSWER + _ANSWER_PER_BYTE * size)
        try:
            answer = child.ask(request, limits)
            text = answer[1:].decode("utf-8", "surrogatepass")
        except (ChildFailed, UnicodeDecodeError) as error:
            raise self._refused(str(error)) from None
        if answer[:1] != RENDERED:
            raise self._refused(text[:_SAID], TemplateRaised)
        return text

    def _refused(self, why: str, kind: type[ModelUnsupported] = ModelUnsupported) -> ModelUnsupported:
        return kind(
            f"The chat template of {self.model} fails: {why}.",
            "Change the conversation (roles may have to alternate), or use another model.",
        )
