"""Names for shell completion, each with a line about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from edgellm.errors import EdgeError

Names = Iterator[tuple[str, str]]


def model_names(incomplete: str) -> Names:
    """Yield the models on this machine, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import list_models

    with suppress(OSError, EdgeError):
        for model in list_models():
            if model.name.lower().startswith(incomplete.lower()):
                yield model.name, f"{model.origin}, {size(model.size)}"


def catalog_names(incomplete: str) -> Names:
    """Yield the models of the catalogue, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import catalog

    for model in catalog().models.values():
        if model.name.startswith(incomplete.lower()):
            yield model.name, f"{model.title}, {size(model.size)}"


def known_models(incomplete: str) -> Names:
    """Yield the models on this machine, then those of the catalogue."""
    yield from model_names(incomplete)
    yield from catalog_names(incomplete)


def peer_names(incomplete: str) -> Names:
    """Yield the paired devices, with their short IDs."""
    from edgellm.rpc.trust.peer_store import Peers

    with suppress(OSError, EdgeError):
        for peer in Peers().all():
            if peer.name.lower().startswith(incomplete.lower()):
                yield peer.name, peer.id.short


def conversation_ids(incomplete: str) -> Names:
    """Yield the conversations, with their first questions."""
    from edgellm.cli.views.console import one_line
    from edgellm.storage.chat_log import Conversations

    with suppress(EdgeError):
        for one in Conversations().all():
            if one.id.startswith(incomplete):
                yield one.id, one_line(one.title)[:60]
