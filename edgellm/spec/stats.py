"""A reply's statistics, counted while it is written."""

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from edgellm.spec.gates.rules import BudgetController
from edgellm.spec.types import UNVERIFIED, Channel, Decision, Round, Source, Token

_VERIFIED_SOURCES = frozenset(Source) - UNVERIFIED
_ACCEPTED_SOURCES = frozenset({Source.ACCEPTED, Source.RETRIEVED})
_FIGURES = """
    text prompt_tokens cached_tokens tokens ttft_ms tokens_per_second share_verified acceptance_rate
    mean_acceptance_length verifier_passes_per_token bytes_up bytes_down finish_reason rounds chunks_verified
    chunks_accepted_whole drafted seed share_offloaded bytes_per_chunk guesses_tried guesses_hit stall_hidden exits
    from_context retrieved retrieved_from tested accepted accepted_at rtt_ms stopped_by seconds_decoding thinking
    thinking_tokens chunks chunks_thinking chunks_verified_thinking share_verified_thinking share_verified_answer
    drafting
"""


class Summary:
    """A reply's statistics: final after its last token, partial before. Shares and means of nothing are None. The
    decoding loop counts, and its clock starts on creation."""

    def __init__(self, prompt_tokens: int = 0, seed: int = 0, prepared: float = 0.0) -> None:
        """Begin with a reply to `prompt_tokens`; `prepared` seconds went into the request before."""
        self.prompt_tokens, self.seed = prompt_tokens, seed
        self.started = perf_counter() - prepared
        self.first_at: float | None = None  # `perf_counter` time of the first round's verdict
        self.cached_tokens = 0  # tokens of the prompt that the verifier had read before
        self.seconds_decoding = 0.0  # all rounds but the first
        self.finish_reason = "cancelled"
        """`stop` (the model ended its turn), `length` (max_tokens or the context), or `cancelled`."""
        self.context_full = False
        self.stopped_by = ""  # stop sequence that ended the reply
        self.ids: list[int] = []  # ids, the last token of a turn included
        self._pieces: dict[Channel, list[bytes]] = {channel: [] for channel in Channel}
        self.tokens = self.thinking_tokens = 0  # tokens with their markup
        self._first_burst = self._from_verifier = self._thinking_from_verifier = 0
        self.rounds = self.drafted = self.chunks = self.chunks_thinking = self.exits = self.from_context = 0
        self.chunks_verified = self.chunks_verified_thinking = self.chunks_accepted_whole = self._chunk_tokens = 0
        self.tested = self.accepted = 0  # drafted tokens that the verifier judged, and accepted
        self.accepted_at: list[int] = []  # accepted tokens by their place in the chunk
        self.retrieved = 0  # accepted copied tokens
        self.passes = self.bytes_up = self.bytes_down = 0
        self._waited = 0.0  # seconds for verdicts on chunks
        self.verdicts_on_drafts = 0
        self.guesses_tried = self.guesses_hit = 0  # verdicts with predictions, and those that matched one
        self._hidden = 0.0  # seconds of waiting spent on drafts that were kept
        self._link_waits: list[float] = []  # seconds of each wait across a link in which the verifier did not compute
        self.count_with()

    def count_with(
        self, controller: BudgetController | None = None, copied: dict[str, int] | None = None,
        drafting: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        """Also report what is kept elsewhere: the budget `controller`, which is told the decisions, accepted copies by
        source, and the present choice of drafts with its reason."""
        self._controller, self._drafting = controller, drafting
        self._copied = copied if copied is not None else {}

    def decide(self, decision: Decision) -> None:
        """Count a gate's decision."""
        if self._controller is not None:
            self._controller.record(decision.offload)

    def guess(self, hit: bool, seconds: float) -> None:
        """Count a verdict: whether a predicted one matched it, and the `seconds` spent drafting after predictions."""
        self.guesses_tried += 1
        self.guesses_hit += hit
        self._hidden += seconds if hit else 0.0

    def observe(self, turn: Round, channel: Channel) -> None:
        """Observe a finished round, whose tokens are about to be yielded; it began in `channel`."""
        chunk, verdict, thinks, n = turn.chunk, turn.verdict, channel is Channel.THINKING, len(turn.chunk)
        self.rounds += 1
        if self.first_at is None:
            self.first_at = turn.answered
            self.cached_tokens = 0 if verdict is None else min(verdict.cached, self.prompt_tokens)
        else:
            self.seconds_decoding += turn.seconds
        self.drafted += n
        self.chunks += n > 0
        self.chunks_thinking += n > 0 and thinks
        self.exits += sum(one.exit_layer is not None for one in chunk.drafted)
        self.from_context += chunk.from_context
        if verdict is None:
            return
        self.passes += verdict.passes
        self.bytes_up += verdict.bytes_up
        self.bytes_down += verdict.bytes_down
        if verdict.bytes_up:
            self._link_waits.append(max(0.0, turn.waiting - verdict.seconds))
        if not n:
            return
        self._waited += turn.waiting
        self.verdicts_on_drafts += not chunk.retrieved
        self.chunks_verified += 1
        self.chunks_verified_thinking += thinks
        self.tested += min(verdict.accepted + 1, n)
        self.accepted += verdict.accepted
        self.chunks_accepted_whole += verdict.accepted == n
        self._chunk_tokens += verdict.accepted + 1
        self.accepted_at += [0] * (verdict.accepted - len(self.accepted_at))
        for place in range(verdict.accepted):
            self.accepted_at[place] += 1

    def token(self, token: Token) -> None:
        """Count `token`, which the round has written."""
        self.tokens += 1
        self.ids.append(token.id)
        self._from_verifier += token.source in _VERIFIED_SOURCES
        self.retrieved += token.source is Source.RETRIEVED
        self._first_burst += token.round == 0

    def show(self, token: Token) -> None:
        """Add the text of `token`, which is about to be yielded."""
        self._pieces[token.channel].append(token.piece)
        if token.channel is Channel.THINKING:
            self.thinking_tokens += 1
            self._thinking_from_verifier += token.source in _VERIFIED_SOURCES

    def insert(self, ids: Sequence[int]) -> None:
        """Add tokens that no model wrote, and that are not yielded."""
        self.ids += ids

    def finish(self, reason: str, *, context_full: bool = False) -> None:
        """Record the `finish_reason`, and whether that is the context's length, of which a notice tells."""
        self.finish_reason, self.context_full = reason, context_full

    def stop(self, token: int, source: Source) -> None:
        """Record that `token` from `source` ended the turn. No bonus follows an accepted token then."""
        self.finish_reason = "stop"
        self.ids.append(token)
        self._chunk_tokens -= source in _ACCEPTED_SOURCES

    def cut(self, count: int, by: str) -> None:
        """End the reply and drop its last `count` bytes, which begin with the stop sequence `by`; "" is the head of
        another turn."""
        text = b"".join(self._pieces[Channel.ANSWER])
        self._pieces[Channel.ANSWER] = [text[: len(text) - count]]
        self.finish_reason, self.stopped_by = "stop", by

    def figures(self) -> dict[str, Any]:
        """Return all figures that mean something outside this process, by name."""
        return {name: getattr(self, name) for name in _FIGURES.split()}

    @property
    def text(self) -> str:
        return b"".join(self._pieces[Channel.ANSWER]).decode("utf-8", errors="replace")

    @property
    def thinking(self) -> str:
        return b"".join(self._pieces[Channel.THINKING]).decode("utf-8", errors="replace").rstrip()

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_at is None or not self.tokens else (self.first_at - self.started) * 1e3

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of decoding, without the first round, whose tokens belong to the time to the first token."""
        return _share(self.tokens - self._first_burst, self.seconds_decoding) or None

    @property
    def tokens_per_round(self) -> float | None:
        return _share(self.tokens, self.rounds)

    @property
    def share_verified(self) -> float | None:
        """Return the share of the tokens that the verifier accepted or wrote; None without a verdict."""
        return _share(self._from_verifier, self.tokens) if self.passes else None

    @property
    def share_verified_thinking(self) -> float | None:
        return _share(self._thinking_from_verifier, self.thinking_tokens) if self.passes else None

    @property
    def share_verified_answer(self) -> float | None:
        if not (self.passes and self.thinking_tokens):
            return None
        return _share(self._from_verifier - self._thinking_from_verifier, self.tokens - self.thinking_tokens)

    @property
    def acceptance_rate(self) -> float | None:
        return _share(self.accepted, self.tested)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Return the mean tokens of a verified chunk, bonus or correction included."""
        return _share(self._chunk_tokens, self.chunks_verified)

    @property
    def verifier_passes_per_token(self) -> float | None:
        return _share(self.passes, self.tokens)

    @property
    def bytes_per_chunk(self) -> float | None:
        """Return the bytes both ways per verified chunk, including the prompt's; None without a link."""
        return _share(self.bytes_up + self.bytes_down, self.chunks_verified) if self.bytes_up else None

    @property
    def rtt_ms(self) -> float | None:
        """Return the median wait for a verdict across a link, without the verifier's computing time."""
        return median(self._link_waits) * 1e3 if self._link_waits else None

    @property
    def share_offloaded(self) -> float | None:
        """Return the share of chunks offloaded so far under this budget, over all replies of the pair."""
        return None if self._controller is None else self._controller.share

    @property
    def stall_hidden(self) -> float | None:
        """Return the share of the waiting time spent on drafts that were kept; None without predictions."""
        return _share(self._hidden, self._waited) if self.guesses_tried else None

    @property
    def retrieved_from(self) -> tuple[tuple[str, int], ...]:
        """Return the accepted copied tokens by source, once for each source that offered them."""
        return tuple(self._copied.items())

    @property
    def drafting(self) -> str:
        """Return the draft policy's choice and its reason; "" where everything is drafted, or nothing."""
        return self._drafting()


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
