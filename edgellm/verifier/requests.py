"""The record of one verify request, from the wire to the batch, and its possible answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from edgellm.errors import EdgeError
from edgellm.spec.types import NO_IDS, Chunk, Ids, Logprobs, Sampling, Verdict


@dataclass(frozen=True, slots=True)
class Tenant:
    """The origin of a request. Verdicts are computed by turns between values of `device`; cached prompts are shared
    only between sessions of the same `cache_salt`, since the time of a verdict would otherwise tell one device what
    another one asked."""

    device: str = ""
    cache_salt: str = ""


HERE = Tenant()
"""Requests from the verifier's own process."""


@dataclass(slots=True, eq=False)
class VerifyRequest:
    """A request for a verdict on `draft`, behind the first `position` tokens that `session` holds and then `prefix`.

    Up to `extra` more tokens are to be written behind the verdict's own; with `logprobs` the verdict brings those of
    its tokens, and of that many others in each place. `round` numbers the requests of a session. With `logits` a mesh
    also answers with the rows that the verdict depends on.
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

    # Kept by the scheduler.
    arrival: int = 0
    """Prefill batches computed before the request came, or was last served."""
    turn: int = 0
    """Requests of the same device that go first, where several devices ask."""

    # Kept by the engine.
    ids: Ids = field(default_factory=lambda: NO_IDS)
    """All tokens before what is left of the draft."""
    left: Chunk = field(init=False)
    """The rest of the draft, not judged yet."""
    slot: int = -1
    """The KV sequence that holds its tokens; -1: it waits for one."""
    computed: int = 0
    """Tokens of `ids` in that sequence."""
    held: int = 0
    """Passes since it got its slot."""
    leader: VerifyRequest | None = None
    """Another request that computes the first `common` tokens of `ids`, for which this one waits."""
    common: int = 0

    # The verdict, as far as it is known.
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    plausible: tuple[bool, ...] = ()
    said: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.draft

    @property
    def before(self) -> int:
        """Return the number of tokens before what is left of the draft, as far as the verdict is known."""
        return self.position + len(self.prefix) + self.accepted + len(self.tokens)

    @property
    def unseen(self) -> int:
        """Return the number of tokens that have to be computed before the drafted ones; at least 1."""
        return len(self.ids) - self.computed

    @property
    def drafted(self) -> int:
        """Return the number of drafted tokens that are still to be verified."""
        return len(self.left)

    @property
    def device(self) -> str:
        return self.tenant.device


@dataclass(frozen=True, slots=True)
class MissingPrefix:
    """The session holds only the first `position` tokens: the others have to be sent again."""

    position: int


Answer: TypeAlias = Verdict | MissingPrefix | EdgeError
Deliver: TypeAlias = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Counters:
    """An engine's work so far. `shared` batches held several sessions, at most `widest` of them.

    `rows` were computed; `copied` tokens at the beginning of sessions were not, as another session's cache had them.
    `preemptions`: requests under way that lost their slots to another device's, and go on when they get slots again.
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
