"""`edgellm serve`: serve a pair, a verifier or layers."""

from __future__ import annotations

import enum
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli.commands.mesh.run import OverDevices, over_devices
from edgellm.cli.commands.pair import Interfaces
from edgellm.cli.commands.peers import peer_names
from edgellm.cli.help_examples import model_names
from edgellm.cli.http_options import (
    Http,
    HttpHost,
    HTTPOptions,
    HttpPort,
    KeyFile,
    PlanFile,
    Replies,
    TlsCert,
    TlsKey,
    Waiting,
    called,
    closing_door,
    invite,
    until_stopped,
)
from edgellm.cli.loading import Loading
from edgellm.cli.logs import LogLevel, log_to_stderr
from edgellm.cli.mdns_announce import findable, hosts_of
from edgellm.cli.views.console import say
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.http.server import Door
    from edgellm.services.server.verification_service import ServerEvent

PLANNED = 512  # tokens of a reply, for a plan before the first request
PORT = 50151  # as in `edgellm.rpc.channel`, which is slow to import


class Role(enum.StrEnum):
    """The role of this process for others."""

    PAIR = "pair"
    VERIFIER = "verifier"
    WORKER = "worker"


def serve(
    given: typer.Context,
    role: Annotated[
        Role,
        typer.Option(
            help="What to serve: the pair answers over HTTP as `edgellm chat` would; the verifier also checks what "
            "other devices draft; a worker computes layers of models that several devices hold together."
        ),
    ] = Role.PAIR,
    model: Annotated[
        str | None,
        typer.Option(
            "-m", "--model", metavar="MODEL", help="The model that verifies; of a worker, one that it has whole.",
            autocompletion=model_names, show_default="edgellm-verifier",
        ),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(metavar="MODEL", help="With the role pair: the small model, or 'none'.",
                     autocompletion=model_names),
    ] = "edgellm-draft",
    verifier: Annotated[
        str,
        typer.Option(metavar="MODEL|HOST:PORT|auto", help="With the role pair: the bigger model, or where it is.",
                     autocompletion=model_names),
    ] = "edgellm-verifier",
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE|HOST:PORT", help="With the role pair: a paired device that shall verify; with "
                     "--mesh where a worker is.", autocompletion=peer_names),
    ] = None,
    mesh: OverDevices = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Where to listen: this machine only, or one of its addresses, for paired devices."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="The TCP port; 0 lets the system choose.")] = PORT,
    paired_only: Annotated[
        bool,
        typer.Option("--paired-only", help="Paired devices alone, by mutual TLS, also on this machine; HTTP asks for a "
                     "key."),
    ] = False,
    announce: Annotated[
        bool, typer.Option("--announce/--no-announce", help="Let paired devices find it by multicast DNS.")
    ] = True,
    interface: Interfaces = None,
    http: Http = True,
    http_host: HttpHost = "127.0.0.1",
    http_port: HttpPort = None,
    api_key_file: KeyFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    replies: Replies = None,
    waiting: Waiting = 16,
    plan: PlanFile = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.0, help="A worker's memory for layers, caches included.",
                     show_default="what is free when it starts, less a tenth"),
    ] = None,
    keep: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long a worker keeps layers that nobody uses.")
    ] = 300.0,
    store: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.0, help="A worker's room on disk for layers that others bring.",
                     show_default="a half of what is free"),
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option(help="What is logged to stderr: requests, connections, devices lost. Never a prompt.")
    ] = LogLevel.off,
) -> None:  # fmt: skip
    from edgellm.llm.kept_data import tidy

    log_to_stderr(log_level)
    tidy()
    at_once = replies if replies is not None else {Role.PAIR: 2, Role.VERIFIER: 8, Role.WORKER: 1}[role]
    wanted = HTTPOptions(http, http_host, http_port, api_key_file, tls_cert, tls_key, at_once, waiting, paired_only)
    _check_role(role, given)
    if role is Role.PAIR and not http:
        raise InvalidOption("A pair is served over HTTP alone.", "Leave --no-http out, or say --role verifier.")
    with closing_door(wanted) as door:
        if role is Role.PAIR:
            _serve_pair(door, draft, verifier, peer, plan, mesh, at_once)
        elif role is Role.VERIFIER:
            _serve_verifier(door, model or "edgellm-verifier", host, port, paired_only, announce, interface)
        else:
            _serve_worker(door, model, host, port, paired_only, memory, keep, store, announce, interface)


