"""The HTTP server of `edgellm serve`: its options, credentials and messages."""

from __future__ import annotations

import gc
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from edgellm.cli.help_examples import model_names
from edgellm.cli.views.console import say
from edgellm.errors import InvalidOption, PortTaken, TrustUnusable

if TYPE_CHECKING:
    from edgellm.engine.hardware import Hardware
    from edgellm.http.server import Credentials, HttpServer
    from edgellm.rpc.address import Address

PORT = 8080

Http = Annotated[bool, typer.Option("--http/--no-http", help="Serve HTTP: OpenAI's API and others, and a web page.")]
HttpHost = Annotated[
    str,
    typer.Option(metavar="HOST", help="Address for HTTP. By default only this machine is served; others need the API "
                 "key."),
]  # fmt: skip
HttpPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="Port for HTTP; 0: the system chooses.", show_default=f"{PORT}, or a free one"),
]  # fmt: skip
KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="API key that HTTP clients must send; generated if the file is missing. Clients "
                 "on other machines always need one.", show_default="none on this machine"),
]  # fmt: skip
TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TLS certificate for HTTP from other machines, in PEM.",
                 show_default="a self-signed one"),
]  # fmt: skip
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate, in PEM.")]
PlanFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Plan from `edgellm mesh plan --json` for the web page to draw.",
                 show_default="none"),
]  # fmt: skip
Replies = Annotated[
    int | None,
    typer.Option(metavar="N", help="Replies generated at once over HTTP; each needs memory.",
                 show_default="2; for a verifier 8"),
]  # fmt: skip
AllowOrigin = Annotated[
    list[str] | None,
    typer.Option(metavar="ORIGIN", help="Origin of web pages elsewhere that may use HTTP here, such as "
                 "https://chat.example.org; can be given several times.", show_default="none"),
]  # fmt: skip
AllowHost = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST", help="Further name by which HTTP clients may call this machine, such as "
                 "host.docker.internal; can be given several times.", show_default="its own names"),
]  # fmt: skip
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse HTTP requests with unknown parameters, which otherwise have no effect."),
]  # fmt: skip
KeepAlive = Annotated[
    str,
    typer.Option(metavar="TIME", help="Role pair: time such as 5m, 1h or -1 (no end) for which a model that a request "
                 "named stays in memory unused. The pair itself stays until another model needs its memory."),
]  # fmt: skip
Embeddings = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Embedding model for /v1/embeddings, beside the model that replies.",
                 show_default="none", autocompletion=model_names),
]  # fmt: skip
Waiting = Annotated[int, typer.Option(metavar="N", help="Requests that may wait; more are refused.")]


@dataclass(frozen=True, slots=True)
class HTTPOptions:
    """The options for HTTP."""

    on: bool
    host: str
    port: int | None
    key_file: Path | None
    certificate: Path | None
    private_key: Path | None
    replies: int
    waiting: int
    strict: bool = False
    keep_alive: str = "5m"
    origins: Sequence[str] = ()
    hosts: Sequence[str] = ()
    paired_only: bool = False  # other programs on this machine are not trusted either: they need a key on loopback


def start_server(options: HTTPOptions) -> HttpServer | None:
    """Start the server, and return it; None with --no-http. Until `HttpServer.open` it answers that the model loads.

    Raises:
        PortTaken: the chosen port is in use.
        InvalidOption, TrustUnusable: the server cannot be started with these options.
    """
    if not options.on:
        return None
    from edgellm.http.cors import checked_host
    from edgellm.http.model_host import keep_alive_seconds
    from edgellm.http.server import HttpServer
    from edgellm.rpc.address import Address

    if (options.certificate is None) != (options.private_key is None):
        raise InvalidOption("--tls-cert and --tls-key must be given together.", "Give both, or neither.")
    address = Address.of(options.host, PORT if options.port is None else options.port)
    names = [] if address.loopback else _host_names(address.host)
    allowed = [checked_host(host) for host in options.hosts]
    credentials = None if address.loopback else _credentials(options, names)
    needs_key = options.key_file is not None or options.paired_only
    key = _api_key(options.key_file) if credentials is None and needs_key else None
    opener = _page_key()

    def start(at: Address) -> HttpServer:
        server = HttpServer(
            at, credentials=credentials, key=key, page_key=opener, names=[*names, *allowed], replies=options.replies,
            waiting=options.waiting, on_event=print_event, strict=options.strict,
            keep_alive=keep_alive_seconds(options.keep_alive), origins=options.origins,
        )  # fmt: skip
        server.start()
        return server

    try:
        return start(address)
    except PortTaken:
        if options.port is not None:
            raise
        server = start(replace(address, port=0))
        say(f"Port {PORT} is in use; HTTP uses port {server.address.port}.", style="yellow")
        return server


