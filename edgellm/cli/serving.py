"""The roles of `edgellm serve`, each of which serves until the user ends it, and what is said of their links."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from edgellm.cli.chat_session import with_default_pair
from edgellm.cli.http_serving import print_urls
from edgellm.cli.options import DEFAULT, DRAFT, VERIFIER, HardwareOptions, PairOptions, on_command_line, refuse_given
from edgellm.cli.server_options import HTTPOptions, LinkOptions, RoleOptions, ServedPair, WorkerOptions
from edgellm.cli.views.console import announce, print_event, say
from edgellm.cli.views.progress import ProgressBar
from edgellm.engine import Model, ModelFile
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.errors import EdgeError, InvalidOption, size
from edgellm.http.catalogs import ModelDefaults, NamedModels, PairOpener
from edgellm.http.model_host import ServedModel
from edgellm.llm import LLM
from edgellm.llm.cost_curves import ModelCurve
from edgellm.llm.mesh_timeline import MeshRecorder
from edgellm.llm.model_loading import eagle3_named, named
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.trust.trust import Trust
from edgellm.storage.fingerprint import FileHash
from edgellm.storage.model_files import resolve

if TYPE_CHECKING:
    from edgellm.http.server import HttpServer
    from edgellm.services.server.listener import Listener
    from edgellm.services.server.servers import WorkerServer
    from edgellm.spec.drafting.cost_curve import CostCurve
    from edgellm.spec.params import ReplyOptions
    from edgellm.upstream.gateway.backend import GatewayBackend
    from edgellm.verifier.worker import ColocatedVerifier

_STOP_HINT = "Ctrl-C finishes requests in flight, then stops; a second one stops at once."


@dataclass(frozen=True, slots=True)
class Asked:
    """A command line's request to serve up to `at_once` replies at once, by default with the options `replies`."""

    served: RoleOptions
    models: ServedPair
    http: HTTPOptions
    link: WorkerOptions
    hardware: HardwareOptions
    replies: ReplyOptions
    at_once: int


def serve_pair(ctx: typer.Context, asked: Asked, http: HttpServer | None) -> None:
    """Answer HTTP clients with a pair of models. A model in the settings is for the other roles."""
    models, replies, defaults = asked.models, asked.replies, _defaults(asked)
    if on_command_line(ctx, "model"):
        if on_command_line(ctx, "verifier"):
            raise InvalidOption("-m and --verifier both name the model whose text is served.", "Leave one of them out.")
        models = replace(models, verifier=asked.served.only_model or DEFAULT)
    models, opener = with_default_pair(models), None
    if models.mesh is not None:
        served = _over_devices(replace(asked, models=models))
    else:
        with ProgressBar() as loading:
            pair = LLM.open(
                models.draft, models.verifier, progress=loading, peers=models.peer, hardware=defaults.hardware,
                draft_hardware=defaults.draft_hardware, upstream=models.upstream(), replies=asked.at_once,
                fewer_replies=asked.http.replies is None, prompt_cache=defaults.prompt_cache,
            )  # fmt: skip
        announce(pair.verifier_reason, pair.notices)
        served = ServedModel(pair, pair.name, options=replies, replies=pair.replies)
        if pair.verifier_up is None:
            opener = PairOpener(pair.name, named(models.draft), named(models.verifier), defaults)
    with served.pair:
        _check(served.pair, replies)
        if http is not None:
            http.open(served, opener=opener, catalog=NamedModels(defaults))
            print_urls(http, served.replies)
        _until_stopped([http])


def _defaults(asked: Asked) -> ModelDefaults:
    """Return the options for models that requests name."""
    hardware, kept = asked.hardware, int(1e9 * asked.models.prompt_cache)
    return ModelDefaults(hardware.of(VERIFIER), hardware.of(DRAFT), asked.replies, print_event, asked.at_once, kept)


def _check(pair: LLM, replies: ReplyOptions) -> None:
    """Raise InvalidOption where the chat template cannot follow `replies`; without one a model only continues texts."""
    if pair.prompt_writer.model.chat_template_source:
        pair.prompt_writer.check(replies)
    else:
        say(f"{pair.name} has no chat template: it continues texts, at /v1/completions.", style="yellow")


def _over_devices(asked: Asked) -> ServedModel:
    from edgellm.cli.commands.mesh import over_devices

    sessions = asked.http.replies or 2  # every device reserves memory for each
    llm, opened = over_devices(asked.models, asked.replies.max_tokens, asked.hardware, sessions=sessions)
    recorder = None if opened is None else MeshRecorder(opened)
    return ServedModel(llm, llm.name, options=asked.replies, recorder=recorder, replies=sessions)


