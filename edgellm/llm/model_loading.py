"""From names to models and verifiers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias

from edgellm.engine import Context, ContextSpec, Model, ModelFile, head_pays
from edgellm.engine.gguf.cache_sizes import cache_bytes_per_token
from edgellm.engine.hardware import ALL_LAYERS, Hardware, offload_devices
from edgellm.engine.kv.prompt_cache import PromptCache
from edgellm.engine.memory_fit import LEAST_CONTEXT, Placed, check_context, most_that_fit, place
from edgellm.engine.model import probe_of
from edgellm.engine.native import Stop
from edgellm.engine.speculators.eagle3 import is_eagle3
from edgellm.engine.trial.probe import TrialChild, start_trial
from edgellm.errors import EdgeError, MemoryShort, ModelUnsupported, VocabularyMismatch
from edgellm.llm.cost_curves import ModelCurve, token_seconds
from edgellm.llm.idle_work import IdleWork
from edgellm.spec.drafters.translation import TokenTranslation
from edgellm.spec.model_sampling import ModelSampling, sampling_elsewhere
from edgellm.spec.verifier import Verifier
from edgellm.storage.default_pair import DEFAULT, Named
from edgellm.verifier.in_process import ContextPool, LocalVerifier

if TYPE_CHECKING:
    from edgellm.rpc.address import ModelAddress
    from edgellm.rpc.trust.device_id import DeviceID
    from edgellm.rpc.trust.trust import Trust
    from edgellm.services.client.verifier_client import RemoteVerifier
    from edgellm.upstream.opening import UpstreamOptions

AUTO = "auto"

Progress: TypeAlias = Callable[[str, float], None]

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}(#.+)?")


def is_remote(verifier: Named) -> bool:
    """Return whether `verifier` is in another process: a `HOST:PORT[#MODEL]`, a stock server's URL, or "auto"."""
    return verifier == AUTO or is_address(verifier) or is_url(verifier)


def is_url(verifier: Named) -> bool:
    """Return whether `verifier` is a stock server's address, such as http://gpu-box:8000."""
    return isinstance(verifier, str) and verifier.startswith(("http://", "https://"))


def is_address(verifier: Named) -> bool:
    """Return whether `verifier` is a `HOST:PORT[#MODEL]`, and not a file."""
    return isinstance(verifier, str) and _ADDRESS.fullmatch(verifier) is not None and not Path(verifier).exists()


@dataclass(frozen=True, slots=True)
class PairFit:
    """How a draft model's vocabulary fits its verifier's.

    `shared_tokens` is the id below which both have tokens, where they have different numbers of unused ones. With a
    `translation` they have different tokenizers. `left_out`, "draft" or "verifier", is a default that has another
    tokenizer than the model that was named; `notice` says so.
    """

    shared_tokens: int | None = None
    translation: TokenTranslation | None = None
    left_out: str = ""
    notice: str = ""


def fit(draft: Model, verifier: Model, draft_name: Named, verifier_name: Named) -> PairFit:
    """Compare the vocabularies of two models that were asked for by these names, or by `DEFAULT`."""
    draft.share_vocabulary(verifier)
    match = draft.vocabulary.match(verifier.vocabulary)
    if match.different is None:
        return PairFit(match.shared if draft.n_vocab != verifier.n_vocab else None)
    if draft_name == DEFAULT:
        return PairFit(left_out="draft", notice=_LEFT_OUT.format("draft model", verifier.name, "-m (draft=)"))
    if verifier_name == DEFAULT:
        return PairFit(left_out="verifier", notice=_LEFT_OUT.format("verifier", draft.name, "--verifier (verifier=)"))
    return PairFit(translation=TokenTranslation(draft, verifier))


_LEFT_OUT = "The default {0} has another tokenizer than {1}, which writes alone. Name a {0} for it with {2}."


