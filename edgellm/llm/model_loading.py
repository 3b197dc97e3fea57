"""From names to models and verifiers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from edgellm.engine import Model, ModelFile
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.engine.memory_fit import LEAST_CONTEXT, Placed, as_many_as_fit, check_context, free_memory, place_model
from edgellm.engine.model import is_eagle3
from edgellm.errors import InvalidOption, MemoryShort, ModelUnsupported, VocabularyMismatch
from edgellm.spec.params import mechanism
from edgellm.spec.protocols import Elsewhere, Verifier
from edgellm.storage.model_files import DEFAULT, Named, is_url

if TYPE_CHECKING:
    from edgellm.services.client.verifier_client import RemoteVerifier
    from edgellm.services.client.verifier_selection import Chosen
    from edgellm.spec.drafters.translation import TokenTranslation
    from edgellm.upstream.verifier import UpstreamOptions

AUTO = "auto"
CACHE_SHARE = 0.25
"""Largest share of the free memory for contexts of more than two replies, where fewer will do (`fewer_replies`)."""

Progress: TypeAlias = Callable[[str, float], None]

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}(#.+)?")


def is_remote(verifier: Named) -> bool:
    """Return whether `verifier` is in another process: a `HOST:PORT[#MODEL]`, a stock server's URL, or "auto"."""
    return verifier == AUTO or is_address(verifier) or is_url(verifier)


def is_address(verifier: Named) -> bool:
    """Return whether `verifier` is a `HOST:PORT[#MODEL]`, and not a file."""
    return isinstance(verifier, str) and _ADDRESS.fullmatch(verifier) is not None and not Path(verifier).exists()


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The models that an engine opens, and their settings.

    A model is a path, an alias or `user/repo:quant`. The default pair is SmolLM2 and its draft model where they are on
    this machine; nothing is downloaded. Else, and with EDGELLM_PAIR=home, it is the bundled home pair. A default that
    has another tokenizer than the named model is left out. None or "none" leaves a model out. In place of the draft
    model, an EAGLE-3 head drafts from the states of a verifier in this process.

    The verifier may also be the `HOST:PORT[#MODEL]` of a served verifier, or "auto" for the best of the paired devices
    (of `peers`, if any, given as names, IDs or `HOST:PORT`, followed by `#MODEL` to choose among several models). Or
    it is the URL of a stock server such as vLLM or llama-server, with the settings `upstream`. If the tokenizers
    differ, drafts are translated, and all of them are verified; a verifier on another device sends its tokenizer once,
    which is kept. Stock servers need the draft model's tokenizer. `tokenizer` names the model whose
    vocabulary and template are used if neither model is in this process.

    `profile` is a file from `edgellm profile`; by default the pair's own is found by the hashes of its models. `n_ctx`
    limits prompt and reply together, in tokens. `hardware` is for the verifier, or the only model; `draft_hardware` for
    the draft model, by default the same. Unless these give the number of layers on graphics cards, as many layers as
    fit go there, the verifier's first. `threads` holds for both. Without `history`, and while `edgellm history` is
    off, nothing derived from prompts is written to disk. `beside` are bytes by device that other models take though
    the system counts them as free. Memory is reserved for `replies` at once, with `fewer_replies` for as many as fit.
    When the engine is closed, the models' cached prompts are saved to disk, in at most `prompt_cache` bytes for all
    models, so that a later process need not read the same prefix again; but not without `history`.
    """

    draft: Named | None = DEFAULT
    verifier: Named | None = DEFAULT
    tokenizer: Named = DEFAULT
    profile: Path | None = None
    n_ctx: int | None = None
    threads: int | None = None
    hardware: Hardware = ON_PROCESSOR
    draft_hardware: Hardware | None = None
    peers: Sequence[str] = ()
    history: bool = True
    beside: Mapping[str, int] | None = None
    upstream: UpstreamOptions | None = None
    replies: int = 1
    fewer_replies: bool = False
    prompt_cache: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidOption if both models are left out, or a number is not positive."""
        if named(self.draft) is None and named(self.verifier) is None:
            raise InvalidOption("Both the draft model and the verifier are 'none'.", "Give at least one of the two.")
        for name, value in (("n_ctx", self.n_ctx), ("replies", self.replies)):
            if value is not None and value < 1:
                raise InvalidOption(f"{name} is {value}.", "Give a whole number of at least 1.")

    def computing(self, hardware: Hardware | None) -> Hardware:
        """Return `hardware`, by default the verifier's, with the length of the context."""
        chosen = hardware or self.hardware
        return chosen if self.n_ctx is None else replace(chosen, n_ctx=self.n_ctx)


