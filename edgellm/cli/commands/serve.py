"""`edgellm serve`: serve a pair, a verifier or layers, and announce that to other devices.

Loggers have the names of their modules. No prompt, no token, no key and no pairing code is ever logged.
"""

from __future__ import annotations

import enum
import logging
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli.announcing import announcing, print_server_event, say_how_to_use, serve_until_stopped
from edgellm.cli.commands.mesh.run import Engine, EngineName, OverDevices, over_devices
from edgellm.cli.commands.pair import Interfaces
from edgellm.cli.commands.peers import peer_names
from edgellm.cli.gateway import check_gateway, run_gateway
from edgellm.cli.help_examples import model_names
from edgellm.cli.http_options import (
    AllowHost,
    AllowOrigin,
    Embeddings,
    Http,
    HttpHost,
    HTTPOptions,
    HttpPort,
    KeepAlive,
    KeyFile,
    PlanFile,
    Replies,
    Strict,
    TlsCert,
    TlsKey,
    Waiting,
    embedding,
    http_server,
    print_event,
    print_urls,
    until_stopped,
)
from edgellm.cli.model_options import (
    DEFAULT,
    DEFAULT_DRAFT,
    DEFAULT_VERIFIER,
    DRAFT,
    VERIFIER,
    HardwareOptions,
    ReasoningEffort,
    TemplateArgs,
    Think,
    Upstream,
    UpstreamKeyFile,
    UpstreamTier,
    VerifierKeyFile,
    VerifierTier,
    on_command_line,
    thinking,
    upstream_options,
    with_hardware,
)
from edgellm.cli.pair_opener import with_default_pair
from edgellm.cli.views.console import Loading, announce, say, size
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.engine import Model, ModelFile
    from edgellm.engine.hardware import Hardware
    from edgellm.http.server import HttpServer
    from edgellm.services.server.servers import WorkerServer
    from edgellm.spec.draft_length import CostCurve
    from edgellm.spec.params import ReplyOptions
    from edgellm.upstream.opening import UpstreamOptions


def serve_worker(
    model: ModelFile | None,
    host: str,
    port: int,
    *,
    paired_only: bool,
    memory: float | None,
    keep: float,
    store: float | None = None,
    hardware: Hardware | None = None,
    rpc: bool = False,
) -> WorkerServer:
    """Start a worker. It has all layers of `model`, if given, and those that other devices upload, up to `store`
    gigabytes on disk, and computes as `hardware` says. Its `memory` is limited, in gigabytes; by default to nine tenths
    of what is free now, or what a graphics card has free, since otherwise other devices would decide how much it takes.
    With `rpc` it serves llama.cpp's RPC, too.

    Raises EngineFailed where nothing here serves that, and what `WorkerServer`, `ComputeUnit.choose` and, if the model
    cannot be cut, `WholeModel` raise.
    """
    from edgellm.engine.ggml_rpc.server import require_server
    from edgellm.engine.hardware import ON_PROCESSOR
    from edgellm.mesh.compute_unit import ComputeUnit
    from edgellm.mesh.layer_sources import SeveralSources, StoredLayers, WholeModel
    from edgellm.mesh.weight_cache import WeightCache
    from edgellm.rpc.address import Address
    from edgellm.rpc.trust.trust import Trust
    from edgellm.services.server.servers import WorkerServer
    from edgellm.storage.layers.store import LayerStore

    address = Address.of(host, port)
    unit = ComputeUnit.choose(hardware or ON_PROCESSOR)
    served_by = require_server()[0] if rpc else ""
    trust = None if address.loopback and not paired_only else Trust.load()
    layer_store = LayerStore(limit=None if store is None else int(store * 1e9))
    stored = StoredLayers(layer_store)
    own = () if model is None else (WholeModel(model, layer_store),)
    layers = SeveralSources(*own, stored)
    limit, reason = unit.available() if memory is None else (int(memory * 1e9), "--memory")
    cache = WeightCache(layers, unit=unit, memory=limit, keep=keep)
    server = WorkerServer(cache, address, on_event=print_server_event, trust=trust, stored=stored, rpc_engine=rpc)
    server.start()
    say(f"Use it with: edgellm mesh run MODEL PROMPT --split here:1-6,{server.address}:7-12", style="bold")
    say(f"Layers are computed on {unit.name or 'the processor'} ({unit.description}): {unit.reason}.", style="dim")
    say(f"Memory for layers and caches: {size(limit)} ({reason}).", style="dim")
    if served_by:
        say(f"llama.cpp's RPC is served, too, by {served_by}.", style="dim")
    return server


class LogLevel(StrEnum):
    """Log levels; each includes those before it."""

    off = "off"
    error = "error"
    warning = "warning"
    info = "info"
    debug = "debug"


