"""A reply's statistics, counted while it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

from edgellm.spec.drafters.verdict_prediction import PredictionStats
from edgellm.spec.gates.rules import BudgetController
from edgellm.spec.types import UNVERIFIED, Channel, Round, Source, Summary, Token, TryingCost

_VERIFIED_SOURCES = frozenset(Source) - UNVERIFIED
_ACCEPTED_SOURCES = frozenset({Source.ACCEPTED, Source.RETRIEVED})


class Stats:
    """The loop's counters. The clock starts on creation; `prepared` seconds went into the request before that."""

    def __init__(self, prepared: float = 0.0) -> None:
        self.started = perf_counter() - prepared
        self.pieces: list[bytes] = []  # bytes of the answer
        self.thoughts: list[bytes] = []
        self.ids: list[int] = []  # ids, the last token of a turn included
        self.finish_reason = "cancelled"  # default, if the loop never finishes
        self.ttft: float | None = None
        self.seconds = 0.0
        self.tokens = self.thinking_tokens = self.first_burst = self.rounds = self.drafted = self.from_verifier = 0
        self.chunks = self.chunks_thinking = self.verified_thinking = self.thinking_from_verifier = 0
        self.verified = self.tested = self.accepted = self.accepted_whole = self.acceptance_length = 0
        self.passes = self.bytes_up = self.bytes_down = self.exits = self.from_context = 0
        self.waited = self.waited_drafted = 0.0  # seconds for verdicts on all chunks, and on the draft model's
        self.verified_drafted = 0
        self.guessed: PredictionStats | None = None
        self.copied: dict[str, int] = {}
        self.retrieved = 0
        self.accepted_at: list[int] = []
        self.link_waits: list[float] = []  # seconds of each wait across a link in which the verifier did not compute
        self.stopped_by = ""
        self.controller: BudgetController | None = None
        self.trying: Callable[[], TryingCost | None] = _unaccounted

    def count_with(
        self,
        controller: BudgetController | None = None,
        guessed: PredictionStats | None = None,
        copied: dict[str, int] | None = None,
        trying: Callable[[], TryingCost | None] | None = None,
    ) -> None:
        """Also report statistics kept elsewhere: the budget controller, the predicted verdicts, accepted copies by
        source, and the cost of trying."""
        self.controller, self.guessed, self.copied = controller, guessed, copied if copied is not None else {}
        self.trying = trying or _unaccounted

    @property
    def verdict_seconds(self) -> float | None:
        """Return the mean wait in seconds for the verdict on a drafted chunk; None without verdicts."""
        return self.waited_drafted / self.verified_drafted if self.verified_drafted else None

    def observe(self, turn: Round, channel: Channel) -> None:
        """Observe a finished round, whose tokens are about to be yielded; it began in `channel`."""
        chunk, verdict, thinks = turn.chunk, turn.verdict, channel is Channel.THINKING
        self.rounds += 1
        if self.ttft is None:
            self.ttft = turn.answered - self.started
        else:
            self.seconds += turn.seconds
        n = len(chunk)
        self.drafted += n
        self.chunks += n > 0
        self.chunks_thinking += n > 0 and thinks
        self.exits += sum(layer is not None for layer in chunk.exit_layers or ())
        self.from_context += chunk.from_context
        if verdict is None:
            return
        self.passes += verdict.passes
        self.bytes_up += verdict.bytes_up
        self.bytes_down += verdict.bytes_down
        if verdict.bytes_up:
            self.link_waits.append(max(0.0, turn.waiting - verdict.seconds))
        if n:
            self.waited += turn.waiting
            if not chunk.retrieved:
                self.waited_drafted += turn.waiting
                self.verified_drafted += 1
            self.verified += 1
            self.verified_thinking += thinks
            self.tested += min(verdict.accepted + 1, n)
            self.accepted += verdict.accepted
            self.accepted_whole += verdict.accepted == n
            self.acceptance_length += verdict.accepted + 1
            self.accepted_at += [0] * (verdict.accepted - len(self.accepted_at))
            for place in range(verdict.accepted):
                self.accepted_at[place] += 1

    def token(self, token: Token) -> None:
        """Count `token`, which the round has written."""
        self.tokens += 1
        self.ids.append(token.id)
        self.from_verifier += token.source in _VERIFIED_SOURCES
        self.retrieved += token.source is Source.RETRIEVED
        self.first_burst += token.round == 0

    def show(self, token: Token) -> None:
        """Add the text of `token`, which is about to be yielded."""
        if token.channel is Channel.THINKING:
            self.thoughts.append(token.piece)
            self.thinking_tokens += 1
            self.thinking_from_verifier += token.source in _VERIFIED_SOURCES
        else:
            self.pieces.append(token.piece)

    def insert(self, ids: Sequence[int]) -> None:
        """Add tokens that no model wrote, and that are not yielded."""
        self.ids += ids

    def finish(self, reason: str) -> None:
        """Record the `Summary.finish_reason`."""
        self.finish_reason = reason

    def stop(self, token: int, source: Source) -> None:
        """Record that `token` from `source` ended the turn. No bonus follows an accepted token then."""
        self.finish_reason = "stop"
        self.ids.append(token)
        self.acceptance_length -= source in _ACCEPTED_SOURCES

    def cut(self, count: int, by: str) -> None:
        """End the reply and drop its last `count` bytes, which begin with the stop sequence `by`; "" is the head of
        another turn."""
        text = b"".join(self.pieces)
        self.pieces = [text[: len(text) - count]]
        self.finish_reason, self.stopped_by = "stop", by

    def _shares_verified(self) -> tuple[float | None, float | None]:
        """Return the verified shares of the thought and of the answer; both None without a thought or a verdict."""
        answered = self.tokens - self.thinking_tokens
        if not (self.thinking_tokens and self.passes):
            return None, None
        in_answer = self.from_verifier - self.thinking_from_verifier
        return self.thinking_from_verifier / self.thinking_tokens, in_answer / answered if answered else None

    def summary(self, prompt_tokens: int, seed: int = 0) -> Summary:
        """Return the figures so far."""
        n = self.tokens
        guessed = self.guessed or PredictionStats()
        in_thought, in_answer = self._shares_verified()
        later = n - self.first_burst  # The first round's tokens belong to the time to the first token.
        return Summary(
            text=b"".join(self.pieces).decode("utf-8", errors="replace"),
            prompt_tokens=prompt_tokens,
            tokens=n,
            ttft_ms=self.ttft * 1e3 if self.ttft is not None and n else None,
            tokens_per_second=later / self.seconds if later and self.seconds else None,
            share_verified=self.from_verifier / n if n and self.passes else None,
            acceptance_rate=self.accepted / self.tested if self.tested else None,
            mean_acceptance_length=self.acceptance_length / self.verified if self.verified else None,
            verifier_passes_per_token=self.passes / n if n else None,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            finish_reason=self.finish_reason,
            rounds=self.rounds,
            chunks_verified=self.verified,
            chunks_accepted_whole=self.accepted_whole,
            drafted=self.drafted,
            seed=seed,
            share_offloaded=self.controller.share if self.controller is not None else None,
            bytes_per_chunk=(self.bytes_up + self.bytes_down) / self.verified
            if self.bytes_up and self.verified
            else None,
            guesses_tried=guessed.tries,
            guesses_hit=guessed.hits,
            stall_hidden=guessed.hidden_seconds / self.waited if guessed.tries and self.waited else None,
            exits=self.exits,
            from_context=self.from_context,
            retrieved=self.retrieved,
            retrieved_from=tuple(self.copied.items()),
            tested=self.tested,
            accepted=self.accepted,
            accepted_at=tuple(self.accepted_at),
            rtt_ms=median(self.link_waits) * 1e3 if self.link_waits else None,
            stopped_by=self.stopped_by,
            seconds_decoding=self.seconds,
            first_at=self.started + self.ttft if self.ttft is not None and n else None,
            thinking=b"".join(self.thoughts).decode("utf-8", errors="replace").rstrip(),
            thinking_tokens=self.thinking_tokens,
            chunks=self.chunks,
            chunks_thinking=self.chunks_thinking,
            chunks_verified_thinking=self.verified_thinking,
            share_verified_thinking=in_thought,
            share_verified_answer=in_answer,
            trying=self.trying(),
        )


def _unaccounted() -> None:
    return None