def serve_verifier(ctx: typer.Context, asked: Asked, http: HttpServer | None) -> None:
    """Verify drafts of other devices with a model, which answers HTTP clients, too."""
    from edgellm.services.server.listener import Listening
    from edgellm.services.server.servers import serve_verifier as start

    link, head = asked.link, _eagle3(ctx, asked.models.draft)
    verifier = with_default_pair(PairOptions("none", asked.served.only_model or DEFAULT)).verifier
    path = resolve(verifier)
    with ProgressBar() as loading, ProgressBar("hashing") as hashing, ProgressBar("measuring") as measuring:

        def measured(loaded: Model) -> CostCurve:
            file_hash = FileHash(path)
            file_hash.compute(progress=partial(hashing, path.name))
            return ModelCurve(loaded, None, file_hash).measure(progress=partial(measuring, path.name))

        server = start(
            path, Listening(link.host, link.port, link.paired_only, _print_report),
            asked.served.sessions, hardware=asked.hardware.of(VERIFIER), eagle3=head,
            progress=partial(loading, path.name), measure=measured,
        )  # fmt: skip
    say(f"{server.placement}.", style="dim")
    _say_how_to_use(server)
    with ExitStack() as opened:
        if http is not None:
            served = _served(asked, opened.enter_context(LLM(server.model, verifier=server.inside())))
            http.open(served, catalog=NamedModels(_defaults(asked)))
            print_urls(http)
        with _announcing(server, link), closing(server):
            _until_stopped([http, server])


def _served(asked: Asked, pair: LLM) -> ServedModel:
    _check(pair, asked.replies)
    return ServedModel(pair, pair.name, options=asked.replies)


def _eagle3(ctx: typer.Context, draft: str) -> ModelFile | None:
    """Return the EAGLE-3 head of a served verifier. A draft model is left out, or refused on the command line."""
    eagle3 = None if draft == DEFAULT else eagle3_named(named(draft))
    if eagle3 is None and draft != "none" and on_command_line(ctx, "draft"):
        raise InvalidOption(
            f"{draft} is no EAGLE-3 head, and nothing else drafts for a served verifier.",
            "Name the draft model on the devices: edgellm chat --draft MODEL --verifier HOST:PORT.",
        )
    return eagle3


def serve_worker(_: typer.Context, asked: Asked, http: HttpServer | None) -> None:
    """Compute layers of a model here, and layers that other devices upload."""
    model, link = asked.served.only_model, asked.link
    file = None if model is None else replace(ModelFile.open(resolve(model)), known_as=model)
    with closing(start_worker(file, link, asked.hardware.of(VERIFIER))) as worker:
        if http is not None:
            http.models.open_without_model("This process computes layers for other devices, and generates no text.")
            say(f"Status: {http.url}/health", style="dim")
        with _announcing(worker, link):
            _until_stopped([http, worker], "Ctrl-C stops it; replies go on if other devices hold its layers.")


def start_worker(model: ModelFile | None, link: WorkerOptions, hardware: Hardware = ON_PROCESSOR) -> WorkerServer:
    """Start a worker of uploaded layers, and of `model`'s; by default it takes nine tenths of free memory."""
    from edgellm.mesh import part_of
    from edgellm.mesh.layer_sources import SeveralSources, StoredLayers, WholeModel
    from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
    from edgellm.services.server.servers import WorkerServer
    from edgellm.storage.layer_store import LayerStore

    address, unit = Address.of(link.host, link.port), ComputeUnit.choose(hardware)
    if link.rpc:
        part_of("rpc", "backend").require()
    more = (part_of("rpc", "service").RpcEngineService,) if link.rpc else ()
    trust = None if address.loopback and not link.paired_only else Trust.load()
    layer_store = LayerStore(limit=None if link.store is None else int(link.store * 1e9))
    stored = StoredLayers(layer_store)
    own = () if model is None else (WholeModel(model, layer_store),)
    limit = unit.available() if link.memory is None else int(link.memory * 1e9)
    cache = WeightCache(SeveralSources(*own, stored), unit=unit, memory=limit, keep=link.keep)
    server = WorkerServer(cache, address, on_event=_print_report, trust=trust, stored=stored, more=more)
    server.start()
    reached = replace(server.address, host=next(iter(_hosts_of(server)), link.host))
    name = "MODEL" if model is None else model.name
    say(f"Use it with: edgellm mesh run {name} PROMPT --peer {reached}", style="bold")
    say(f"Layers are computed on {unit.name or 'the processor'} ({unit.description}): {unit.reason}.", style="dim")
    say(f"Memory for layers and caches: {size(limit)} (--memory sets it).", style="dim")
    if link.rpc:
        say("llama.cpp's RPC is served, too.", style="dim")
    return server


