"""`edgellm serve`: a role that other devices use."""

from __future__ import annotations

import enum
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli.loading import Loading
from edgellm.cli.screen import say
from edgellm.cli.teach import model_names

if TYPE_CHECKING:
    from edgellm.serve.server import VerifierServer
    from edgellm.serve.service import ServerEvent

PORT = 50151  # as in `edgellm.link.channel`, which takes its time to import


class Role(enum.StrEnum):
    """What this process does for others."""

    VERIFIER = "verifier"


def serve(
    role: Annotated[  # noqa: ARG001  # the only one so far
        Role, typer.Option(help="What to serve: the verifier checks what other devices draft.")
    ],
    model: Annotated[
        str,
        typer.Option("-m", "--model", metavar="MODEL", help="The model that verifies.", autocompletion=model_names),
    ] = "edgellm-verifier",
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Where to listen; only this machine for now.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="The TCP port; 0 lets the system choose.")] = PORT,
) -> None:
    from edgellm.serve.server import serve_verifier
    from edgellm.store import resolve

    path = resolve(model)
    with Loading() as loading:
        server = serve_verifier(path, host=host, port=port, on_event=_tell, progress=partial(loading, path.name))
    say(f"Ask it with: edgellm chat --verifier {server.address}", style="bold")
    say("Ctrl-C stops it when it has finished what is in flight; a second one stops it at once.", style="dim")
    _until_stopped(server)


def _until_stopped(server: VerifierServer) -> None:
    """Waits for SIGINT or SIGTERM, then for what is in flight; a second signal cuts that off."""
    asked = 0

    def stop(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            server.request_stop()
        else:
            server.request_stop(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not server.wait(1.0):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.model.close()


def _tell(event: ServerEvent) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {event.text}")