@dataclass(frozen=True, slots=True)
class PairMemory:
    """Bytes that a pair takes by device, and those of its weights that are pages of files, which the system counts as
    free; as it does the `unopened` ones by device, of contexts for replies at once that were not written yet."""

    by_device: Counter[str]
    mapped: int
    unopened: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, models: Sequence[Model], taken: Counter[str] | None, n_ctx: int) -> Self:
        """Return the memory of `models`: what was `taken` for them, or what their headers say for `n_ctx` tokens."""
        weights = sum(tensor.nbytes for model in models for tensor in model.header.tensors)
        if taken is None:
            taken = Counter(CPU=weights + n_ctx * sum(cache_bytes_per_token(model.header) for model in models))
        return cls(taken, min(weights, taken["CPU"]))


def named(model: Named | None) -> Named | None:
    """Return `model`, or None where it is "none"."""
    return None if model is None or model == "none" else model


def positions(model: Model, n_ctx: int | None) -> int:
    """Return the length of a context over `model`: `n_ctx`, or as its hardware says. Raises InvalidOption where it was
    trained for fewer."""
    n_ctx = model.hardware.n_ctx if n_ctx is None else n_ctx
    if n_ctx is None:
        return min(model.n_ctx_train, LEAST_CONTEXT)
    check_context(model.header, model.name, n_ctx)
    return n_ctx


def place_named(
    name: Named, hardware: Hardware, taken: Counter[str], *, verifies: bool, eagle3: ModelFile | None = None,
    replies: int = 1,
) -> Placed:  # fmt: skip
    """Return where the model `name` goes, with a context for each of several `replies`; see `place`. Raises what
    `resolve`, `ModelFile.open` and `place` raise."""
    return place(_file(name), hardware, taken, verifies=verifies, sessions=replies, apart=True, eagle3=eagle3)


def eagle3_named(draft: Named | None) -> ModelFile | None:
    """Return the EAGLE-3 head that is named in place of a draft model; None for a draft model, or none. Raises what
    `resolve` and `ModelFile.open` raise."""
    if draft is None:
        return None
    file = _file(draft)
    return file if is_eagle3(file.header) else None


def eagle3_beside(verifier: Named | None, draft: Named | None) -> ModelFile | None:
    """Return the EAGLE-3 head that is named in place of a draft model for `verifier`; None for a draft model, or none.

    Raises:
        ModelUnsupported: there is a head, and the verifier is not in this process.
        Also what `eagle3_named` raises.
    """
    if (eagle3 := eagle3_named(draft)) is None:
        return None
    name = eagle3.path.name
    if verifier is None:
        raise ModelUnsupported(
            f"{name} is an EAGLE-3 head: it drafts from a verifier's states, and there is no verifier.",
            "Name the verifier that it was made for with --verifier (verifier=).",
        )
    if is_remote(verifier):
        raise ModelUnsupported(
            f"{name} is an EAGLE-3 head: it drafts from the states of a verifier in this process, and {verifier} is in"
            " another.",
            f"Name it where the verifier runs: edgellm serve --role verifier -m MODEL --draft {name}.",
        )
    return eagle3


def place_verifier(
    verifier: Named | None, hardware: Hardware, taken: Counter[str], eagle3: ModelFile | None, replies: int = 1
) -> Placed | None:
    """Return where a verifier goes, with its EAGLE-3 head; None where it is in another process, or there is none.
    Raises what `place_named` raises."""
    if verifier is None or is_remote(verifier):
        return None
    return place_named(verifier, hardware, taken, verifies=True, eagle3=eagle3, replies=replies)


def _file(name: Named) -> ModelFile:
    from edgellm.storage import resolve

    return ModelFile.open(resolve(str(name)))


class DraftPlacement(NamedTuple):
    """Where a draft model goes, and other places that might suit it better: what a token takes there is not known."""

    placed: Placed
    unmeasured: tuple[Hardware, ...] = ()


