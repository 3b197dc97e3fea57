"""The server of a gateway: devices speak our own link, and stock servers verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgellm.engine import Model
from edgellm.errors import VocabularyMismatch
from edgellm.rpc.address import Address
from edgellm.rpc.channel import DEFAULT_PORT, check_bindable
from edgellm.rpc.trust.handshake import OfferedModel
from edgellm.rpc.trust.trust import Trust
from edgellm.services.handshake import VerifierInfo
from edgellm.services.server.servers import SessionServer
from edgellm.services.server.verification_service import EventKind, ServerEvent
from edgellm.upstream.gateway.backend import GatewayBackend
from edgellm.upstream.gateway.opening import PoolOpening
from edgellm.upstream.gateway.pool import ServerPool
from edgellm.upstream.opening import UpstreamOptions
from edgellm.upstream.verifier import UpstreamTiming

TIMING = UpstreamTiming(least=1.5)
"""Less than what a device waits at least, so that a server that stalls is noticed, and another one can be asked."""
_WAITING = 128  # requests that wait, beside those that are in flight


class GatewayServer(SessionServer):
    """Answers sessions by the servers of a pool. `start`, then `stop`; both may come from any thread."""

    def __init__(
        self,
        pool: ServerPool,
        text: Model,
        address: Address,
        *,
        max_waiting: int = _WAITING,
        on_event: Callable[[ServerEvent], None] | None = None,
        trust: Trust | None = None,
        opening: PoolOpening | None = None,
    ) -> None:
        """Take over `pool`, and what is still `opening` servers for it; `text` has their vocabulary. The rest as for
        `SessionServer`."""
        self._opening = opening
        self.pool, self.gateway = pool, GatewayBackend(pool)
        super().__init__(
            address, text, self.gateway, max_waiting=max_waiting + pool.places, on_event=on_event, trust=trust
        )

    def close(self) -> None:
        """Look for servers no longer, and close the model, after the server has ended."""
        if self._opening is not None:
            self._opening.close()
        self.text.close()

    def _info(self) -> VerifierInfo:
        vocabulary = self.text.vocabulary
        return VerifierInfo(
            self.pool.name, self.pool.context_length, vocabulary.fingerprint, vocabulary.size, self.pool.identity,
            reports_logprobs=self.pool.reports_logprobs, chat_template=self.text.chat_template_source,
            behind=self.pool.behind,
        )  # fmt: skip

    def _offer(self) -> OfferedModel:
        return OfferedModel("verifier", self.pool.name, 0, self.text.vocabulary.fingerprint, self.pool.behind)


def serve_gateway(
    addresses: Sequence[str],
    model: Path,
    *,
    options: UpstreamOptions | None = None,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    paired_only: bool = False,
    on_event: Callable[[ServerEvent], None] | None = None,
) -> GatewayServer:
    """Open the stock servers at `addresses` and serve them; return the running gateway, which the caller stops. `model`
    is a file with their tokenizer, of which nothing else is read.

    Off loopback, and with `paired_only` everywhere, paired devices alone are answered, by mutual TLS.

    Raises:
        PairingRequired, TrustUnusable, PortTaken, InvalidOption: it is impossible to listen there; raised before any
            server is asked.
        ModelNotFound, ModelCorrupt, ModelUnsupported: the file has no tokenizer.
        VerifierUnreachable, VocabularyMismatch, InvalidOption: a server cannot be used; see `PoolOpening.open`.
    """
    address = Address.of(host, port)
    trust = None if address.loopback and not paired_only else Trust.load()
    if trust is not None:
        trust.require_peers()
    check_bindable(address)

    def news(what: str) -> None:
        if on_event is not None:
            on_event(ServerEvent(EventKind.UPSTREAM, what))

    text = Model.load(model, text_only=True)
    try:
        opening = PoolOpening(text, options or UpstreamOptions(timing=TIMING), news)
        try:
            pool = opening.open(addresses)
        except VocabularyMismatch as error:
            raise VocabularyMismatch(error.what, "Name a model with the server's tokenizer with -m.") from None
        try:
            server = GatewayServer(pool, text, address, on_event=on_event, trust=trust, opening=opening)
            server.start()
        except BaseException:
            opening.close()
            pool.close()
            raise
    except BaseException:
        text.close()
        raise
    return server
