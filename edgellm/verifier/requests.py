"""A verify request, from the network to the batch, and its possible answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from edgellm.errors import EdgeError
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.types import NO_IDS, Chunk, Ids, Logprobs, Sampling, Verdict


@dataclass(frozen=True, slots=True)
class Tenant:
    """The origin of a request. Devices (`device`) are served in turns. Cached prompts are shared only within a
    `cache_salt`: otherwise the time of a verdict would reveal one device's prompts to another."""

    device: str = ""
    cache_salt: str = ""


HERE = Tenant()
"""Requests from the verifier's own process."""


@dataclass(slots=True, eq=False)
class VerifyRequest:
    """A request for a verdict on `draft`, after the first `position` tokens that `session` holds and then `prefix`.

    Up to `extra` more tokens are written after the verdict's own. With `logprobs`, the verdict includes the log-
    probabilities of its tokens, and of that many others at each place. `round` numbers the requests of a session.
    `grammar` is the state of the session's, if `sampling` has a constraint. With `logits`, a mesh also answers with the
    rows that the verdict depends on.
    """

    session: int
    sampling: Sampling
    position: int
    prefix: Ids
    draft: Chunk
    extra: int = 0
    logprobs: int | None = None
    round: int = 0
    tenant: Tenant = HERE
    logits: bool = False
    grammar: ReplyGrammar | None = None

    # Kept by the scheduler.
    arrival: int = 0
    """Prefill batches computed before the request arrived, or was last served."""
    turn: int = 0
    """Number of earlier requests of the same device, if devices take turns."""

    # Kept by the engine.
    ids: Ids = field(default_factory=lambda: NO_IDS)
    """All tokens before `remaining`."""
    remaining: Chunk = field(init=False)
    """The part of the draft that is not judged yet."""
    slot: int = -1
    """The slot; -1 while it waits for one."""
    computed: int = 0
    """Number of tokens of `ids` in the slot's cache."""
    passes_in_slot: int = 0
    """Number of passes since it got its slot."""
    leader: VerifyRequest | None = None
    """Another request that computes the first `common` tokens of `ids`, which this one waits for."""
    common: int = 0

    # The verdict, as far as it is known.
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    plausible: tuple[bool, ...] = ()
    token_logprobs: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.remaining = self.draft

    @property
    def prefix_length(self) -> int:
        """Return the number of tokens before `remaining`, as far as the verdict is known."""
        return self.position + len(self.prefix) + self.accepted + len(self.tokens)

    @property
    def unseen(self) -> int:
        """Return the number of tokens to compute before the drafted ones; at least 1."""
        return len(self.ids) - self.computed

    @property
    def drafted(self) -> int:
        """Return the number of drafted tokens still to be verified."""
        return len(self.remaining)

    @property
    def device(self) -> str:
        return self.tenant.device


@dataclass(frozen=True, slots=True)
class MissingPrefix:
    """The session holds only the first `position` tokens: the others must be sent again."""

    position: int


Answer: TypeAlias = Verdict | MissingPrefix | EdgeError
Deliver: TypeAlias = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of an engine. `shared` batches had several sessions, at most `widest` of them.

    `rows` were computed; `copied` tokens came from another session's cache instead. `preemptions`: running requests
    that lost their slot to another device's request, and continue when they get one again.
    """

    batches: int = 0
    prefills: int = 0
    shared: int = 0
    widest: int = 0
    rows: int = 0
    copied: int = 0
    verdicts: int = 0
    verified: int = 0
    evictions: int = 0
    preemptions: int = 0