def place_draft(
    name: Named, hardware: Hardware, taken: Counter[str], threads: int | None, replies: int = 1
) -> DraftPlacement:
    """Return where a draft model goes beside what is `taken`: where a token was measured to take least, of all graphics
    cards together, each of them alone, and the processor; where `place` says until then. Raises what `place_named`
    raises."""
    before = Counter(taken)
    placed = place_named(name, hardware, taken, verifies=False, replies=replies)
    if hardware.gpu_layers is not None or not placed.hardware.gpu_layers:
        return DraftPlacement(placed)
    cards = offload_devices(hardware.devices)
    others = [replace(hardware, gpu_layers=0)]
    if len(cards) > 1:
        others += [replace(hardware, gpu_layers=ALL_LAYERS, devices=(card.name,), tensor_split=()) for card in cards]
    options = [(placed, Counter(taken))]
    for other in others:
        with suppress(MemoryShort):
            room = Counter(before)
            option = place(placed.file, other, room, verifies=False, sessions=replies, apart=True)
            options.append((option, room))
    timed = [(token_seconds(placed.file, one.hardware, threads), one, room) for one, room in options]
    known = [(seconds, one, room) for seconds, one, room in timed if seconds is not None]
    unmeasured = tuple(one.hardware for seconds, one, _ in timed if seconds is None and one is not placed)
    if len(known) < 2:
        return DraftPlacement(placed, unmeasured)
    _, best, room = min(known, key=lambda option: option[0])
    taken.clear()
    taken.update(room)
    times = ", ".join(f"{1e3 * seconds:.1f} ms {_place(one.hardware)}" for seconds, one, _ in known)
    reasons = (*best.reasons, f"a token was measured to take {times}")
    return DraftPlacement(replace(best, reasons=reasons), unmeasured)


@dataclass(frozen=True, slots=True)
class PairPlacement:
    """Where a verifier and a draft model go that are in this process, and the bytes `taken` of each device. There are
    contexts for as many `replies` at once, of which `each` takes its bytes; `reason` says why they are fewer than were
    asked for, "" if they are not."""

    verifier: Placed | None
    draft: DraftPlacement | None
    taken: Counter[str]
    replies: int
    reason: str = ""
    each: Counter[str] = field(default_factory=Counter)


