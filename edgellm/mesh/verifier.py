"""A mesh as a verifier: a draft passes all stages in one micro-batch, so one traversal yields several tokens.

The last stage judges it, so that a verdict travels and no logits. What needs the whole text or the vocabulary's
texts (penalties, grammars) and log-probabilities are computed here, from logits that the last stage sends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from edgellm.engine import ShouldStop, common_prefix
from edgellm.errors import ContextFull, DeviceLost, EdgeError, MeshBroken, PlanImpossible, Stopped, VerifierBusy
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import MAX_LOGIT_BYTES, MAX_ROWS, StageAnswer
from edgellm.mesh.pipeline import StageRecord
from edgellm.spec.constraint import GrammarState, ReplyGrammar
from edgellm.spec.guarded_session import wait_for_result
from edgellm.spec.protocols import Verifier, VerifierSession
from edgellm.spec.state import GenerationState
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Ids, Verdict
from edgellm.verifier.engine import cut, judge_pass, verdict
from edgellm.verifier.requests import VerifyRequest


class MeshVerifier(Verifier):
    """See `Verifier`. `mesh` is closed with it."""

    def __init__(
        self, mesh: Mesh, is_eog: Callable[[int], bool], rows: int = MAX_ROWS,
        grammar: Callable[[str], GrammarState] | None = None,
    ) -> None:  # fmt: skip
        """Send prompts through the stages in micro-batches of `rows` rows. `grammar` returns the grammar of a JSON
        schema; without it, replies have no constraint."""
        self.mesh, self.rows = mesh, rows
        self._is_eog, self._grammar = is_eog, grammar

    @property
    def name(self) -> str:
        return self.mesh.work.name

    @property
    def context_length(self) -> int:
        return self.mesh.work.context

    @property
    def model_hash(self) -> str:
        return self.mesh.work.model

    @property
    def reports_logprobs(self) -> bool:
        """See `Verifier.reports_logprobs`."""
        return True

    @property
    def applies_penalties(self) -> bool:
        """See `Verifier.applies_penalties`."""
        return True

    @property
    def applies_grammars(self) -> bool:
        """See `Verifier.applies_grammars`."""
        return self._grammar is not None

    def open(self, state: GenerationState) -> MeshSession:
        """See `Verifier.open`. The stages begin to load now, if they have not. Raises PlanImpossible."""
        self.mesh.pipeline()
        grammar = ReplyGrammar.of(state.sampling.constraint, self._grammar)
        return MeshSession(self.mesh, state, self.rows, self._is_eog, grammar)

    def measured(self, session: int = 0) -> list[StageRecord]:
        """Return the records with every stage's spans since the last call; empty if no pipeline is open."""
        pipeline = self.mesh.current()
        return [] if pipeline is None else pipeline.measured(session)

    def close(self) -> None:
        self.mesh.close()


