"""The server of a gateway: devices speak our own protocol, and each model's stock servers verify."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from edgellm.errors import InvalidOption
from edgellm.rpc.address import Address
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.listener import Listening, Notify, tell_nobody
from edgellm.services.server.servers import SessionServer
from edgellm.services.server.verification_service import MAX_WAITING, VerifyingModel
from edgellm.spec.sampling import sampling_elsewhere
from edgellm.upstream.gateway.backend import GatewayBackend
from edgellm.upstream.gateway.opening import PoolOpening
from edgellm.upstream.verifier import UpstreamOptions
from edgellm.verifier.worker import ColocatedVerifier

LEAST = 1.5
"""The seconds of a verdict's least deadline: shorter than a device's least wait, so that another server can be asked in
place of one that stalls."""


Watcher: TypeAlias = Callable[[GatewayBackend, ColocatedVerifier], None]
"""Called with a model behind a gateway, and its servers as a verifier."""


class GatewayServer(SessionServer):
    """Answers sessions of each model by its servers. `start`, then `stop`; both may come from any thread."""

    def __init__(
        self, models: Sequence[GatewayBackend], address: Address, *, on_event: Notify = tell_nobody,
        trust: Trust | None = None, opening: PoolOpening | None = None,
    ) -> None:  # fmt: skip
        """Take over `models`, and the `opening` of further servers, by default of none. The rest as for
        `SessionServer`."""
        super().__init__(address, on_event, trust)
        self.opening = opening or PoolOpening(())
        self.models: tuple[GatewayBackend, ...] = ()
        self._watchers: list[Watcher] = []
        self._lock, self._closed = threading.Lock(), False  # the lock is held while models are added
        for model in models:
            self.add(model)

    def add(self, model: GatewayBackend) -> None:
        with self._lock:
            if self._closed:
                model.dispose()
                return
            able = model.capabilities
            sampling = sampling_elsewhere(able.name, model.text.file).told_by(able.choice)
            waiting = MAX_WAITING + model.places  # besides requests in flight
            known = model.elsewhere.model_hash()
            verifying = VerifyingModel(model.text, model, able, sampling, known, waiting, behind=model.behind)
            self.serve(verifying)
            self.models = (*self.models, model)
            for watcher in self._watchers:
                watcher(model, verifying.inside())

    def watch(self, now: Watcher, later: Watcher) -> None:
        """Call `now` with each model that is served, and have `later` called, from another thread, with each that is
        added."""
        with self._lock:
            for model, verifying in zip(self.models, self._service.models, strict=True):
                now(model, verifying.inside())
            self._watchers.append(later)

    def close(self) -> None:
        """Look for servers no longer, and close the tokenizers, after the server has ended."""
        self.opening.close()
        with self._lock:
            self._closed = True
        for model in self.models:
            model.dispose()


def serve_gateway(
    addresses: Sequence[str],
    tokenizers: Sequence[Path],
    where: Listening = Listening(),
    options: UpstreamOptions | None = None,
) -> GatewayServer:
    """Open the stock servers at `addresses` and serve their models; return the running gateway, which the caller stops.
    Servers that do not answer are used, and their models served, as soon as they do, even if none does at first.
    `tokenizers` are files of which only the models' tokenizers are read. Raises PairingRequired, TrustUnusable,
    PortTaken, InvalidOption: it is impossible to listen there; raised before any server is asked; ModelNotFound,
    ModelCorrupt, ModelUnsupported: a file has no tokenizer; VocabularyMismatch, InvalidOption: a server cannot be used;
    see `PoolOpening.open`."""
    if not tokenizers:
        raise InvalidOption("A gateway needs a model with the server's tokenizer.", "Give at least one.")
    address, trust = where.checked()
    opening = PoolOpening(tokenizers, options or UpstreamOptions(least=LEAST), where.on_event)
    server = GatewayServer(opening.open(addresses), address, on_event=where.on_event, trust=trust, opening=opening)
    try:
        server.start()
    except BaseException:
        server.close()
        raise
    opening.look(server.add)
    return server