def place_pair(
    draft: Named | None, verifier: Named | None, hardware: Hardware, draft_hardware: Hardware, before: Counter[str],
    threads: int | None, eagle3: ModelFile | None, replies: int, *, fewer: bool,
) -> PairPlacement:  # fmt: skip
    """Return where a pair goes beside what is taken `before`, with contexts for several `replies` at once; with
    `fewer`, for as many as fit.

    Raises:
        InvalidOption: a context is to be longer than its model was trained for.
        MemoryShort: not all of them fit, or with `fewer` not even one.
        Also what `place_verifier` and `place_draft` raise.
    """
    for name, own in ((verifier, hardware), (draft, draft_hardware)):
        if name is not None and not is_remote(name):
            file = _file(name)
            check_context(file.header, file.path.name, own.n_ctx)

    def placed(n: int, like: PairPlacement | None = None) -> PairPlacement:
        taken, of, of_draft = Counter(before), hardware, draft_hardware
        if like is not None:  # a default context depends on the number of replies
            of = of if like.verifier is None else replace(of, n_ctx=like.verifier.hardware.n_ctx)
            of_draft = of_draft if like.draft is None else replace(of_draft, n_ctx=like.draft.placed.hardware.n_ctx)
        big = place_verifier(verifier, of, taken, eagle3, n)
        small = None if draft is None else place_draft(draft, of_draft, taken, threads, n)
        return PairPlacement(big, small, taken, n)

    def with_each(found: PairPlacement) -> PairPlacement:
        if found.replies == 1:
            return found
        more = found.taken - placed(1, found).taken
        return replace(found, each=Counter({name: size // (found.replies - 1) for name, size in more.items()}))

    try:
        return with_each(placed(replies))
    except MemoryShort as short:
        if replies == 1:
            raise
        most, found = most_that_fit(placed, replies)
        if not fewer:
            raise MemoryShort(short.what, f"Give --replies {most}, or a shorter --ctx-size.") from None
        several = "replies are" if most > 1 else "reply is"
        return replace(with_each(found), reason=f"{most} {several} written at once, not {replies}: {short.what}")


def _place(hardware: Hardware) -> str:
    if not hardware.gpu_layers:
        return "on the processor"
    return f"on {'/'.join(card.name for card in offload_devices(hardware.devices))}"


def measure_elsewhere(placement: DraftPlacement | None, threads: int | None, idle: IdleWork) -> None:
    """Measure a draft model's cost curve in its unmeasured placements while nothing else is done."""
    if placement is None:
        return
    file = placement.placed.file

    def measure(hardware: Hardware, stop: Stop) -> None:
        with Model.load(file, hardware=hardware, probe=False) as model:
            ModelCurve(model, threads, idle.file_hash(file.path)).measure(stop)

    for hardware in placement.unmeasured:
        idle.add(partial(measure, hardware))


def try_ahead(placed: Placed | None, closing: ExitStack) -> TrialChild | None:
    """Return a child process that tries a model while another one is loaded, owned by `closing`; None where there is
    nothing to try. Raises what `start_trial` raises."""
    if placed is None:
        return None
    trial = start_trial(probe_of(placed.file, placed.hardware, eagle3=placed.eagle3))
    if trial is not None:
        closing.callback(trial.close)
    return trial


def load(
    placed: Placed, *, progress: Progress | None, closing: ExitStack, idle: IdleWork, chat: bool = False,
    speculates: bool = False, trial: TrialChild | None = None,
) -> Model:  # fmt: skip
    """Load a model, owned by `closing`; `chat`, `speculates` and `trial` as for `Model.load`. Meanwhile, its file is
    hashed. Raises what `Model.load` raises."""
    idle.file_hash(placed.file.path)
    on_progress = partial(progress, placed.file.path.name) if progress else None
    model = Model.load(
        placed.file,
        hardware=placed.hardware,
        progress=on_progress,
        chat=chat,
        speculates=speculates,
        eagle3=placed.eagle3,
        trial=trial,
    )
    closing.callback(model.close)
    return model


def local_verifier(
    model: Model, n_ctx: int, threads: int | None, closing: ExitStack, prompt_cache: PromptCache | None = None
) -> LocalVerifier:
    """Return a verifier over `model`; `closing` closes it."""
    verifier = verifier_of(model, n_ctx, threads, prompt_cache)
    closing.callback(verifier.close)
    return verifier


def verifier_of(
    model: Model, n_ctx: int, threads: int | None, prompt_cache: PromptCache | None = None
) -> LocalVerifier:
    """Return a verifier over `model`."""

    def context() -> Context:
        spec = ContextSpec(n_ctx, threads=threads, lazy=head_pays(model), rolls_back=True, speculates=True)
        return Context(model, spec, prompt_cache=prompt_cache)

    return LocalVerifier(model, ContextPool(context), n_ctx)


@dataclass(frozen=True, slots=True)
class OpenedVerifier:
    """A verifier across a link, functions that return its model's hash and whether it is reachable, the reason why
    "auto" chose it ("" if it was named), and the `sampling` that its model wants. Of a stock server, or a gateway to
    one, also the `finding` how it verifies, and `notices` for its user. `text` is its tokenizer where the draft model
    has another one, else None."""

    verifier: Verifier
    model_hash: Callable[[], str]
    up: Callable[[], bool]
    reason: str
    address: str
    shared_tokens: int
    sampling: ModelSampling
    finding: str = ""
    notices: tuple[str, ...] = ()
    text: Model | None = None


def remote_verifier(
    where: str, peers: Sequence[str], text: Model, closing: ExitStack, options: UpstreamOptions | None = None,
    progress: Progress | None = None,
) -> OpenedVerifier:  # fmt: skip
    """Open the verifier at the address `where`, or the best one of `peers` if that is "auto", for drafts in the
    vocabulary of `text`, which renders conversations by the verifier's chat template from now on; or, where the
    verifier has another tokenizer, in that one's vocabulary: it is fetched then, as `progress` is told. Off loopback,
    and for every paired device, the connection uses mutual TLS. A URL is that of a stock server, used as `options` say.

    Raises what `RemoteVerifier`, `open_tokenizer`, `choose_verifier` and `open_upstream` raise.
    """
    if is_url(where):
        return _stock_server(where, text, options, closing)
    # gRPC is slow to import, so only a pair that needs it waits
    from edgellm.rpc.address import ModelAddress
    from edgellm.rpc.trust.trust import Trust
    from edgellm.services.client.verifier_client import RemoteVerifier
    from edgellm.services.client.verifier_selection import TokenizerFit, choose_verifier, trust_for

    trust: Trust | None
    if where == AUTO:
        trusted = Trust.load()

        def fits(address: ModelAddress, device: DeviceID) -> TokenizerFit:
            try:
                RemoteVerifier(address, text.vocabulary, trust=trusted, device=device).close()
            except VocabularyMismatch as mismatch:
                return TokenizerFit.TRANSLATED if mismatch.tokenizer else TokenizerFit.NONE
            except EdgeError:
                return TokenizerFit.NONE
            return TokenizerFit.SAME

        trust = trusted
        chosen = choose_verifier(trusted, text.vocabulary.fingerprint, peers, fits=fits)
        address, device, reason = chosen.address, chosen.device, chosen.reason
    else:
        address, device, reason = ModelAddress.parse(where), None, ""
        trust = trust_for(address.address)
    verifier, its_own = _connected(address, text, trust, device, closing, progress)
    info = verifier.info
    if info.chat_template:
        (its_own or text).use_chat_template(info.chat_template, info.model)
    finding = f"{address} is a gateway to {info.model}, by {info.behind}" if info.behind else ""
    return OpenedVerifier(
        verifier, lambda: verifier.info.model_hash, verifier.up, reason, str(address), info.shared_tokens,
        info.sampling, finding, text=its_own,
    )  # fmt: skip


def _connected(
    address: ModelAddress, text: Model, trust: Trust | None, device: DeviceID | None, closing: ExitStack,
    progress: Progress | None,
) -> tuple[RemoteVerifier, Model | None]:  # fmt: skip
    """Return the connected verifier, and its tokenizer if that is another one than that of `text`; `closing` owns
    both."""
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
    """Compare the vocabularies of a draft model, if there is one, and a verifier across a link, for which `text` was
    named as the tokenizer."""
    if remote.text is None:
        return PairFit(remote.shared_tokens if remote.shared_tokens < text.n_vocab else None)
    if draft is None or draft_name is None:
        return PairFit()
    return fit(draft, remote.text, draft_name, verifier_name)


def _stock_server(where: str, text: Model, options: UpstreamOptions | None, closing: ExitStack) -> OpenedVerifier:
    # its HTTP client is slow to import, so only a pair that needs it waits
    from edgellm.upstream.opening import open_upstream

    opened = open_upstream(where, text, options)
    closing.callback(opened.verifier.close)
    return OpenedVerifier(
        opened.verifier, lambda: opened.identity, opened.verifier.up, "", str(opened.url), text.n_vocab,
        sampling_behind(opened.verifier, text), opened.finding, opened.notices,
    )  # fmt: skip


def sampling_behind(verifier: Verifier, text: Model) -> ModelSampling:
    """Return what the model of a verifier wants that does not say so, as far as it can be done there."""
    return sampling_elsewhere(verifier.capabilities.name, text.file).told_by(verifier.capabilities.choice)
