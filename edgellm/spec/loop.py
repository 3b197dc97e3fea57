"""The decoding loop: draft, gate, verify, merge (Synera, sections 3.1 and 4.2)."""

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from time import perf_counter, sleep
from typing import Protocol, TypeAlias

from edgellm.errors import (
    SAME_VERSION,
    EdgeError,
    MeshBroken,
    ProtocolError,
    Stopped,
    VerifierBusy,
    VerifierLost,
    VerifierSlow,
    VerifierUnavailable,
)
from edgellm.isolation.child import POLL_SECONDS
from edgellm.spec.protocols import Ahead, Drafter, Gate, GenerationState, Session, Verifier
from edgellm.spec.stats import Summary
from edgellm.spec.stream import ChannelSplitter
from edgellm.spec.types import (
    NO_CHUNK,
    Channel,
    Chunk,
    Decision,
    Drafted,
    Event,
    Explanation,
    Notice,
    Round,
    Source,
    Token,
    Verdict,
)

Piece: TypeAlias = Callable[[int], bytes]
_UNDRAFTED = Decision(True, "nothing was drafted")
_NEEDS_VERDICT = Decision(True, "nothing of this draft may stand without a verdict")


LOST = Notice("The verifier is gone. The draft model continues alone, and its tokens are not verified.")
SLOW = Notice("The verifier takes too long. The draft model continues alone, and its tokens are not verified.")
BACK = Notice("The verifier is back. Drafts are verified again.")
FREE = Notice("The verifier is no longer busy. Drafts are verified again.")

_NO_VERIFIER = Decision(False, "there is no verifier")
_AWAY, _BUSY = Decision(False, "the verifier is away"), Decision(False, "the verifier is busy")


def _gone() -> VerifierLost:
    return VerifierLost(
        "The verifier is gone, and there is no draft model to continue with.",
        "Start the verifier again, or add a draft model.",
    )


class Verification:
    """The verdicts of one reply, with the losses and returns of the verifier turned into notices."""

    busy_limit = 300.0  # seconds that a reply without a draft model waits for a verdict
    _retry_seconds = 10.0  # seconds that a verifier which was too slow counts as busy
    _max_slow = 3  # late verdicts in a row before giving up without a draft model

    def __init__(
        self, state: GenerationState, session: Session | None, *, needs_verdict: bool = False, reads_ahead: bool = False
    ) -> None:
        """Use `session`; None: there is no verifier. `needs_verdict` as the drafter's: no reply without the verifier.
        `reads_ahead`: the verifier starts to read the prompt at once, while the draft model here reads it, too."""
        self._state, self._session, self._needs_verdict = state, session, needs_verdict
        self._error: VerifierUnavailable | None = None  # why the verifier is away or busy
        self._slow_verdicts = 0  # consecutive verdicts that were too late
        # Seconds waited for a busy verifier since the last verdict, by polls: clocks also run while the device sleeps.
        self._waited = 0.0
        self._notices: list[Notice] = []
        self._prefill: Future[Verdict] | None = None
        if reads_ahead and session is not None and session.ready():
            with suppress(VerifierUnavailable):  # The first verdict will raise the error.
                self._prefill = session.submit(state.ids, NO_CHUNK)

    def unavailable(self) -> Decision | None:
        """Return why no verdict can be asked for now: the verifier is missing, away or busy."""
        if self._session is None:
            return _NO_VERIFIER
        if self._session.ready():
            return None
        if self._error is None:
            prefill, self._prefill = self._prefill, None
            refused = prefill.exception() if prefill and prefill.done() and not prefill.cancelled() else None
            self._handle(refused if isinstance(refused, VerifierBusy) else _gone())
        return _BUSY if isinstance(self._error, VerifierBusy) else _AWAY

    def verify(self, chunk: Chunk, ahead: Ahead) -> Verdict | None:
        """Return the verdict on `chunk`, or None if the verifier is unavailable; `ahead` drafts meanwhile. Without a
        draft model's draft, extra tokens are asked for, as many as there is room for."""
        session, state = self._session, self._state
        if session is None:
            return None
        model_drafted_nothing = chunk.retrieved or not len(chunk)
        extra = max(0, min(state.limits.extra, state.tokens_left - 1)) if model_drafted_nothing else 0
        try:
            prefill, self._prefill = self._prefill, None
            if prefill is not None and len(chunk):
                ahead(chunk, until=prefill.done)
            before = None if prefill is None else session.wait(prefill)
            pending = session.submit(state.ids, chunk, extra)
            if len(chunk):
                ahead(chunk, until=pending.done)
            verdict = session.wait(pending)
        except (VerifierBusy, VerifierLost) as error:
            self._handle(error)
            return None
        if before is not None:
            up, down = verdict.bytes_up + before.bytes_up, verdict.bytes_down + before.bytes_down
            verdict = replace(verdict, bytes_up=up, bytes_down=down, cached=before.cached)
        if self._error is not None:  # Not before a verdict: a `ready` verifier may still refuse.
            self._notify(FREE if isinstance(self._error, VerifierBusy) else BACK)
        self._error, self._slow_verdicts, self._waited = None, 0, 0.0
        return verdict

    def _handle(self, error: VerifierBusy | VerifierLost) -> None:
        """Note that the verifier is unavailable. A slow one is asked again later if nothing else can write."""
        was_lost, self._error = isinstance(self._error, VerifierLost), error
        if isinstance(error, VerifierBusy):
            then = "The reply waits for it" if self._needs_verdict else "The draft model continues alone, unverified"
            self._notices.append(Notice(f"The verifier is busy for about {error.seconds:.1f} seconds. {then}."))
            return
        if isinstance(error, VerifierSlow):
            self._slow_verdicts += 1
            if self._needs_verdict and self._slow_verdicts < self._max_slow:
                self._error = VerifierBusy(error.what, error.next_step, self._retry_seconds)
        if not was_lost:
            self._notify(SLOW if isinstance(error, VerifierSlow) else LOST)

    def _notify(self, news: Notice) -> None:
        if not self._needs_verdict:  # Else an error ends the reply.
            self._notices.append(news)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices since the last call."""
        while self._notices:
            yield self._notices.pop(0)

    def wait_until_ready(self, verdict: Verdict | None) -> Generator[Notice, None, bool]:
        """Wait for a busy verifier after a round without a token. Return True if another round may bring one, False if
        there was no verifier to ask."""
        if verdict is not None:
            raise ProtocolError("The verifier's answer contains no token.", SAME_VERSION)
        if isinstance(self._error, VerifierBusy):
            yield from self.notices()
            if self._waited > self.busy_limit:
                raise VerifierLost(
                    f"The verifier has been busy for {self._waited:.0f} seconds, and there is no draft model.",
                    "Try again later, use another verifier, or add a draft model.",
                )
            end = self._waited + 1.5 * self._error.seconds + 1.0
            while self._waited < end:
                sleep(POLL_SECONDS)
                self._waited += POLL_SECONDS
                if self._state.should_stop() or self._session is None or self._session.ready():
                    return True
            self._error = _gone()
        if self._error is not None:
            raise self._error if isinstance(self._error, MeshBroken | VerifierSlow) else _gone()
        return False

    def close(self) -> None:
        """End the reply at the verifier."""
        if self._session is not None:
            self._session.close()


class Detokenizer(Protocol):
    """The loop's view of tokens, which a model provides."""

    def piece(self, token: int) -> bytes: ...

    def is_eog(self, token: int) -> bool: ...