class MeshSession(VerifierSession):
    """One reply: a sequence in the cache of every stage."""

    def __init__(
        self, mesh: Mesh, state: GenerationState, rows: int, is_eog: Callable[[int], bool],
        grammar: ReplyGrammar | None = None,
    ) -> None:  # fmt: skip
        self._mesh, self._state, self._rows, self._is_eog, self._grammar = mesh, state, rows, is_eog, grammar
        self._judges = (
            state.sampling.penalties is not None or state.sampling.constraint is not None or state.logprobs is not None
        )
        self._slot: int | None = None
        self._closed = False

    def ready(self) -> bool:
        """Return whether the session has a sequence, or one is free: each open session needs one in the stages."""
        return self._slot is not None or self._mesh.free()

    @property
    def should_stop(self) -> ShouldStop:
        """Returns whether the reply was cancelled. Micro-batches that were sent cross the stages all the same."""
        return self._state.should_stop

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> MeshPending:
        """See `VerifierSession.submit`. An earlier verdict that was not waited for is given up."""
        if self._slot is None and not self._closed:
            self._slot = self._mesh.slot(prefix)
        return MeshPending(self, prefix, chunk, extra)

    def send(self, prefix: Ids, chunk: Chunk) -> Future[StageAnswer]:
        """Send the part of `prefix` that the stages lack, and `chunk`.

        Raises PlanImpossible, ContextFull, VerifierBusy or DeviceLost."""
        if self._slot is None:
            if self._closed:
                raise DeviceLost("This session is closed.", "Open another session.")
            n = self._mesh.work.sessions
            raise VerifierBusy(f"The devices hold at most {n} replies at a time, and {n} are open.", "Try again soon.")
        if len(prefix) + len(chunk) > (most := self._mesh.work.context):
            raise ContextFull(
                f"{len(prefix)} tokens and {len(chunk)} drafted ones do not fit the {most} positions of a session.",
                "Shorten the prompt, or open the mesh with a longer context.",
            )
        self._mesh.token_ended(self._slot, prefix, self._rows)
        pipeline, generation = self._mesh.pipeline()
        # a session's micro-batches stay in order: the stages will have earlier ones, even without their verdicts
        start = common_prefix(self._mesh.held(self._slot, generation), prefix[:-1])
        ids = np.concatenate((prefix, chunk.ids)).astype(np.int32)
        self._mesh.record_tokens(self._slot, generation, ids)
        sampling = GREEDY if self._judges else self._state.sampling
        request = VerifyRequest(self._slot, sampling, len(prefix), NO_IDS, chunk, logits=self._judges)
        return pipeline.ask(self._slot, start, ids[start:], request, self._rows)

    def sent(self, chunk: Chunk) -> Chunk:
        """Return the part of a draft that the stages are sent: all of it, or as much as there is room for logits."""
        if not self._judges:
            return chunk
        return cut(chunk, max(0, MAX_LOGIT_BYTES // (4 * self._mesh.work.n_vocab) - 1))[0]

    def judged(self, answer: StageAnswer, prefix: Ids, chunk: Chunk) -> Verdict:
        """Return the last stage's verdict, or this device's from the last stage's logits. Raises EngineFailed."""
        if not self._judges or answer.logits is None:
            return answer.verdict
        state, rows = self._state, answer.logits
        request = VerifyRequest(0, state.sampling, 0, prefix, chunk, logprobs=state.logprobs, grammar=self._grammar)
        request.ids, request.seconds = prefix, answer.verdict.seconds
        judge_pass(request, rows, len(chunk), self._is_eog)
        return verdict(request)

    def confirm(self) -> None:
        """Tell the mesh that a verdict has come, so the pipeline works."""
        self._mesh.confirm()

    def forget(self) -> None:
        """Discard the record of the stages' caches, which is unknown now: the next micro-batches start from the
        beginning."""
        if self._slot is not None:
            self._mesh.record_tokens(self._slot, -1, NO_IDS)

    def ends(self, token: int) -> bool:
        """Return whether a turn ends with this token."""
        return self._is_eog(token)

    def close(self) -> None:
        self._closed = True
        if self._slot is not None:
            self._mesh.release(self._slot)
            self._slot = None


class MeshPending:
    """A verdict on its way through the stages."""

    def __init__(self, session: MeshSession, prefix: Ids, chunk: Chunk, extra: int) -> None:
        self._session, self._prefix, self._chunk, self._extra = session, prefix.copy(), session.sent(chunk), extra
        self._verdict: Verdict | None = None
        self._future: Future[StageAnswer] = Future()
        try:
            self._future = session.send(self._prefix, self._chunk)
        except EdgeError as error:
            self._future.set_exception(error)

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Verdict:
        """Wait for the verdict, over another pipeline if this one is lost.

        Raises:
            MeshBroken: the remaining devices do not hold the model; says what would be needed.
            VerifierBusy: as many replies as the devices hold are open.
            Stopped: the reply was cancelled.
        """
        if self._verdict is None:
            self._verdict = self._further(self._wait(self._future, self._prefix, self._chunk))
        return self._verdict

    def _wait(self, future: Future[StageAnswer], prefix: Ids, chunk: Chunk) -> Verdict:
        """Return the verdict; ask again as long as another pipeline can give it, and once after any other error."""
        refused = 0
        while True:
            try:
                answer = wait_for_result(future, self._session.should_stop)
                found = self._session.judged(answer, prefix, chunk)
                self._session.confirm()
                return found
            except DeviceLost:
                pass  # a pipeline over the others, which hold nothing of this session
            except PlanImpossible as error:
                raise MeshBroken(error.what, error.next_step) from None
            except (Stopped, VerifierBusy):
                raise
            except EdgeError:
                self._session.forget()
                refused += 1
                if refused > 1:
                    raise
            try:
                future = self._session.send(prefix, chunk)
            except (PlanImpossible, DeviceLost) as error:
                raise MeshBroken(error.what, error.next_step) from None

    def _further(self, first: Verdict) -> Verdict:
        """Return a verdict with up to `extra` more tokens, each of which crosses the stages by itself."""
        tokens, seconds, passes, logprobs = first.tokens.tolist(), first.seconds, 1, first.logprobs
        kept = self._chunk.ids[: first.accepted]
        while len(tokens) <= self._extra and not self._session.ends(tokens[-1]):
            prefix = np.concatenate((self._prefix, kept, np.array(tokens, dtype=np.int32)))
            found = self._wait(self._session.send(prefix, _NOTHING), prefix, _NOTHING)
            tokens.append(int(found.tokens[0]))
            seconds, passes, logprobs = seconds + found.seconds, passes + 1, logprobs + found.logprobs
        return replace(first, tokens=np.array(tokens, np.int32), seconds=seconds, passes=passes, logprobs=logprobs)


_NOTHING = Chunk()
