"""Verifiers in other processes: of another device, or a stock server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from edgellm.engine import Model
from edgellm.errors import EdgeError, VocabularyMismatch
from edgellm.llm.model_loading import AUTO, EngineConfig, PairFit, Progress, fit, is_url
from edgellm.spec.model_sampling import ModelSampling, sampling_elsewhere
from edgellm.spec.protocols import Verifier
from edgellm.storage.model_files import Named

if TYPE_CHECKING:
    from edgellm.rpc.address import ModelAddress
    from edgellm.rpc.trust.identity import DeviceID
    from edgellm.rpc.trust.trust import Trust
    from edgellm.services.client.verifier_client import RemoteVerifier

EXTRA_TOKENS = 7  # extra tokens per request that a verifier across a link writes without a draft model


@dataclass(frozen=True, slots=True)
class OpenedVerifier:
    """A verifier in other processes, and a function that returns its model's hash. Across a link, also its `address`, a
    function that returns whether it is `up`, the reason why "auto" chose it ("" if it was named), the `sampling` of
    its model, and the `extra` tokens per request that it writes without a draft model. Stock servers and gateways also
    have a `finding`, how they verify, and `notices` for the user. `text` is the verifier's tokenizer, unless the draft
    model has the same."""

    verifier: Verifier
    model_hash: Callable[[], str]
    address: str = ""
    up: Callable[[], bool] | None = None
    reason: str = ""
    sampling: ModelSampling | None = None
    extra: int = 0
    shared_tokens: int = 0
    finding: str = ""
    notices: tuple[str, ...] = ()
    text: Model | None = None


def remote_verifier(
    where: str, config: EngineConfig, text: Model, closing: ExitStack, progress: Progress | None
) -> OpenedVerifier:
    """Open the verifier at the address `where`, or for "auto" the best of the peers, for drafts in the vocabulary of
    `text`, which renders conversations by the verifier's chat template from now on; or else in the vocabulary of the
    verifier's own tokenizer, which is fetched with `progress`. Off loopback, and for every paired device, the
    connection uses mutual TLS. A URL is that of a stock server.
    """
    if is_url(where):
        # The HTTP client is slow to import, so only a pair that needs it waits.
        from edgellm.upstream.opening import open_upstream

        server = open_upstream(where, text, config.upstream)
        closing.callback(server.verifier.close)
        return OpenedVerifier(
            server.verifier, lambda: server.identity, str(server.url), server.verifier.up, "",
            sampling_behind(server.verifier, text), EXTRA_TOKENS, text.n_vocab, server.finding, server.notices,
        )  # fmt: skip
    # gRPC is slow to import, too.
    from edgellm.rpc.address import ModelAddress
    from edgellm.services.client.verifier_selection import trust_for

    trust: Trust | None
    if where == AUTO:
        address, device, reason, trust = _best_peer(config, text)
    else:
        address, device, reason = ModelAddress.parse(where), None, ""
        trust = trust_for(address.address)
    verifier, its_own = _connected(address, text, trust, device, closing, progress)
    info = verifier.info
    if info.chat_template:
        (its_own or text).use_chat_template(info.chat_template, info.model)
    finding = f"{address} is a gateway to {info.model}, by {info.behind}" if info.behind else ""
    return OpenedVerifier(
        verifier, lambda: verifier.info.model_hash, str(address), verifier.up, reason, info.sampling, EXTRA_TOKENS,
        info.shared_tokens, finding, text=its_own,
    )  # fmt: skip


def _best_peer(config: EngineConfig, text: Model) -> tuple[ModelAddress, DeviceID | None, str, Trust]:
    """Return the best of the paired devices' verifiers for drafts in the vocabulary of `text`, and why."""
    from edgellm.rpc.trust.trust import Trust
    from edgellm.services.client.verifier_client import RemoteVerifier
    from edgellm.services.client.verifier_selection import TokenizerFit, choose_verifier

    trust = Trust.load()

    def fits(address: ModelAddress, device: DeviceID) -> TokenizerFit:
        try:
            RemoteVerifier(address, text.vocabulary, trust=trust, device=device).close()
        except VocabularyMismatch as mismatch:
            return TokenizerFit.TRANSLATED if mismatch.tokenizer else TokenizerFit.NONE
        except EdgeError:
            return TokenizerFit.NONE
        return TokenizerFit.SAME

    chosen = choose_verifier(trust, text.vocabulary.fingerprint, config.peers, fits=fits)
    return chosen.address, chosen.device, chosen.reason, trust


def _connected(
    address: ModelAddress, text: Model, trust: Trust | None, device: DeviceID | None, closing: ExitStack,
    progress: Progress | None,
) -> tuple[RemoteVerifier, Model | None]:  # fmt: skip
    """Return the connected verifier, and its tokenizer if that differs from `text`'s; `closing` owns both."""
    from edgellm.services.client.verifier_client import RemoteVerifier
    from edgellm.services.client.verifier_tokenizer import forget_tokenizer, open_tokenizer, unusable

    def on_wait(doing: str) -> None:
        if progress is not None:
            progress(f"the verifier at {address}, which is {doing}", 0.0)

    its_own: Model | None = None
    try:
        verifier = RemoteVerifier(address, text.vocabulary, trust=trust, device=device, on_wait=on_wait)
    except VocabularyMismatch as mismatch:
        if not (sha256 := mismatch.tokenizer):
            raise
        on_progress = partial(progress, f"the tokenizer of {address}") if progress else None
        its_own = open_tokenizer(address, sha256, trust=trust, device=device, progress=on_progress)
        closing.callback(its_own.close)
        try:
            verifier = RemoteVerifier(address, its_own.vocabulary, trust=trust, device=device)
        except VocabularyMismatch as other:
            forget_tokenizer(sha256)
            raise unusable(address, f"it is not that of its model. {other.what}") from None
    closing.callback(verifier.close)
    return verifier, its_own


def fit_remote(
    draft: Model | None, text: Model, remote: OpenedVerifier, draft_name: Named | None, verifier_name: Named
) -> PairFit:
    """Compare the vocabularies of a draft model, if any, and a verifier across a link, whose tokenizer was named as
    `text`."""
    if remote.text is None:
        return PairFit(remote.shared_tokens if remote.shared_tokens < text.n_vocab else None)
    return PairFit() if draft is None else fit(draft, remote.text, draft_name, verifier_name)


def sampling_behind(verifier: Verifier, text: Model) -> ModelSampling:
    """Return the sampling for a verifier that reports none, as far as the verifier can follow it."""
    return sampling_elsewhere(verifier.capabilities.name, text.file).told_by(verifier.capabilities.choice)
