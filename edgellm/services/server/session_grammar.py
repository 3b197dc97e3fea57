"""The grammar of a session: its owner, the limit of a device, and masks made before the decoding thread needs them.

Schemas come from other devices. So each device has a limited number of grammars and one thread for them, and a grammar
ends with its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import thread_time
from typing import TypeVar

import numpy as np

from edgellm.errors import SAME_VERSION, InvalidOption, ProtocolError
from edgellm.services.server.listener import in_thread
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.sampling import GrammarState, ReplyGrammar
from edgellm.spec.types import NO_IDS, Constraint, Verdict

R = TypeVar("R")

MAX_GRAMMARS = 8  # grammars of one device at once, each of up to some tens of megabytes
_SLOW_SECONDS = 0.002  # processor time above which making a mask counts as slow


class GrammarOwner:
    """A device, with its grammars on this verifier."""

    def __init__(self) -> None:
        self._held = 0
        self._turn = asyncio.Lock()

    def take_place(self) -> bool:
        """Count one more grammar; return False where there are too many."""
        free = self._held < MAX_GRAMMARS
        self._held += free
        return free

    def free_place(self) -> None:
        self._held -= 1

    async def run(self, work: Callable[[], R]) -> R:
        """Return the result of `work`, in a thread: one at a time, also where a device leaves meanwhile."""
        async with self._turn:
            return await in_thread(work)


class SessionGrammar:
    """The grammar of one session of `owner`, from its first request on until `end`."""

    def __init__(
        self, owner: GrammarOwner, constraint: Constraint, compile_schema: Callable[[str], GrammarState] | None
    ) -> None:
        """Compile by `compile_schema`; None: this verifier follows no schemas."""
        self._owner, self._constraint, self._compile = owner, constraint, compile_schema
        self._grammar: ReplyGrammar | None = None
        self._holds = self._slow = False
        self._text = NO_IDS  # the session's known text

    async def prepare(self, request: VerifyRequest) -> bool:
        """Have the verdict on `request` follow the grammar, with masks that are made now; return False where the device
        has too many grammars for another one. Raises ProtocolError: the schema cannot be followed; EngineFailed: the
        text breaks the grammar."""
        self._holds = self._holds or self._owner.take_place()
        if not self._holds:
            return False
        try:
            await self._owner.run(lambda: self._make_masks(request))
        except InvalidOption as error:
            raise ProtocolError(error.what, error.next_step) from None
        if self._slow:  # the decoding thread would make masks while other devices wait
            request.extra = 0
        request.grammar = self._grammar
        return True

    def _make_masks(self, request: VerifyRequest) -> None:
        if self._grammar is None:
            if self._compile is None:
                raise ProtocolError("This verifier follows no JSON schemas.", SAME_VERSION)
            self._grammar = ReplyGrammar(self._compile(self._constraint.schema), self._constraint)
        if request.position <= len(self._text):  # otherwise the device is asked for the tokens between
            self._text = np.concatenate((self._text[: request.position], request.prefix))
            began = thread_time()
            self._grammar.prepare(self._text, request.draft.ids)
            self._slow |= thread_time() - began > _SLOW_SECONDS * (len(request.draft) + 1)

    def observe(self, request: VerifyRequest, verdict: Verdict) -> None:
        self._text = np.concatenate((self._text, request.draft.ids[: verdict.accepted], verdict.tokens))

    def end(self) -> None:
        """Give the device's place back; may be called again."""
        if self._holds:
            self._owner.free_place()
        self._holds, self._grammar = False, None
