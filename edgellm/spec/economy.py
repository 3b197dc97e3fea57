"""Break-even: does verifying the next chunk help, in quality or in speed, by what was measured so far?"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.spec.records import Chunk, Decision, Verdict

FADES = 0.99
"""What a chunk seen before the last one still counts: a memory of about a hundred verified chunks."""

NEEDLESS = 0.05
"""Below this chance of a rejection, by its upper bound, verification has shown that it changes nothing."""

PROBE = 25
"""One chunk in so many is verified nevertheless, to notice when things change."""


@dataclass(slots=True)
class Economy:
    """Running measurements of a pair on its link: seconds of a drafted token, seconds from asking for a verdict to
    having it, what that costs (less what was drafted meanwhile and could be used), and how many of the verified chunks
    were rejected. Kept over all replies of a pair.
    """

    draft_seconds: float | None = None
    wait_seconds: float | None = None
    cost_seconds: float | None = None
    due: float | None = None  # the last wait, of which the next chunk tells what it was used for
    verified: float = 0.0
    rejected: float = 0.0
    skipped: int = 0

    def round(self, chunk: Chunk, _written: int, verdict: Verdict | None, drafting: float, waiting: float) -> None:
        """A round is over, as a `Watch` is told: `drafting` seconds for the chunk, and `waiting` seconds for the
        verdict on it, if any.
        """
        if chunk.retrieved:
            return
        if fresh := len(chunk) - chunk.ahead - chunk.tail:
            self.draft_seconds = _smoothed(self.draft_seconds, drafting / fresh)
        if self.due is not None:
            used = chunk.ahead * (self.draft_seconds or 0.0)
            self.cost_seconds = _smoothed(self.cost_seconds, max(0.0, self.due - used))
            self.due = None
        if verdict is not None and len(chunk):
            self.due = waiting
            self.wait_seconds = _smoothed(self.wait_seconds, waiting)
            self.verified = FADES * self.verified + 1.0
            self.rejected = FADES * self.rejected + (verdict.accepted < len(chunk))

    def decide(self) -> Decision:
        """Whether verification has a point now, and why."""
        if self.draft_seconds is None or self.cost_seconds is None:
            return Decision(True, "nothing is measured yet")
        wait, token = self.cost_seconds * 1e3, self.draft_seconds * 1e3
        if wait <= token:
            return Decision(
                True, f"a verdict costs {wait:.1f} ms and brings a token that takes {token:.1f} ms to draft"
            )
        most = upper_bound(self.rejected, self.verified)
        if most >= NEEDLESS:
            return Decision(True, f"up to {most:.0%} of chunks are rejected, for {wait:.1f} ms each")
        self.skipped += 1
        if self.skipped % PROBE == 0:
            return Decision(True, f"at most {most:.0%} of chunks are rejected; one in {PROBE} is verified to be sure")
        return Decision(False, f"at most {most:.0%} of chunks are rejected, and a verdict costs {wait:.1f} ms")


def upper_bound(hits: float, n: float, z: float = 1.645) -> float:
    """The upper end of Wilson's interval for a share of `hits` in `n`: with 95 % confidence it is no higher."""
    if n <= 0.0:
        return 1.0
    share, zz = hits / n, z * z
    middle = share + zz / (2 * n)
    spread = z * (share * (1 - share) / n + zz / (4 * n * n)) ** 0.5
    return float(min(1.0, (middle + spread) / (1 + zz / n)))


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
