"""The record of one verify request, from the wire to the batch, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from edgellm.errors import EdgeError
from edgellm.spec.types import NO_IDS, Chunk, Ids, Logprobs, Sampling, Verdict


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks. Verdicts are computed by turns between values of `device`; cached prompts are shared between sessions
    of the same `cache_salt` only, since the time of a verdict would otherwise tell one device what another one asked.
    """

    device: str = ""
    cache_salt: str = ""


HERE = Tenant()
"""Requests from the verifier's own process."""


@dataclass(slots=True, eq=False)
class VerifyRequest:
    """A verdict is wanted on `draft`, behind the first `position` tokens that `session` holds and then `prefix`.

    Up to `extra` tokens more are to be written behind the verdict's own; with `logprobs` the verdict brings those of
    its tokens, and of so many others in each place. `round` numbers the requests of a session. With `logits` a mesh
    also answers with the rows that the verdict hangs on.
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
    """Prefill batches that had been computed when it came, or was last served."""
    turn: int = 0
    """Requests of the same device that go first, where several devices ask."""

    # Kept by the engine.
    ids: Ids = field(default_factory=lambda: NO_IDS)
    """All tokens before what is left of the draft."""
    left: Chunk = field(init=False)
    """What is left of the draft."""
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
        """Tokens before what is left of the draft, as far as the verdict is known."""
        return self.position + len(self.prefix) + self.accepted + len(self.tokens)

    @property
    def unseen(self) -> int:
        """Tokens that have to be computed before the drafted ones; at least 1."""
        return len(self.ids) - self.computed

    @property
    def drafted(self) -> int:
        """Drafted tokens that are to be verified."""
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
    """What an engine has done so far. `shared` batches held several sessions, the `widest` that many.

    `rows` were computed; `copied` tokens at the beginning of a session were not, as another session's cache had them.
    `preemptions`: a request under way lost its slot to another device's, and goes on when it gets one again.
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
