"""The server of a gateway: devices speak our own link, and stock servers verify, each model by those that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgellm.errors import InvalidOption
from edgellm.rpc.address import Address
from edgellm.rpc.channel import DEFAULT_PORT, check_bindable
from edgellm.rpc.trust.trust import Trust
from edgellm.services.handshake import VerifierInfo
from edgellm.services.server.servers import SessionServer, positive
from edgellm.services.server.verification_service import EventKind, ServerEvent
from edgellm.services.server.verifying_model import VerifyingModel
from edgellm.upstream.gateway.backend import GatewayBackend
from edgellm.upstream.gateway.opening import GatewayModel, PoolOpening
from edgellm.upstream.opening import UpstreamOptions
from edgellm.upstream.verifier import UpstreamTiming

TIMING = UpstreamTiming(least=1.5)
"""Less than what a device waits at least, so that a server that stalls is noticed, and another one can be asked."""
_WAITING = 128  # requests for a model that wait, beside those that are in flight


class GatewayServer(SessionServer):
    """Answers sessions of each model by its servers. `start`, then `stop`; both may come from any thread."""

    def __init__(
        self,
        models: Sequence[GatewayModel],
        address: Address,
        *,
        max_waiting: int = _WAITING,
        on_event: Callable[[ServerEvent], None] | None = None,
        trust: Trust | None = None,
        opening: PoolOpening | None = None,
    ) -> None:
        """Take over `models`, at least one, and what is still `opening` servers for them. Beyond `max_waiting` requests
        that wait, a model's further ones are sent back. The rest as for `SessionServer`."""
        super().__init__(address, on_event, trust)
        self.models, self._opening = tuple(models), opening
        self.backends = tuple(GatewayBackend(model.pool) for model in models)
        self._max_waiting = positive("max_waiting", max_waiting)

    def close(self) -> None:
        """Look for servers no longer, and close the tokenizers, after the server has ended."""
        if self._opening is not None:
            self._opening.close()
        for model in self.models:
            model.text.close()

    def verifying(self) -> Sequence[VerifyingModel]:
        """See `SessionServer.verifying`."""
        waiting = self._max_waiting
        return [
            VerifyingModel(_info(model), model.text.vocabulary, backend, waiting + model.pool.places)
            for model, backend in zip(self.models, self.backends, strict=True)
        ]


def _info(model: GatewayModel) -> VerifierInfo:
    vocabulary, pool = model.text.vocabulary, model.pool
    return VerifierInfo(
        pool.name, pool.context_length, vocabulary.fingerprint, vocabulary.size, pool.identity,
        reports_logprobs=pool.reports_logprobs, chat_template=model.text.chat_template_source, behind=pool.behind,
    )  # fmt: skip


def serve_gateway(
    addresses: Sequence[str],
    tokenizers: Path | Sequence[Path],
    *,
    options: UpstreamOptions | None = None,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    paired_only: bool = False,
    on_event: Callable[[ServerEvent], None] | None = None,
) -> GatewayServer:
    """Open the stock servers at `addresses` and serve their models; return the running gateway, which the caller stops.
    `tokenizers` are files with the tokenizers of the models, of which nothing else is read.

    Off loopback, and with `paired_only` everywhere, paired devices alone are answered, by mutual TLS.

    Raises:
        PairingRequired, TrustUnusable, PortTaken, InvalidOption: it is impossible to listen there; raised before any
            server is asked.
        ModelNotFound, ModelCorrupt, ModelUnsupported: a file has no tokenizer.
        VerifierUnreachable, VocabularyMismatch, InvalidOption: a server cannot be used; see `PoolOpening.open`.
    """
    files = [tokenizers] if isinstance(tokenizers, Path) else list(tokenizers)
    if not files:
        raise InvalidOption("A gateway needs a model with the server's tokenizer.", "Give at least one.")
    address = Address.of(host, port)
    trust = None if address.loopback and not paired_only else Trust.load()
    if trust is not None:
        trust.require_peers()
    check_bindable(address)

    def news(what: str) -> None:
        if on_event is not None:
            on_event(ServerEvent(EventKind.UPSTREAM, what))

    opening = PoolOpening(files, options or UpstreamOptions(timing=TIMING), news)
    models = opening.open(addresses)
    try:
        server = GatewayServer(models, address, on_event=on_event, trust=trust, opening=opening)
        server.start()
    except BaseException:
        opening.close()
        for model in models:
            model.close()
        raise
    return server