def serve_gateway(ctx: typer.Context, asked: Asked, http: HttpServer | None) -> None:
    """Have stock servers verify for devices and answer HTTP clients; no model is computed here."""
    from edgellm.services.server.gateway_server import LEAST
    from edgellm.services.server.gateway_server import serve_gateway as start
    from edgellm.services.server.listener import Listening
    from edgellm.upstream.gateway.backend import families
    from edgellm.upstream.verifier import UpstreamOptions

    served, link = asked.served, asked.link
    how = asked.models.upstream() or UpstreamOptions()
    why = "has no meaning with --upstream: its servers compute, and keep the texts"
    hardware = (one.name for one in fields(HardwareOptions))
    refuse_given(ctx, (*hardware, "draft", "sessions"), why, "Leave it out.")
    if not served.model:
        raise InvalidOption(
            "--upstream needs a model with the server's tokenizer.",
            "Name one with -m, such as the devices' draft model; nothing but its tokenizer is loaded.",
        )
    listening = Listening(link.host, link.port, link.paired_only, _print_report)
    server = start(served.upstream, [resolve(one) for one in served.model], listening, replace(how, least=LEAST))

    def say_how() -> None:
        names = [model.name for model in server.models]
        _say_how_to_use(server, names if len(names) > 1 else ())

    with ExitStack() as opened:
        if http is not None and not server.models:
            http.models.open_without_model("None of the servers behind this gateway has answered yet.")

        def open_model(model: GatewayBackend, verifier: ColocatedVerifier) -> None:
            for one in model.servers:
                name = f"{model.name}: " * (len(server.models) > 1)
                say(f"{name}{one.verifier.elsewhere.finding}.", style="dim")
                for notice in one.verifier.elsewhere.notices:
                    say(notice)
            if http is not None:
                over_http = _served(asked, opened.enter_context(_pair_over(model, verifier)))
                (http.open if model is server.models[0] else http.models.add)(over_http)

        def open_late(model: GatewayBackend, verifier: ColocatedVerifier) -> None:
            try:
                open_model(model, verifier)
            except EdgeError as error:
                say(f"{model.name} is not served over HTTP. {error}", style="yellow")
            if len(server.models) > 1:  # with a single model nothing has changed
                say_how()

        server.watch(open_model, open_late)
        say_how()
        if http is not None:
            http.metrics.add(lambda: families(server.models, len(server.opening.away)))
            print_urls(http)
        with _announcing(server, link), closing(server):
            _until_stopped([http, server])


def _pair_over(model: GatewayBackend, verifier: ColocatedVerifier) -> LLM:
    """Return a pair without a draft model, whose replies the servers behind a gateway's `model` write."""
    verifier.locate(model.elsewhere)
    return LLM(model.text, verifier=verifier)


def _hosts_of(server: Listener) -> list[str]:
    """Return the hosts at which others reach a server: its address, or all addresses of this machine in the home."""
    return chosen_hosts() if server.address.unspecified else [server.address.host]


@contextmanager
def _announcing(server: Listener, link: LinkOptions) -> Iterator[None]:
    """Announce a server that other machines can reach, unless the user does not want that."""
    from edgellm.rpc.discovery.mdns import ServiceKind, keep_announced

    if server.trust is None or server.address.loopback or not link.announce:
        yield
        return

    def hosts() -> list[str]:
        """Return where others reach the server now; announcements are made over IPv4."""
        return [host for host in _hosts_of(server) if host.replace(".", "").isdigit()]

    short = server.trust.identity.id.short
    with keep_announced(ServiceKind.DEVICE, short, server.address.port, hosts) as begun:
        if begun:
            say(f"announced as {short} on {', '.join(hosts())}", style="dim")
        else:
            say("It cannot be announced; to find out why, run: edgellm doctor. Other devices can use --peer HOST:PORT.")
        yield


def _say_how_to_use(server: Listener, models: Sequence[str] = ()) -> None:
    hosts, lead, style = [server.address.host], "Use it with: edgellm chat --verifier", "bold"
    if server.trust is not None:
        say("Use it on a paired device with: edgellm chat --verifier auto", style="bold")
        hosts, style = _hosts_of(server), "dim"
        lead = f"or{' to choose a model' if models else ', if it is not found'}: edgellm chat --peer"
    for host in hosts:
        for model in [f"#{model}" for model in models] or [""]:
            say(f"{lead} {replace(server.address, host=host)}{model}", style=style)


def _print_report(event: str) -> None:
    print_event(event, style="")


def _until_stopped(servers: Sequence[HttpServer | Listener | None], hint: str = _STOP_HINT) -> None:
    """Wait for SIGINT or SIGTERM, then stop one server after the other, each once its requests in flight are finished,
    since an earlier one may use later ones. A second signal stops all at once."""
    gc.freeze()  # loaded objects stay: collecting them would halt all threads for a tenth of a second
    running = [server for server in servers if server is not None]
    signals = 0

    def stop(*_: object) -> None:
        nonlocal signals
        signals += 1
        if signals == 1:
            running[0].request_stop()
        else:
            for server in running:
                server.request_stop(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    say(hint, style="dim")
    try:
        while running:
            while not running[0].wait(1.0):
                pass
            if len(running) > 1 and signals < 2:
                running[1].request_stop()
            running.pop(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
