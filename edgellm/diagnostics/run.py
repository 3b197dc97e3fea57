"""All checks of this device and its network, each with the next step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgellm.diagnostics.local import Finding, examine_machine, fine, note, problem
from edgellm.errors import EdgeError
from edgellm.llm.model_loading import is_url
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.default_pair import DEFAULT, resolve_pair


def examine(*, draft: str = DEFAULT, peers: Sequence[str] = (), interfaces: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings of all checks; this takes some seconds, as it listens to the network.

    Args:
        draft: the model whose vocabulary verifiers should have.
        peers: addresses (HOST:PORT, or the URL of a stock server) to check too; a model behind # is left out of
            HOST:PORT, as all that are served there are named.
        interfaces: names or addresses of the networks to use, instead of those of the home.

    Raises:
        InvalidOption: one of `peers` is not an address, or there is no such interface.
    """
    from edgellm.diagnostics import network
    from edgellm.rpc.address import ModelAddress

    addresses = [ModelAddress.parse(text).address for text in peers if not is_url(text)]
    hosts = chosen_hosts(interfaces)
    draft = str(resolve_pair(draft, None).draft)
    yield from examine_machine()
    vocabulary = ""
    try:
        vocabulary = _vocabulary(draft)
    except EdgeError as error:
        yield problem("vocabulary", f"The draft model cannot be read: {error.what}", error.next_step)
    for url in filter(is_url, peers):
        yield from examine_server(url, draft)
    yield from network.examine_interfaces(hosts)
    try:
        trust = Trust.load()
        trust.peers.all()
    except EdgeError:  # `examine_machine` has reported it
        return
    received = network.listen(trust.identity.id.short, hosts)
    yield from network.examine_multicast(received, trust.identity.id.short, hosts)
    yield from network.examine_peers(trust, received, vocabulary)
    for address in addresses:
        yield from network.examine_address(trust, address, vocabulary)


def _vocabulary(draft: str) -> str:
    from edgellm.engine import Model
    from edgellm.storage import resolve

    with Model.load(resolve(draft)) as model:
        return model.vocabulary.fingerprint


def examine_server(url: str, draft: str) -> Iterator[Finding]:
    """Report on the server at `url` for drafts of the model `draft`."""
    from edgellm.engine.model import TEXT_ONLY, Model
    from edgellm.storage import resolve
    from edgellm.upstream.opening import open_upstream

    try:
        with Model.load(resolve(draft), TEXT_ONLY) as text:
            opened = open_upstream(url, text)
            opened.verifier.close()
    except EdgeError as error:
        yield problem("server", error.what, error.next_step)
        return
    yield fine("server", f"{opened.finding}.")
    for notice in opened.notices:
        yield note("server", notice, "")