def log_to_stderr(level: LogLevel) -> None:
    """Log edgellm's records of `level` and above to stderr, and those of libraries from one level higher."""
    if level is LogLevel.off:
        return
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.disable(logging.NOTSET)
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=min(number + 10, logging.ERROR), handlers=[handler], force=True)
    logging.getLogger("edgellm").setLevel(number)


class _OneLine(logging.Formatter):
    """A formatter with one line per record, so that text from another device cannot forge a second one."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


PLANNED = 512  # tokens of a reply, for a plan before the first request
PORT = 50151  # as in `edgellm.rpc.channel`, which is slow to import


class Role(enum.StrEnum):
    """The role of a server."""

    PAIR = "pair"
    VERIFIER = "verifier"
    WORKER = "worker"


@with_hardware
def serve(
    ctx: typer.Context,
    role: Annotated[
        Role,
        typer.Option(
            help="pair: answer over HTTP, as edgellm chat does. verifier: also verify drafts of other devices. "
            "worker: compute layers of models that are split over devices."
        ),
    ] = Role.PAIR,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m", "--model", metavar="MODEL", help="Verifier model; for a worker, a model that it has whole; with "
            "--upstream one with the server's tokenizer, several times for several tokenizers.",
            autocompletion=model_names, show_default=DEFAULT_VERIFIER,
        ),
    ] = None,
    draft: Annotated[
        str,
        typer.Option(metavar="MODEL", help="Role pair: small model that drafts, or 'none'. Roles pair and verifier: an "
                     "EAGLE-3 head of the verifier.", autocompletion=model_names,
                     show_default=DEFAULT_DRAFT),
    ] = DEFAULT,
    verifier: Annotated[
        str,
        typer.Option(metavar="MODEL|HOST:PORT|URL|auto", help="Role pair: bigger model that verifies, or its address.",
                     autocompletion=model_names, show_default=DEFAULT_VERIFIER),
    ] = DEFAULT,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE|HOST:PORT", help="Role pair: paired device to use as verifier; with --mesh "
                     "the address of a worker.", autocompletion=peer_names),
    ] = None,
    verifier_tier: VerifierTier = None,
    verifier_key_file: VerifierKeyFile = None,
    upstream: Upstream = None,
    upstream_tier: UpstreamTier = None,
    upstream_key_file: UpstreamKeyFile = None,
    mesh: OverDevices = None,
    engine: EngineName = Engine.AUTO,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Address to listen on: by default for this machine only, any other for paired devices."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="TCP port; 0: the system chooses.")] = PORT,
    paired_only: Annotated[
        bool,
        typer.Option("--paired-only", help="Require pairing (mutual TLS) on this machine too, and an API key."),
    ] = False,
    announce: Annotated[
        bool, typer.Option("--announce/--no-announce", help="Announce the server to paired devices by multicast DNS.")
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
    allow_origin: AllowOrigin = None,
    allow_host: AllowHost = None,
    strict: Strict = False,
    keep_alive: KeepAlive = "5m",
    embeddings: Embeddings = None,
    plan: PlanFile = None,
    think: Think = "auto",
    reasoning_effort: ReasoningEffort = None,
    template_arg: TemplateArgs = None,
    prompt_cache: Annotated[
        float,
        typer.Option(metavar="GB", min=0.0, help="Pair: disk space for what models have read when they are closed, so "
                     "that conversations go on at once; 0: nothing of a request is written to disk.")
    ] = 0.0,
    sessions: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Role verifier: replies of devices whose text it keeps in memory at "
                     "once.", show_default="8, or as many as fit"),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.0, help="Worker: memory for layers and caches.",
                     show_default="nine tenths of what is free at the start"),
    ] = None,
    keep: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Worker: time for which unused layers stay in memory.")
    ] = 300.0,
    store: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0.0, help="Worker: disk space for uploaded layers.",
                     show_default="half of what is free"),
    ] = None,
    rpc: Annotated[
        bool,
        typer.Option("--rpc/--no-rpc", help="Worker: also serve llama.cpp's RPC to paired devices that may compute "
                     "here. It runs what they send, with your rights."),
    ] = False,
    log_level: Annotated[
        LogLevel, typer.Option(help="Log requests, connections and lost devices to stderr; never a prompt.")
    ] = LogLevel.off,
    *,
    hardware: HardwareOptions,
) -> None:  # fmt: skip
    from edgellm.llm.pair_stats import tidy
    from edgellm.spec.params import ReplyOptions

    log_to_stderr(log_level)
    tidy()
    at_once = replies if replies is not None else {Role.PAIR: 2, Role.VERIFIER: 8, Role.WORKER: 1}[role]
    defaults = ReplyOptions(**thinking(think, reasoning_effort, template_arg))
    options = HTTPOptions(
        http, http_host, http_port, api_key_file, tls_cert, tls_key, at_once, waiting, strict, keep_alive,
        allow_origin or (), allow_host or (), paired_only,
    )  # fmt: skip
    _check_role(role, ctx)
    if not upstream and (upstream_tier is not None or upstream_key_file is not None):
        name = "--upstream-key-file" if upstream_tier is None else "--upstream-tier"
        raise InvalidOption(f"{name} belongs to --upstream.", "Name a server with --upstream URL.")
    if role is Role.PAIR and not http:
        raise InvalidOption("A pair is served over HTTP only.", "Leave --no-http out, or use --role verifier.")
    with http_server(options) as server, embedding(server, embeddings, hardware.of(VERIFIER)):
        if role is Role.PAIR:
            how = upstream_options(verifier_tier, verifier_key_file)
            _serve_pair(
                server, draft, verifier, peer, plan, mesh, engine, at_once, defaults, hardware, how,
                prompt_cache=int(1e9 * prompt_cache), fewer=replies is None,
            )  # fmt: skip
        elif upstream:
            how = upstream_options(upstream_tier, upstream_key_file, "--upstream-tier")
            check_gateway(ctx, model, hardware)
            run_gateway(server, upstream, how, model or [], host, port, paired_only, announce, interface, defaults)
        elif role is Role.VERIFIER:
            _serve_verifier(
                server,
                _only(model) or DEFAULT,
                host,
                port,
                paired_only,
                announce,
                interface,
                defaults,
                hardware,
                _eagle3(ctx, draft),
                sessions,
            )
        else:
            _serve_worker(
                server, _only(model), host, port, paired_only, memory, keep, store, rpc, announce, interface,
                hardware.of(VERIFIER),
            )  # fmt: skip


_LINK = {"model", "host", "port", "paired_only", "announce", "interface"}
_TEMPLATE = {"think", "reasoning_effort", "template_arg", "ctx_size", "batch_size"}  # of whoever asks for replies
_PAIR = {"draft", "verifier", "verifier_tier", "verifier_key_file", "peer", "mesh", "engine", "plan", "keep_alive",
         "prompt_cache"}  # fmt: skip
_USES = {
    Role.PAIR: _PAIR | _TEMPLATE,
    Role.VERIFIER: _LINK | _TEMPLATE | {"draft", "sessions", "upstream", "upstream_tier", "upstream_key_file"},
    Role.WORKER: _LINK | {"memory", "keep", "store", "rpc"},
}

_OF_A_PAIR = {
    "model": "Use --draft and --verifier.",
    "host": "Use --http-host.",
    "port": "Use --http-port.",
}


def _check_role(role: Role, ctx: typer.Context) -> None:
    """Refuse options on the command line that do not belong to this role, except that one may be switched off."""
    for name in sorted(set().union(*_USES.values()) - _USES[role]):
        if on_command_line(ctx, name) and ctx.params[name] is not False:
            roles = [one for one, uses in _USES.items() if name in uses]
            instead = _OF_A_PAIR.get(name) if role is Role.PAIR else None
            raise InvalidOption(
                f"--{name.replace('_', '-')} belongs to the role{'s' * (len(roles) > 1)} {' and '.join(roles)}.",
                instead or "Leave it out, or use another --role.",
            )


def _serve_worker(
    http: HttpServer | None, model: str | None, host: str, port: int, paired_only: bool, memory: float | None,
    keep: float, store: float | None, rpc: bool, announce: bool, interface: list[str] | None, hardware: Hardware,
) -> None:  # fmt: skip
    from edgellm.engine import ModelFile
    from edgellm.storage import resolve

    file = None if model is None else ModelFile.open(resolve(model))
    worker = serve_worker(
        file, host, port, paired_only=paired_only, memory=memory, keep=keep, store=store, hardware=hardware, rpc=rpc
    )
    with ExitStack() as closing:
        closing.callback(worker.close)
        if http is not None:
            http.open_without_model("This process computes layers for other devices, and generates no text.")
            say(f"Status: {http.url}/health", style="dim")
        if announce:
            closing.enter_context(announcing(worker, interface))
        until_stopped([http, worker], "Ctrl-C stops it; replies go on if other devices hold its layers.")


def _serve_pair(
    http: HttpServer | None, draft: str, verifier: str, peer: list[str] | None, plan: Path | None, mesh: str | None,
    engine: Engine, sessions: int, replies: ReplyOptions, hardware: HardwareOptions, upstream: UpstreamOptions | None,
    *, prompt_cache: int, fewer: bool,
) -> None:  # fmt: skip
    from edgellm.http.catalogs.local_models import LocalModels, ModelDefaults, PairOpener
    from edgellm.http.catalogs.paired_models import PairedModels
    from edgellm.http.mesh_status import read_plan
    from edgellm.http.model_host import ServedModel
    from edgellm.llm import AUTO, LLM
    from edgellm.llm.model_loading import named
    from edgellm.storage.default_pair import resolve_pair

    plan_shown = None if plan is None else read_plan(plan.expanduser())
    opener = None
    draft, verifier = with_default_pair(draft, AUTO if peer and mesh is None else verifier)
    here = resolve_pair(draft, verifier)
    defaults = ModelDefaults(hardware.of(VERIFIER), hardware.of(DRAFT), replies, print_event, sessions, prompt_cache)
    if mesh is not None:
        from edgellm.http.mesh_status import MeshRecorder

        opened = over_devices(
            mesh, str(here.verifier), peer or (), str(here.draft), PLANNED, as_json=False, explain=False,
            sessions=sessions, hardware=hardware, engine=engine,
        )  # fmt: skip
        pair, recorder = opened.pair, None if opened.mesh is None else MeshRecorder(opened.mesh)
        served = ServedModel(pair, pair.name, in_turns=False, options=replies, recorder=recorder)
    else:
        with Loading() as loading:
            pair = LLM.open(
                draft, verifier, progress=loading, peers=peer or (), hardware=defaults.hardware,
                draft_hardware=defaults.draft_hardware, upstream=upstream, replies=sessions, fewer_replies=fewer,
                prompt_cache=prompt_cache,
            )  # fmt: skip
        announce(pair.verifier_reason, pair.notices)
        served = ServedModel(pair, pair.name, in_turns=pair.verifier_up is None, options=replies, replies=pair.replies)
        if served.in_turns:
            opener = PairOpener(pair.name, named(draft), named(verifier), defaults)
    with served.pair:
        served.pair.check_options(replies)
        if http is not None:
            catalog = PairedModels(LocalModels(defaults), defaults)
            http.open(served, plan_shown, opener=opener, catalog=catalog)
            print_urls(http, served.replies)
        until_stopped([http])


def _serve_verifier(
    http: HttpServer | None,
    model: str,
    host: str,
    port: int,
    paired_only: bool,
    announce: bool,
    interface: list[str] | None,
    defaults: ReplyOptions,
    hardware: HardwareOptions,
    eagle3: ModelFile | None,
    sessions: int | None,
) -> None:
    from edgellm.http.model_host import ServedModel
    from edgellm.llm import LLM
    from edgellm.llm.cost_curves import ModelCurve
    from edgellm.services.server.servers import serve_verifier
    from edgellm.storage import resolve
    from edgellm.storage.default_pair import resolve_pair
    from edgellm.storage.fingerprint import FileHash

    path = resolve(str(resolve_pair(*with_default_pair("none", model)).verifier))
    with Loading() as loading, Loading("hashing") as hashing, Loading("measuring") as measuring:

        def measured(loaded: Model) -> CostCurve:
            file_hash = FileHash(path)
            file_hash.compute(progress=partial(hashing, path.name))
            return ModelCurve(loaded, None, file_hash).measure(progress=partial(measuring, path.name))

        server = serve_verifier(
            path, host=host, port=port, sessions=sessions, paired_only=paired_only, on_event=print_server_event,
            hardware=hardware.of(VERIFIER), progress=partial(loading, path.name), measure=measured, eagle3=eagle3,
        )  # fmt: skip
    say(f"{server.placement}.", style="dim")
    say(f"{server.pieces}.", style="dim")
    say_how_to_use(server, interface)
    with ExitStack() as closing:
        if http is not None:
            pair = closing.enter_context(LLM(server.model, draft=None, verifier=server.inside()))
            pair.check_options(defaults)
            http.open(ServedModel(pair, pair.name, in_turns=False, options=defaults))
            print_urls(http)
        serve_until_stopped(server, http, interface, announce=announce)


def _eagle3(ctx: typer.Context, draft: str) -> ModelFile | None:
    """Return the EAGLE-3 head of a served verifier. What a pair's settings name as its draft model is left out; raise
    InvalidOption where the command line names one."""
    from edgellm.llm.model_loading import eagle3_named, named

    eagle3 = None if draft == DEFAULT else eagle3_named(named(draft))
    if eagle3 is None and draft != "none" and on_command_line(ctx, "draft"):
        raise InvalidOption(
            f"{draft} is no EAGLE-3 head, and nothing else drafts for a served verifier.",
            "Name the draft model on the devices: edgellm chat --draft MODEL --verifier HOST:PORT.",
        )
    return eagle3


def _only(models: list[str] | None) -> str | None:
    """Return the model that is named. Raise InvalidOption for several, which only a gateway has."""
    if models and len(models) > 1:
        raise InvalidOption(f"{len(models)} models are named: {', '.join(models)}.", "Give -m once.")
    return models[0] if models else None
