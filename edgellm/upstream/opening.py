"""From an address to a verifier: the kind of server, its tier, its vocabulary, and notices for the user."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module
from pathlib import Path

from edgellm.engine import Model, Vocabulary
from edgellm.errors import InvalidOption, VerifierBusy, VerifierLost, VerifierUnreachable, VocabularyMismatch
from edgellm.spec.protocols import Elsewhere
from edgellm.spec.sampling import sampling_elsewhere
from edgellm.state import read_cached, write_cached
from edgellm.system import cache_dir
from edgellm.upstream import dialects
from edgellm.upstream.dialects.served import UnknownServer, Upstream, models_of
from edgellm.upstream.dialects.texts import TextBorders
from edgellm.upstream.http_client import HttpClient, ServerURL, read_key
from edgellm.upstream.rows import Tier
from edgellm.upstream.verifier import UpstreamOptions, UpstreamVerifier

DIALECTS = "vllm", "sglang", "llama_server", "ollama", "by_text", "by_ids"
"""The modules of the kinds of servers in the order in which they are asked; the last one takes any other server."""


def models_at(url: ServerURL, options: UpstreamOptions | None) -> list[str]:
    """Return the names of the models that the server at `url` has. Raises InvalidOption: the key file is unusable;
    VerifierUnreachable: nothing answers, or it does not name its models."""
    with _reaching(url), closing(HttpClient(url, read_key((options or UpstreamOptions()).key_file))) as client:
        return list(client.wait(models_of(client)))


def open_upstream(address: str, text: Model, options: UpstreamOptions | None = None) -> UpstreamVerifier:
    """Open the server at `address` as a verifier for drafts in the vocabulary of `text`, which renders conversations by
    the server's chat template from now on, where the server shows it. Raises InvalidOption: the address or key file is
    unusable, or the server has no such model or tier; VerifierUnreachable: nothing answers, or the server cannot
    verify; VocabularyMismatch: the server's tokens differ."""
    options = options or UpstreamOptions()
    url = ServerURL.parse(address)
    key = read_key(options.key_file)
    with _reaching(url), ExitStack() as failing:
        client = HttpClient(url, key)
        failing.callback(client.close)
        upstream = client.wait(detect(client, text, options.tier))
        server = [str(url), upstream.name, text.vocabulary.fingerprint]
        proved: list[object] = read_cached(_proved_servers(), list) or []
        known = server in proved
        with client.reading():
            proof = client.wait(prove(upstream, text, RECHECKS if known else PROBES))
        verifier = UpstreamVerifier(upstream, text, options, proved=bool(proof))
        failing.pop_all()
    if upstream.chat_template:
        text.use_chat_template(upstream.chat_template, upstream.name)
    if not known:
        write_cached(_proved_servers(), [*proved, server])
    finding = f"{upstream.dialect} at {url} verifies by {upstream.tier}: {upstream.reason}"
    notices = tuple(_notices(upstream, url, known=known, key=bool(key), proved=bool(proof)))
    identity = hashlib.sha256(f"{upstream.dialect} {upstream.name} {text.vocabulary.fingerprint}".encode()).hexdigest()
    sampling = sampling_elsewhere(upstream.name, text.file).told_by(upstream.choice)
    finding = f"{finding}; {proof or _UNPROVED}"
    verifier.locate(Elsewhere(lambda: identity, str(url), verifier.up, sampling, finding, notices))
    return verifier


def _proved_servers() -> Path:
    """Return the file of servers, their models and the vocabularies that were proved to be theirs."""
    return cache_dir() / "servers.json"


@contextmanager
def _reaching(url: ServerURL) -> Iterator[None]:
    """Raise VerifierUnreachable where the server at `url` is not there, or not in time."""
    later = "Try again later."
    try:
        yield
    except TimeoutError:
        raise VerifierUnreachable(f"The server at {url} takes too long for a first answer.", later) from None
    except (VerifierLost, VerifierBusy) as error:
        raise VerifierUnreachable(error.what, later if isinstance(error, VerifierBusy) else error.next_step) from None


def _notices(upstream: Upstream, url: ServerURL, *, known: bool, key: bool, proved: bool) -> list[str]:
    """Return the notices: about the server's logs once, about lasting problems each time."""
    found = []
    if not known:
        which = f"; {upstream.dialect} does so with {upstream.log_switch}" if upstream.log_switch else ""
        found.append(f"Prompts and replies go to {url}, and whoever runs that server decides what it logs{which}.")
        if not upstream.chat_template:
            found.append(
                f"{upstream.dialect} does not show its chat template, so conversations are rendered by that of the "
                "draft model, which must be of the same family."
            )
    if not url.is_loopback and not url.is_encrypted:
        what = "Prompts, replies and the key" if key else "Prompts and replies"
        found.append(f"{what} go to {url} unencrypted: use https:// where you can.")
    if not proved and not upstream.by_text:
        found.append(f"{_UNPROVED.capitalize()}.")
    return found