@contextmanager
def http_server(options: HTTPOptions) -> Iterator[HttpServer | None]:
    """Start the server as `start_server` does, and stop it after the `with`."""
    server = start_server(options)
    if server is None:
        yield None
        return
    from edgellm.http.running_servers import recorded

    try:
        with recorded(server.reached_at, server.address.port, server.certificate):
            yield server
    finally:
        server.stop(0)


class Server(Protocol):
    """A server that `until_stopped` can stop."""

    def request_stop(self, grace: float = ...) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


STOP_HINT = "Ctrl-C finishes requests in flight, then stops; a second one stops at once."


def until_stopped(servers: Sequence[Server | None], hint: str = STOP_HINT) -> None:
    """Wait for SIGINT or SIGTERM, then stop one server after the other, each once its requests in flight are finished,
    since an earlier one may use later ones. A second signal stops all at once. Print `hint` once signals are handled.
    """
    gc.freeze()  # what is loaded stays: collections that look through it halt all threads for a tenth of a second
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


@contextmanager
def embedding(server: HttpServer | None, model: str | None, hardware: Hardware) -> Iterator[None]:
    """Load an embedding model, if one is named, and have `server` embed with it. Raises what `Model.load` and
    `Embedder` raise."""
    if model is None:
        yield
        return
    if server is None:
        raise InvalidOption("--embeddings is for HTTP, and --no-http is given.", "Leave one of them out.")
    from edgellm.engine import Model
    from edgellm.engine.embedding.embedder import Embedder
    from edgellm.http.embedding import ServedEmbedder
    from edgellm.storage import name_of, resolve

    path = resolve(model)
    name = name_of(path)
    with Model.load(path, hardware=hardware, embeds=True) as loaded, Embedder(loaded) as embedder:
        server.open_embedder(ServedEmbedder(embedder, name))
        say(f"Embeddings: {server.url}/v1/embeddings, {embedder.width} numbers of {name}", style="dim")
        yield


def print_urls(server: HttpServer, room: int | None = None) -> None:
    """Print the addresses of the server, and how many replies it writes at once. There may be memory for `room`."""
    say(f"Web page: {server.page_url}", style="bold")
    say(f"OpenAI's API: {server.url}/v1", style="bold")
    most = min(server.replies, room or server.replies)
    replies = f"{most} replies are" if most > 1 else "1 reply is"
    why = "each takes memory and slows the others" if most == server.replies else "there is no memory for more"
    say(
        f"{replies} written at once (--replies), as {why}; {server.waiting} more requests wait (--waiting).",
        style="dim",
    )


def _credentials(options: HTTPOptions, names: Sequence[str]) -> Credentials:
    from edgellm.http.middleware import http_folder
    from edgellm.http.server import Credentials
    from edgellm.rpc.trust.identity import web_certificate

    key = _api_key(options.key_file)
    if options.certificate is not None and options.private_key is not None:
        return Credentials(key, options.certificate.expanduser(), options.private_key.expanduser())
    certificate, private_key = web_certificate(http_folder(), names)
    say(f"Clients must trust the certificate {certificate}, as with curl --cacert.", style="dim")
    return Credentials(key, certificate, private_key)


def _page_key() -> str | None:
    """Return the page's key; None, with a notice, where it cannot be stored, so that a tab keeps its own chats."""
    from edgellm.http.middleware import page_key

    try:
        return page_key()
    except (InvalidOption, TrustUnusable) as error:
        say(f"The page stores no conversations: {error}", style="yellow")
        return None


def _api_key(path: Path | None) -> str:
    from edgellm.http.middleware import api_key

    file, key = api_key(path.expanduser() if path is not None else None)
    say(f"HTTP clients need the API key in {file}.", style="dim")
    return key


def _host_names(host: str) -> list[str]:
    """Return the names of a machine that listens at `host`: that address, or all its addresses if it is 0.0.0.0 or ::,
    and its host name."""
    from ipaddress import ip_address

    from edgellm.rpc.discovery.interfaces import own_hosts

    hosts = [host]
    with suppress(ValueError):
        if ip_address(host).is_unspecified:
            hosts = sorted(own_hosts())
    node = platform.node().partition(".")[0].lower()
    return [*hosts, *([node, f"{node}.local"] if node.replace("-", "").isalnum() and node.isascii() else [])]


def print_event(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {text}", style="yellow")
