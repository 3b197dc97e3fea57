"""A model's chat template: a program that writes a conversation as one text.

It is a stranger's program. A child process (`edgellm.isolation.template_sandbox`) runs Jinja's own sandbox within
the system's limits, and is kept for the next conversation. A template in KNOWN is rendered in this process by the same
function: we have written it, and it takes time and memory in proportion to the conversation. So the bundled pair waits
for no second Python, which takes 80 ms of a core to start. Another model's child starts while the model loads. The
child adds about 0.4 ms to a rendering, however long the conversation.
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
from edgellm.isolation.child import Answer, Child, ChildFailed, ChildKind, Limits
from edgellm.isolation.template_sandbox import (
    MEMORY,
    MEMORY_PER_BYTE,
    SECONDS,
    Renderer,
    arguments,
    compile_template,
    describe,
)

KNOWN = frozenset({"6b336c08d92c5d40ca5f840ba10c40952a20d3b9c58bf8de920ed04fd703cc9b"})
"""SHA-256 of harmless templates: the bundled pair's."""
MOST_SOURCE = 2**16  # characters of a template; known templates have 20,000 at most
_ANSWER, _ANSWER_PER_BYTE = 2**20, 16  # bytes of a rendered text: once, and for each byte of the conversation
_SAID = 400  # characters of the child's error message
KIND = ChildKind("edgellm.isolation.template_sandbox", "renders chat templates")
T = TypeVar("T")
_KEPT = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")  # variables for Python's start, and the date


class TemplateRaised(ModelUnsupported):
    """A chat template does not want the conversation as it is."""


class Template:
    """A chat template and the name of its `model`; several threads may render it at the same time, by turns."""

    def __init__(self, source: str, model: str) -> None:
        """Set up; `model` is the name for messages. Nothing is compiled yet, and no process started."""
        self.source, self.model = source, model
        self._is_known = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest() in KNOWN
        self._known_arguments: Sequence[str] | None = None
        self._lock = threading.Lock()
        self._data = source.encode("utf-8", "surrogatepass")

    def start(self) -> None:
        """Start the child process, if needed, without waiting for it. If that fails, the first rendering says why."""
        if not self._is_known:
            with self._lock, suppress(EngineFailed):
                self._child.start()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        bos: str,
        eos: str,
        arguments: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Return the conversation as text, followed by the opening of the assistant's turn. `arguments` are further
        variables of the template. Raises ModelUnsupported: the template is not valid Jinja, or too long, or it fails,
        or takes more than its limits; InvalidOption: an argument cannot be written as JSON; EngineFailed: the child
        process could not be started, or was ended from outside."""
        conversation = {**arguments, "messages": messages, "bos_token": bos, "eos_token": eos}
        return self._do(lambda: self._renderer(conversation), lambda: self._rendered(conversation))

    def arguments(self) -> Sequence[str]:
        """Return the names of the arguments that the template reads, sorted."""
        if self._known_arguments is None:
            self._known_arguments = self._do(lambda: arguments(self.source), self._named)
        return self._known_arguments

    def _do(self, here: Callable[[], T], there: Callable[[], T]) -> T:
        """Return the result of `here` for a known template, else that of `there`, which asks the child."""
        if self._is_known:
            try:
                return here()
            except Exception as error:  # noqa: BLE001  as in the child
                raise self._refused(describe(error), TemplateRaised) from None
        if len(self.source) > MOST_SOURCE:
            raise self._refused(f"it has {len(self.source)} characters; at most {MOST_SOURCE} are allowed")
        try:
            with self._lock:
                return there()
        except ChildFailed as error:
            raise self._refused(str(error)) from None
        except ModelUnsupported as error:
            raise self._refused(error.what[:_SAID], TemplateRaised) from None

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            if "_child" in vars(self):
                self._child.close()

    @cached_property
    def _child(self) -> Child:
        kept = {name: value for name in _KEPT if (value := os.environ.get(name)) is not None}
        return Child(KIND, environment=kept, opening=("compile", _limits(len(self._data)), self._data))

    @cached_property
    def _renderer(self) -> Renderer:
        return compile_template(self.source)

    def _rendered(self, conversation: Mapping[str, object]) -> str:
        try:
            asked = json.dumps(conversation).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(
                f"An argument of the chat template cannot be written as JSON: {error}.", "Give plain values."
            ) from None
        try:
            return str(self._ask("render", asked).data, "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ChildFailed(str(error)) from None

    def _named(self) -> list[str]:
        """Return the names of the arguments; nothing is taken for granted about the child's answer."""
        names = self._ask("arguments", self._data).value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ChildFailed("its arguments are unknown")
        return names

    def _ask(self, name: str, data: bytes) -> Answer:
        return self._child.call(name, _limits(len(data)), data)

    def _refused(self, why: str, kind: type[ModelUnsupported] = ModelUnsupported) -> ModelUnsupported:
        return kind(
            f"The chat template of {self.model} fails: {why}.",
            "Change the conversation (roles may have to alternate), or use another model.",
        )


def _limits(size: int) -> Limits:
    """Return the limits of a call with so many bytes."""
    return Limits(_ANSWER + _ANSWER_PER_BYTE * size, SECONDS, MEMORY + MEMORY_PER_BYTE * size)