class NoDrafter(Drafter):
    """A drafter that drafts nothing: the verifier writes alone."""

    needs_verdict = True

    def propose(self, state: GenerationState, gamma: int) -> Chunk:  # noqa: ARG002
        """Return an empty chunk."""
        return NO_CHUNK


def generate(
    state: GenerationState, *, vocabulary: Detokenizer, drafter: Drafter | None, gate: Gate, verifier: Verifier | None,
    stats: Summary, reads_ahead: bool = False, channels: ChannelSplitter | None = None,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply to the prompt of `state`, token by token, without the token that ends the turn.

    Without a drafter the verifier writes alone, without a verifier the draft model. `reads_ahead`: the verifier starts
    to read the prompt at once, not with the first verdict. `stats` is updated on the way. `channels` tells thoughts
    from the answer, and removes the markup. The iterator may be closed at any point; `state.should_stop` is polled
    between tokens and during long computations. Without a draft model, a busy verifier is waited for.

    Raises VerifierUnreachable, VocabularyMismatch: from opening the session, before the first token; VerifierLost: the
    verifier is gone, and there is no draft model to continue with; Stopped: `state.should_stop` returned True.
    """
    channels = channels or ChannelSplitter()
    events = _rounds(state, vocabulary, drafter or NoDrafter(), gate, verifier, stats, reads_ahead=reads_ahead)
    try:
        for event in events:
            if not isinstance(event, Token):
                yield event
                continue
            yield from _shown(channels.feed(event), stats)
            if channels.channel is not state.channel:
                state.enter(channels.channel)
            if state.should_stop():
                return
    except Stopped:
        raise
    except EdgeError:  # A lost verifier must not lose tokens.
        yield from _shown(channels.end(), stats)
        raise
    finally:
        events.close()
    yield from _shown(channels.end(), stats)


def _shown(tokens: Iterator[Token], stats: Summary) -> Iterator[Token]:
    for token in tokens:
        stats.show(token)
        yield token


def _rounds(
    state: GenerationState, vocabulary: Detokenizer, drafter: Drafter, gate: Gate, verifier: Verifier | None,
    stats: Summary, *, reads_ahead: bool,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply as `generate` does, in one channel."""
    session = None if verifier is None else verifier.open(state)
    verification = Verification(state, session, needs_verdict=drafter.needs_verdict, reads_ahead=reads_ahead)
    ahead = partial(drafter.look_ahead, state, gamma=state.limits.gamma)
    try:
        drafter.begin(state)
        for number in count(stats.rounds):
            if state.should_stop():
                return
            if not state.tokens_left:
                yield from _finish_full(state, stats)
                return
            gamma, began = min(state.limits.gamma, state.tokens_left), perf_counter()
            chunk = _drafted(state, drafter, gamma)
            decision = verification.unavailable() or _decide(state, chunk, drafter, gate, stats)
            asked = perf_counter()
            verdict = verification.verify(chunk, ahead) if decision.offload else None
            if verdict is None:
                chunk = drafter.unverified(state, chunk, gamma)
            new_tokens = merge(chunk, verdict, number, vocabulary.piece)
            turn = Round(number, chunk, decision, verdict, began, asked, perf_counter())
            stats.observe(turn, state.channel)
            drafter.observe(state, turn)
            gate.observe(state, turn)
            if not new_tokens:
                if (yield from verification.wait_until_ready(verdict)):
                    continue
                stats.finish("stop")
                return
            yield from verification.notices()
            if state.explain:
                yield Explanation(number, _explanation(turn))
            for new in new_tokens:
                if not state.tokens_left:
                    break
                if vocabulary.is_eog(new.id):
                    stats.stop(new.id, new.source)
                    return
                state.append(new.id)
                stats.token(new)
                yield new
    finally:
        drafter.end()
        verification.close()


def _drafted(state: GenerationState, drafter: Drafter, gamma: int) -> Chunk:
    """Return a draft, as far as it follows the grammar: copies and translated drafts may not."""
    chunk = drafter.propose(state, gamma)
    if state.rules.grammar is None:
        return chunk
    n = state.rules.grammar.follows(state.ids, chunk.ids)
    return chunk.part(0, n) if n else NO_CHUNK


def _decide(state: GenerationState, chunk: Chunk, drafter: Drafter, gate: Gate, stats: Summary) -> Decision:
    if not len(chunk):
        return _UNDRAFTED
    if drafter.needs_verdict:
        return _NEEDS_VERDICT
    decision = gate.decide(state, chunk)
    stats.decide(decision)
    return decision


def merge(chunk: Chunk, verdict: Verdict | None, number: int = 0, piece: Piece = lambda _: b"") -> list[Token]:
    """Return the new tokens of a round. Without a verdict the drafts stay."""
    n = len(chunk)
    kept = n if verdict is None else verdict.accepted
    drafted = chunk.drafted or (Drafted(),) * n
    facts = zip(chunk.ids.tolist(), chunk.confidence.tolist() or [None] * n, drafted, strict=True)
    logprobs = iter(() if verdict is None else verdict.logprobs)
    found = []
    for at, (token, confidence, known) in enumerate(islice(facts, kept)):
        if verdict is None:
            source = Source.PARALLEL if at < chunk.ahead else Source.DRAFT
        else:
            source = Source.RETRIEVED if chunk.retrieved or at >= n - chunk.tail else Source.ACCEPTED
        probs = next(logprobs, None)
        found.append(Token(token, piece(token), source, confidence, known.importance, known.exit_layer, number, probs))
    own = Source.VERIFIER if not n else Source.CORRECTED if kept < n else Source.BONUS
    for token in () if verdict is None else verdict.tokens.tolist():
        found.append(Token(token, piece(token), own, round=number, logprobs=next(logprobs, None)))
        own = Source.VERIFIER
    return found


def _finish_full(state: GenerationState, stats: Summary) -> Iterator[Notice]:
    """Finish the reply because no room is left."""
    thinking = state.channel is Channel.THINKING
    full = len(state.ids) >= state.limits.context and (thinking or state.answered < state.limits.max_tokens)
    stats.finish("length", context_full=full)
    if full:
        yield Notice(f"The context of {state.limits.context} tokens is full: the reply ends here.")


def _explanation(turn: Round) -> str:
    chunk, decision, verdict = turn.chunk, turn.decision, turn.verdict
    drafted = f"{'retrieved' if chunk.retrieved else 'drafted'} {len(chunk)}"
    if chunk.reason:
        drafted += f" ({chunk.reason})"
    elif len(chunk.confidence):
        drafted += f" (mean confidence {float(chunk.confidence.mean()):.2f})"
    if chunk.from_context:
        drafted += f", {chunk.from_context} of them taken from the context"
    if not decision.offload:
        return f"{drafted}, kept unverified: {decision.reason}"
    if verdict is None:
        return f"{drafted}, sent to the verifier ({decision.reason}), and no verdict came: kept unverified"
    return (
        f"{drafted}, sent to the verifier ({decision.reason}): it accepted {verdict.accepted}, wrote"
        f" {len(verdict.tokens)}, and took {verdict.seconds * 1e3:.1f} ms"
    )
