"""The HTTP server of `edgellm serve`: its options, its credentials, and what is printed about it."""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from edgellm.cli.views.console import say
from edgellm.errors import InvalidOption, PortTaken

if TYPE_CHECKING:
    from edgellm.http.server import Credentials, HttpServer
    from edgellm.rpc.address import Address

PORT = 8080

Http = Annotated[bool, typer.Option("--http/--no-http", help="Whether to speak HTTP: OpenAI's API, and a page.")]
HttpHost = Annotated[
    str,
    typer.Option(metavar="HOST", help="Where to speak HTTP: this machine only, or one of its addresses, for who has "
                 "the key."),
]  # fmt: skip
HttpPort = Annotated[
    int | None,
    typer.Option(metavar="PORT", help="The port for HTTP; 0 lets the system choose.",
                 show_default=f"{PORT}, or a free one"),
]  # fmt: skip
KeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The API key that HTTP asks for; made there if missing. Off this machine one is "
                 "always asked for.", show_default="none on this machine"),
]  # fmt: skip
TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A certificate for HTTP off this machine, in PEM.",
                 show_default="one that is signed by itself"),
]  # fmt: skip
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="The key of that certificate, in PEM.")]
PlanFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A plan from `edgellm mesh plan --json`, for the page to draw.",
                 show_default="none"),
]  # fmt: skip
Replies = Annotated[
    int | None,
    typer.Option(metavar="N", help="Replies that are written at once over HTTP; each has memory of its own.",
                 show_default="2, a verifier 8"),
]  # fmt: skip
Waiting = Annotated[int, typer.Option(metavar="N", help="Requests that wait for one of these; more are refused.")]


@dataclass(frozen=True, slots=True)
class HTTPOptions:
    """The options of the command line for HTTP."""

    on: bool
    host: str
    port: int | None
    key_file: Path | None
    certificate: Path | None
    private_key: Path | None
    replies: int
    waiting: int
    paired_only: bool = False  # other programs here are not trusted either: a key is asked for on loopback


def start_server(options: HTTPOptions) -> HttpServer | None:
    """Start the server, and return it; None with --no-http. It answers that the model is
    being loaded until `HttpServer.open`.

    Raises:
        PortTaken: the port that was asked for is in use.
        InvalidOption, TrustUnusable: the server cannot be started with these options.
    """
    if not options.on:
        return None
    from edgellm.http.server import HttpServer
    from edgellm.rpc.address import Address

    if (options.certificate is None) != (options.private_key is None):
        raise InvalidOption("--tls-cert and --tls-key must be given together.", "Give both, or neither.")
    address = Address.of(options.host, PORT if options.port is None else options.port)
    names = [] if address.loopback else _host_names(address.host)
    credentials = None if address.loopback else _credentials(options, names)
    needs_key = options.key_file is not None or options.paired_only
    key = _api_key(options.key_file) if credentials is None and needs_key else None

    def start(at: Address) -> HttpServer:
        server = HttpServer(
            at, credentials=credentials, key=key, names=names, replies=options.replies, waiting=options.waiting,
            on_event=_print_event,
        )  # fmt: skip
        server.start()
        return server

    try:
        return start(address)
    except PortTaken:
        if options.port is not None:
            raise
        server = start(replace(address, port=0))
        say(f"Port {PORT} is taken, so HTTP is at {server.address.port}.", style="yellow")
        return server


@contextmanager
def http_server(options: HTTPOptions) -> Iterator[HttpServer | None]:
    """Start the server as `start_server` does, and stop it after the `with`, whatever happens in it."""
    server = start_server(options)
    try:
        yield server
    finally:
        if server is not None:
            server.stop(0)


class Server(Protocol):
    """A server that `until_stopped` can stop."""

    def request_stop(self, grace: float = ...) -> None: ...

    def wait(self, timeout: float | None = None) -> bool: ...


STOPS = "Ctrl-C stops it when it has finished what is in flight; a second one stops it at once."


def until_stopped(servers: Sequence[Server | None], hint: str = STOPS) -> None:
    """Wait for SIGINT or SIGTERM, then for requests in flight, one server after the other: an earlier one may use later
    ones. A second signal cuts that short. Print the `hint` once signals are handled."""
    left = [server for server in servers if server is not None]
    asked = 0

    def stop(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            left[0].request_stop()
        else:
            for server in left:
                server.request_stop(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    say(hint, style="dim")
    try:
        while left:
            while not left[0].wait(1.0):
                pass
            if len(left) > 1 and asked < 2:
                left[1].request_stop()
            left.pop(0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def served_name(model: str) -> str:
    """Return the name under which a model is served: as the user named it, of a file its stem."""
    return Path(model).stem if model.endswith(".gguf") or ("/" in model and Path(model).exists()) else model


def print_urls(server: HttpServer) -> None:
    """Print where the server is, now that it answers."""
    say(f"A page to talk to it: {server.url}/", style="bold")
    say(f"OpenAI's API: {server.url}/v1", style="bold")


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


def _api_key(path: Path | None) -> str:
    from edgellm.http.middleware import api_key

    file, key = api_key(path.expanduser() if path is not None else None)
    say(f"HTTP asks for the key in {file}.", style="dim")
    return key


def _host_names(host: str) -> list[str]:
    """Return the names of a machine that listens at `host`: that, or for 0.0.0.0 and :: its addresses, and its own
    name."""
    from ipaddress import ip_address

    from edgellm.rpc.discovery.interfaces import own_hosts

    hosts = [host]
    with suppress(ValueError):
        if ip_address(host).is_unspecified:
            hosts = sorted(own_hosts())
    node = platform.node().partition(".")[0].lower()
    return [*hosts, *([node, f"{node}.local"] if node.replace("-", "").isalnum() and node.isascii() else [])]


def _print_event(text: str) -> None:
    say(f"{time.strftime('%H:%M:%S')}  {text}", style="yellow")
