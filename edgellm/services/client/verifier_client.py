"""A verifier on another machine, as the decoding loop sees it."""

from __future__ import annotations

from edgellm.engine import Vocabulary, common_prefix
from edgellm.rpc.address import Address
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.trust import Trust
from edgellm.services.client.connection import Connection, Timing
from edgellm.services.client.verifier_stream import RemotePending, Stream, lost
from edgellm.services.verification_codec import write_open
from edgellm.spec.protocols import Verifier, VerifierSession
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Ids
from edgellm.verifier.requests import VerifyRequest


class RemoteVerifier(Verifier):
    """A verifier asked over the network. It is reconnected in the background when lost, and sessions are rebuilt."""

    def __init__(
        self,
        address: str | Address,
        vocabulary: Vocabulary,
        *,
        timing: Timing | None = None,
        trust: Trust | None = None,
        device: DeviceID | None = None,
    ) -> None:
        """Connect to `HOST:PORT`, for a draft model with this `vocabulary`; with `trust` by mutual TLS to a paired
        device, or to the given `device` only.

        Raises:
            InvalidOption: not an address.
            PairingRequired: the address leaves this machine, and there is no `trust`, or nobody is paired.
            NotPaired, NotPermitted, IdentityClash: it is not a device that trusts this one, and is trusted.
            VerifierUnreachable: nobody answers within two seconds.
            VocabularyMismatch: the two vocabularies differ; names the first differing token.
            ProtocolError: the other side has another version.
        """
        where = Address.parse(address) if isinstance(address, str) else address
        self._connection = Connection(where, vocabulary, timing or Timing(), trust, device)
        self._vocabulary = vocabulary

    @property
    def name(self) -> str:
        return self._connection.peer.model

    @property
    def context_length(self) -> int:
        return self._connection.peer.context_length

    @property
    def model_hash(self) -> str:
        """The SHA-256 of the verifier's model file in hex; empty if the verifier does not tell."""
        return self._connection.peer.model_hash

    def up(self) -> bool:
        """Return whether the verifier is connected and takes requests."""
        return self._connection.ready()

    @property
    def reports_logprobs(self) -> bool:
        """See `Verifier.reports_logprobs`: older verifiers do not."""
        return self._connection.peer.tells

    def open(self, state: GenerationState) -> RemoteSession:
        """See `Verifier.open`. Where the verifier is away by now, the session is not ready, and will be."""
        return RemoteSession(self._connection, self._vocabulary, state)

    def close(self) -> None:
        self._connection.close()


class RemoteSession(VerifierSession):
    """One reply at the verifier: a stream, and the knowledge of which tokens are held at its other end."""

    def __init__(self, connection: Connection, vocabulary: Vocabulary, state: GenerationState) -> None:
        self._connection, self._state, self._vocabulary = connection, state, vocabulary
        self._opening = write_open(state.sampling, vocabulary.fingerprint).SerializeToString()
        self._stream: Stream | None = None
        self._last: RemotePending | None = None
        self._round = 0

    def ready(self) -> bool:
        return self._connection.ready()

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> RemotePending:
        """See `VerifierSession.submit`. A verdict that was not waited for is given up.

        Raises:
            InvalidOption: the chunk was drawn from distributions that cannot be sent.
        """
        stream, held = self._stream, self._last.held() if self._last is not None else None
        if stream is None or stream.over or held is None:  # the other end's tokens are unknown: begin again
            self._end_stream()
            stream, held = Stream(self._connection, self._opening, self._vocabulary.size), NO_IDS
        self._round += 1
        state = self._state
        request = VerifyRequest(0, state.sampling, len(prefix), prefix, chunk, extra, state.logprobs, self._round)
        pending = RemotePending(request, self._connection.alive, state.stopped)
        data = pending.request(common_prefix(held, prefix))
        self._stream, self._last = stream, pending
        if not self._connection.post(stream.send, pending, data):
            pending.fail(lost("The connection to the verifier is closed."))
        return pending

    def close(self) -> None:
        self._end_stream()
        self._last = None

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._connection.post(self._stream.end)
            self._stream = None