async def detect(client: HttpClient, text: Model, tier: Tier | None = None) -> Upstream:
    """Return the server of `client` by the first dialect that recognises it. `text` has the vocabulary of its model;
    `tier` is the requested way to verify, None: the best. Raises InvalidOption: it has no such model, or cannot verify
    as `tier` says; VerifierLost, VerifierBusy: it does not answer, refuses, or has no way to verify; TimeoutError: it
    does not answer in time."""
    with client.reading():
        server = await UnknownServer.at(client, text, tier)
        for name in DIALECTS:
            found: Upstream | None = await import_module(f"{dialects.__name__}.{name}").connect(server)
            if found is None:
                continue
            if tier in (None, found.tier):
                return found
            raise InvalidOption(
                f"{found.dialect} at {client.url} cannot verify by {tier}: it can by {found.tier}.",
                "Leave --verifier-tier out: the best way is chosen.",
            )
    raise server.unusable("it is of no known kind", "Use vLLM, SGLang, llama-server or Ollama.")


PROBES = 200
RECHECKS = 4
"""Probes of a server that was proved before: another model may have taken its place."""
_TOKENS = 32  # tokens of a probe
_UNPROVED = "the server decodes no token ids, so its vocabulary is not proved to be the draft model's"


async def prove(upstream: Upstream, model: Model, most: int = PROBES) -> str:
    """Compare up to `most` texts of random tokens in the vocabulary of `model` with a server's: all tokens of a small
    one, and every one that a conversation needs, as no server shows a list. Return a clause about the proof that ids
    mean the same there; "" where the server decodes none. Raises VocabularyMismatch: a text differs; names the first
    such token; VerifierLost, VerifierBusy: as `Upstream.rows`."""
    vocabulary, borders = model.vocabulary, TextBorders(model)
    probes = tokens = 0
    for ids in texts(vocabulary, most):
        text = _text(vocabulary, ids)
        if upstream.by_text:
            if (divided := await upstream.tokenize(text)) is None:
                return ""
            if list(divided) != borders.ids(text):
                raise _mismatch(upstream, f"{text[:40]!r} has other tokens there")
        else:
            if (written := await upstream.detokenize(ids)) is None:
                return ""
            if not _same(text, written):
                await _differ(upstream, vocabulary, ids)
        probes, tokens = probes + 1, tokens + len(ids)
    return f"{tokens:,} tokens in {probes} texts mean the same there as here" if probes else ""


def texts(vocabulary: Vocabulary, most: int) -> Iterator[list[int]]:
    """Yield the ids of up to `most` texts, the tokens that conversations need first: only tokens of whole characters,
    each at most once."""
    pieces = enumerate(vocabulary.pieces)
    whole = [token for token, piece in pieces if piece and piece.decode(errors="ignore").encode() == piece]
    first = [token for token in whole if token in vocabulary.required]
    if first:
        yield first[: 8 * _TOKENS]
    others = [token for token in whole if token not in vocabulary.required and vocabulary.conflicts(token, None)]
    random.Random(vocabulary.fingerprint).shuffle(others)
    left = most - bool(first)
    for start in range(0, min(len(others), left * _TOKENS), _TOKENS):
        yield others[start : start + _TOKENS]


async def _differ(upstream: Upstream, vocabulary: Vocabulary, ids: Sequence[int]) -> None:
    """Raise VocabularyMismatch for the first token of a text that differs alone, if any."""
    for token in ids:
        ours, theirs = _text(vocabulary, [token]), await upstream.detokenize([token])
        if theirs is not None and not _same(ours, theirs):
            raise _mismatch(upstream, f"token {token} is {ours[:40]!r} here and {theirs[:40]!r} there")


def _mismatch(upstream: Upstream, how: str) -> VocabularyMismatch:
    return VocabularyMismatch(
        f"The vocabulary here and that of {upstream.name} at {upstream.client.url} differ: {how}.",
        "Choose a draft model with the server's tokenizer (--draft; of a gateway, -m). With a verifier on this device"
        " the tokenizers may differ.",
    )


def _text(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    return b"".join(vocabulary.pieces[token] for token in ids).decode()


def _same(ours: str, theirs: str) -> bool:
    """Return whether two texts are equal. Some tokenizers drop blanks before punctuation and at the beginning."""
    return ours == theirs or ours.replace(" ", "") == theirs.replace(" ", "")