_LINK = {"model", "host", "port", "paired_only", "announce", "interface"}
_USES = {
    Role.PAIR: {"draft", "verifier", "peer", "mesh", "plan"},
    Role.VERIFIER: _LINK,
    Role.WORKER: _LINK | {"memory", "keep", "store"},
}

_OF_A_PAIR = {
    "model": "A pair has --draft and --verifier.",
    "host": "For HTTP it is --http-host.",
    "port": "For HTTP it is --http-port.",
}


def _check_role(role: Role, given: typer.Context) -> None:
    """Refuse options on the command line that have no meaning for this role."""
    for name in sorted(set().union(*_USES.values()) - _USES[role]):
        source = given.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            roles = [one for one, uses in _USES.items() if name in uses]
            instead = _OF_A_PAIR.get(name) if role is Role.PAIR else None
            raise InvalidOption(
                f"--{name.replace('_', '-')} is for the role{'s' * (len(roles) > 1)} {' and '.join(roles)}.",
                instead or "Leave it out, or choose another --role.",
            )


def _serve_worker(
    door: Door | None, model: str | None, host: str, port: int, paired_only: bool, memory: float | None, keep: float,
    store: float | None, announce: bool, interface: list[str] | None,
) -> None:  # fmt: skip
    from edgellm.cli.commands.worker import serve_worker
    from edgellm.storage import resolve

    path = None if model is None else resolve(model)
    worker = serve_worker(path, host, port, paired_only=paired_only, memory=memory, keep=keep, store=store)
    with ExitStack() as closing:
        closing.callback(worker.close)
        if door is not None:
            door.rest("This process computes layers for other devices, and writes nothing itself.")
            say(f"How it is: {door.url}/health", style="dim")
        if announce:
            closing.enter_context(findable(worker, interface))
        until_stopped([door, worker], "Ctrl-C stops it; replies go on without it where others hold its layers.")


def _serve_pair(
    door: Door | None, draft: str, verifier: str, peer: list[str] | None, plan: Path | None, mesh: str | None,
    sessions: int,
) -> None:  # fmt: skip
    from edgellm.http.handlers import Writer
    from edgellm.http.plan_file import read_plan
    from edgellm.llm import AUTO, Pair

    drawn = None if plan is None else read_plan(plan.expanduser())
    local = next((name for name in (verifier, draft) if name != "none"), draft)
    if mesh is not None:
        from edgellm.http.mesh_timeline import Course

        opened, _ = over_devices(
            mesh, verifier, peer or (), draft, PLANNED, as_json=False, explain=False, sessions=sessions
        )
        writer = Writer(opened.pair, called(local), in_turns=False, course=Course(opened))
    else:
        with Loading() as loading:
            pair = Pair.open(draft, AUTO if peer else verifier, progress=loading, peers=peer or ())
        if pair.verifier_reason:
            say(pair.verifier_reason, style="dim")
        linked = pair.verifier_up is not None
        writer = Writer(pair, pair.name if linked else called(local), in_turns=not linked)
    with writer.pair:
        if door is not None:
            door.open(writer, drawn)
            invite(door)
        until_stopped([door])


def _serve_verifier(
    door: Door | None, model: str, host: str, port: int, paired_only: bool, announce: bool, interface: list[str] | None
) -> None:
    from edgellm.http.handlers import Writer
    from edgellm.llm import Pair
    from edgellm.llm.ngram_runtime import curve_of
    from edgellm.services.server.verifier_server import serve_verifier
    from edgellm.storage import resolve

    path = resolve(model)
    with Loading() as loading:
        server = serve_verifier(
            path, host=host, port=port, paired_only=paired_only, on_event=_tell, progress=partial(loading, path.name),
            measure=lambda loaded: curve_of(loaded, None)[0],
        )  # fmt: skip
    if server.trust is None:
        say(f"Ask it with: edgellm chat --verifier {server.address}", style="bold")
    else:
        say("Ask it on a paired device with: edgellm chat --verifier auto", style="bold")
        for one in hosts_of(server, interface):
            say(f"or, if it is not found: edgellm chat --peer {replace(server.address, host=one)}", style="dim")
    with ExitStack() as closing:
        if door is not None:
            pair = closing.enter_context(Pair(server.model, draft=None, verifier=server.inside()))
            door.open(Writer(pair, called(model), in_turns=False))
            invite(door)
        if announce:
            closing.enter_context(findable(server, interface))
        try:
            until_stopped([door, server])
        finally:
            server.close()


def _tell(event: ServerEvent) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {event.text}")
