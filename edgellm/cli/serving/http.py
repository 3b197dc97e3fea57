"""The HTTP server of `edgellm serve`: its credentials and messages."""

from __future__ import annotations

import gc
import platform
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from edgellm.cli.options.serve import HTTP_PORT, HTTPOptions
from edgellm.cli.views.console import say
from edgellm.errors import InvalidOption, PortTaken, TrustUnusable

if TYPE_CHECKING:
    from edgellm.engine.hardware import Hardware
    from edgellm.http.server import Credentials, HttpServer
    from edgellm.services.server.listener import Listener

    Server: TypeAlias = HttpServer | Listener


@contextmanager
def http_server(options: HTTPOptions, replies: int, *, paired_only: bool) -> Iterator[HttpServer | None]:
    """Start a server that writes up to `replies` at once, and stop it after the `with`; None with --no-http. Until
    `HttpServer.open` it answers that the model loads. With `paired_only` other programs on this machine need a key,
    too.

    Raises:
        PortTaken: the chosen port is in use.
        InvalidOption, TrustUnusable: the server cannot be started with these options.
    """
    if not options.http:
        yield None
        return
    from edgellm.http.middleware import checked_host
    from edgellm.http.model_host import keep_alive_seconds
    from edgellm.http.running_servers import recorded
    from edgellm.http.server import HttpConfig, HttpServer
    from edgellm.rpc.address import Address

    if (options.tls_cert is None) != (options.tls_key is None):
        raise InvalidOption("--tls-cert and --tls-key must be given together.", "Give both, or neither.")
    address = Address.of(options.http_host, HTTP_PORT if options.http_port is None else options.http_port)
    names = [] if address.loopback else _host_names(address.host)
    allowed = [checked_host(host) for host in options.allow_host]
    credentials = None if address.loopback else _credentials(options, names)
    needs_key = options.api_key_file is not None or paired_only
    key = _api_key(options.api_key_file) if credentials is None and needs_key else None
    config = HttpConfig(
        credentials, key, _page_key(), [*names, *allowed], options.allow_origin, replies, options.waiting,
        options.strict, keep_alive_seconds(options.keep_alive), print_event,
    )  # fmt: skip
    server = HttpServer(address, config)
    try:
        server.start()
    except PortTaken:
        if options.http_port is not None:
            raise
        server = HttpServer(replace(address, port=0), config)
        server.start()
        say(f"Port {HTTP_PORT} is in use; HTTP uses port {server.address.port}.", style="yellow")
    try:
        with recorded(server.reached_at, server.address.port, server.certificate):
            yield server
    finally:
        server.stop(0)


STOP_HINT = "Ctrl-C finishes requests in flight, then stops; a second one stops at once."


def until_stopped(servers: Sequence[Server | None], hint: str = STOP_HINT) -> None:
    """Wait for SIGINT or SIGTERM, then stop one server after the other, each once its requests in flight are finished,
    since an earlier one may use later ones. A second signal stops all at once. Print `hint` once signals are handled.
    """
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


@contextmanager
def embedding(server: HttpServer | None, model: str | None, hardware: Hardware) -> Iterator[None]:
    """Load an embedding model, if one is named, and have `server` embed with it."""
    if model is None:
        yield
        return
    if server is None:
        raise InvalidOption("--embeddings is for HTTP, and --no-http is given.", "Leave one of them out.")
    from edgellm.engine import Model
    from edgellm.engine.embedding.embedder import Embedder
    from edgellm.engine.model import LoadSpec
    from edgellm.http.model_host import ServedEmbedder
    from edgellm.storage import name_of, resolve

    path = resolve(model)
    with Model.load(path, LoadSpec(hardware, embeds=True)) as loaded, Embedder(loaded) as embedder:
        server.models.open_embedder(ServedEmbedder(name_of(path), embedder))
        say(f"Embeddings: {server.url}/v1/embeddings, {embedder.width} numbers of {name_of(path)}", style="dim")
        yield


def print_urls(server: HttpServer, room: int | None = None) -> None:
    """Print the addresses of the server, and how many replies it writes at once. There may be memory for `room`."""
    say(f"Web page: {server.page_url}", style="bold")
    say(f"OpenAI's API: {server.url}/v1", style="bold")
    wanted, waiting = server.config.replies, server.config.waiting
    most = min(wanted, room or wanted)
    replies = f"{most} replies are" if most > 1 else "1 reply is"
    why = "each takes memory and slows the others" if most == wanted else "there is no memory for more"
    say(f"{replies} written at once (--replies), as {why}; {waiting} more requests wait (--waiting).", style="dim")


def _credentials(options: HTTPOptions, names: Sequence[str]) -> Credentials:
    from edgellm.http.middleware import http_folder
    from edgellm.http.server import Credentials
    from edgellm.rpc.trust.identity import web_certificate

    key = _api_key(options.api_key_file)
    if options.tls_cert is not None and options.tls_key is not None:
        return Credentials(key, options.tls_cert.expanduser(), options.tls_key.expanduser())
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

    file, key = api_key(None if path is None else path.expanduser())
    say(f"HTTP clients need the API key in {file}.", style="dim")
    return key


def is_unspecified(host: str) -> bool:
    """Return whether a server that listens at `host` is reached by all addresses of its machine."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _host_names(host: str) -> list[str]:
    """Return the names of a machine that listens at `host`: that address, or for 0.0.0.0 and :: all addresses, and its
    host name."""
    from edgellm.rpc.discovery.interfaces import own_hosts

    hosts = sorted(own_hosts()) if is_unspecified(host) else [host]
    node = platform.node().partition(".")[0].lower()
    return [*hosts, *([node, f"{node}.local"] if node.replace("-", "").isalnum() and node.isascii() else [])]


def print_event(text: str, style: str = "yellow") -> None:
    """Print what has happened, with its time."""
    say(f"{time.strftime('%H:%M:%S')}  {text}", style=style)
