"""The check of a stock server that may verify: its kind, how it would verify, and whether its vocabulary fits."""

from __future__ import annotations

from collections.abc import Iterator

from edgellm.diagnostics.local import Finding, fine, note, problem
from edgellm.errors import EdgeError


def examine_server(url: str, draft: str) -> Iterator[Finding]:
    """Report on the server at `url` for drafts of the model `draft`."""
    from edgellm.engine import Model
    from edgellm.engine.model import TEXT_ONLY
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