@dataclass(frozen=True, slots=True)
class PairFit:
    """A comparison of a draft model's vocabulary with its verifier's.

    `shared_tokens` is the id below which both have tokens, if their numbers of unused tokens differ. With a
    `translation` the tokenizers differ. `left_out`, "draft" or "verifier", is a default with another tokenizer than
    the named model; `notice` says so.
    """

    shared_tokens: int | None = None
    translation: TokenTranslation | None = None
    left_out: str = ""
    notice: str = ""


def fit(draft: Model, verifier: Model, draft_name: Named | None, verifier_name: Named | None) -> PairFit:
    """Compare the vocabularies of two models that were asked for by these names, or by `DEFAULT`."""
    if draft.has_tokenizer_of(verifier):
        return PairFit()
    if draft.vocabulary.different(verifier.vocabulary) is None:
        return PairFit(min(draft.n_vocab, verifier.n_vocab) if draft.n_vocab != verifier.n_vocab else None)
    if draft_name == DEFAULT:
        return PairFit(left_out="draft", notice=_LEFT_OUT.format("draft model", verifier.name, "--draft (draft=)"))
    if verifier_name == DEFAULT:
        return PairFit(left_out="verifier", notice=_LEFT_OUT.format("verifier", draft.name, "--verifier (verifier=)"))
    return PairFit(translation=mechanism("translation").TokenTranslation(draft, verifier))


_LEFT_OUT = "The default {0} has another tokenizer than {1}, which writes alone. Name a {0} for it with {2}."


@dataclass(frozen=True, slots=True)
class PairMemory:
    """Bytes that a pair takes by device; of these, `mapped` are weights in pages of files, which the system counts as
    free."""

    by_device: Counter[str]
    mapped: int


def named(model: Named | None) -> Named | None:
    """Return `model`, or None where it is "none"."""
    return None if model is None or model == "none" else model


def model_file(model: Named) -> ModelFile:
    """Return the file of a named model, which is called as `edgellm ls` calls it."""
    from edgellm.storage.model_files import name_of, resolve

    path = resolve(str(model))
    return replace(ModelFile.open(path), known_as=name_of(path))


def eagle3_named(draft: Named | None) -> ModelFile | None:
    """Return the EAGLE-3 head that is named in place of a draft model, if any."""
    file = None if draft is None else model_file(draft)
    return file if file is not None and is_eagle3(file.header) else None


def _check_head(head: ModelFile, verifier: Named | None) -> None:
    """Raise ModelUnsupported where the verifier of an EAGLE-3 head is not in this process."""
    is_head = f"{head.path.name} is an EAGLE-3 head: it drafts from"
    if verifier is None:
        raise ModelUnsupported(
            f"{is_head} a verifier's states, and there is no verifier.",
            "Name the verifier that it was made for with --verifier (verifier=).",
        )
    if is_remote(verifier):
        raise ModelUnsupported(
            f"{is_head} the states of a verifier in this process, and {verifier} is in another.",
            f"Name it where the verifier runs: edgellm serve --role verifier -m MODEL --draft {head.path.name}.",
        )


@dataclass(frozen=True, slots=True)
class PairPlacement:
    """The places of a verifier and a draft model in this process, and the bytes `taken` of each device, with contexts
    for `replies` at once; `reason` tells why these are fewer than requested, else ""."""

    verifier: Placed | None
    draft: Placed | None
    taken: Counter[str]
    replies: int = 1
    reason: str = ""

    @property
    def placed(self) -> tuple[Placed, ...]:
        """Return the places of both, the draft model's first."""
        return tuple(one for one in (self.draft, self.verifier) if one is not None)


def place_pair(draft: Named | None, verifier: Named | None, config: EngineConfig) -> PairPlacement:
    """Return the places of a pair beside `config.beside`, with contexts for `config.replies` at once, or for as many as
    fit if fewer are allowed. An EAGLE-3 head in place of the draft model goes with the verifier. Raises
    ModelUnsupported: there is a head, and the verifier is not in this process; InvalidOption: a context is to be longer
    than its model was trained for; MemoryShort: not all of them fit, or if fewer are allowed not even one."""
    big_file = None if verifier is None or is_remote(verifier) else model_file(verifier)
    small_file, eagle3 = None if draft is None else model_file(draft), None
    if small_file is not None and is_eagle3(small_file.header):
        _check_head(small_file, verifier)
        small_file, eagle3 = None, small_file
    advice = "Give --replies {}, or a shorter --ctx-size."  # `as_many_as_fit` fills in the number.
    asked = config.computing(None), config.computing(config.draft_hardware)
    for file, hardware in zip((big_file, small_file), asked, strict=True):
        if file is not None:
            check_context(file.header, file.path.name, hardware.n_ctx)

    def placed(n: int) -> PairPlacement:
        """Return the places with contexts for `n` replies."""
        taken, big, small = Counter(config.beside or {}), None, None
        if big_file is not None:
            big = place_model(big_file, asked[0], taken, verifies=True, sessions=n, eagle3=eagle3)
        if small_file is not None:
            small = place_model(small_file, asked[1], taken, verifies=False, sessions=n)
        models = [one for one in (big, small) if one is not None]
        sizes = ((one.hardware.n_ctx or LEAST_CONTEXT) * one.file.header.cache_bytes_per_token for one in models)
        caches = n * sum(sizes)
        if n > 2 and config.fewer_replies and caches > CACHE_SHARE * (free := free_memory()):
            share = f"{caches / 1e9:.1f} GB, over a quarter of the {free / 1e9:.1f} GB that are free."
            raise MemoryShort(f"their contexts would take {share}", advice)
        return PairPlacement(big, small, taken, n)

    most, found, short = as_many_as_fit(placed, config.replies, config.fewer_replies, advice)
    if not short:
        return found
    several = "replies are" if most > 1 else "reply is"
    return replace(found, reason=f"{most} {several} written at once, not {config.replies}: {short}")


def remote_verifier(
    where: str, config: EngineConfig, text: Model, closing: ExitStack, progress: Progress | None
) -> tuple[Verifier, Model | None]:
    """Open the verifier at the address `where`, or for "auto" the best of the peers, for drafts in the vocabulary of
    `text`, which renders conversations by the verifier's chat template from now on; or else in the vocabulary of the
    verifier's own tokenizer, which is fetched with `progress`, and returned, too. Off loopback, and for every paired
    device, the connection uses mutual TLS. A URL is that of a stock server.
    """
    if is_url(where):
        # The HTTP client is slow to import, so only a pair that needs it waits.
        from edgellm.upstream.opening import open_upstream

        server = open_upstream(where, text, config.upstream)
        closing.callback(server.close)
        if not server.proved and (config.tokenizer if config.draft in (None, "none") else config.draft) == DEFAULT:
            raise VocabularyMismatch(
                f"The server at {where} does not tell its tokens, so no model here is known to have those of"
                f" {server.capabilities.name}.",
                "Name a model of the same family: --draft (draft=), or tokenizer= where nothing is to draft. If the"
                " server is edgellm's, run `edgellm serve --role verifier` there, and name its HOST:PORT.",
            )
        return server, None
    # gRPC is slow to import, too.
    from edgellm.rpc.link import Endpoint
    from edgellm.services.client.verifier_selection import Chosen

    chosen = _best_peer(config, text) if where == AUTO else Chosen(Endpoint.parse(where), "")
    verifier, its_own = _connected(chosen, text, closing, progress)
    info = verifier.info
    if info.chat_template:
        (its_own or text).use_chat_template(info.chat_template, info.model)
    address = str(chosen.where)
    finding = f"{address} is a gateway to {info.model}, by {info.behind}" if info.behind else ""
    known = Elsewhere(lambda: verifier.info.model_hash, address, verifier.up, info.sampling, finding, (), chosen.reason)
    verifier.locate(known)
    return verifier, its_own


def _best_peer(config: EngineConfig, text: Model) -> Chosen:
    """Return the best of the paired devices' verifiers for drafts in the vocabulary of `text`."""
    from edgellm.rpc.trust.trust import Trust
    from edgellm.services.client.verifier_selection import TokenizerFit, choose_verifier

    wakes = None  # No sleeping device is woken without a draft model, as the first token would have to wait for it.
    if named(config.draft) is not None:  # The default one is left out beside another tokenizer.
        wakes = TokenizerFit.SAME if config.draft == DEFAULT else TokenizerFit.TRANSLATED
    return choose_verifier(Trust.load(), text.vocabulary, config.peers, wakes=wakes)


def _connected(
    chosen: Chosen, text: Model, closing: ExitStack, progress: Progress | None
) -> tuple[RemoteVerifier, Model | None]:
    """Return the connected verifier, and its tokenizer if that differs from `text`'s; `closing` owns both."""
    from edgellm.services.client.verifier_client import RemoteVerifier
    from edgellm.services.client.verifier_selection import forget_tokenizer, open_tokenizer, unusable

    where = chosen.where

    def on_wait(doing: str) -> None:
        if progress is not None:
            progress(f"the verifier at {where}, which is {doing}", 0.0)

    its_own: Model | None = None
    connect = partial(RemoteVerifier, where, on_wait=on_wait, asleep=chosen.asleep)
    try:
        verifier = connect(vocabulary=text.vocabulary)
    except VocabularyMismatch as mismatch:
        if not (sha256 := mismatch.tokenizer):
            raise
        on_progress = partial(progress, f"the tokenizer of {where}") if progress else None
        its_own = open_tokenizer(where, sha256, progress=on_progress)
        closing.callback(its_own.close)
        try:
            verifier = connect(vocabulary=its_own.vocabulary)
        except VocabularyMismatch as other:
            forget_tokenizer(sha256)
            raise unusable(where, f"it is not that of its model. {other.what}") from None
    closing.callback(verifier.close)
    return verifier, its_own
