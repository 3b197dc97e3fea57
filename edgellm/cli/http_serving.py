"""The HTTP server of `edgellm serve`: its address, keys, certificate and embedding model, and what is said of it."""

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import segno
from rich.text import Text

from edgellm.cli.options import assigned
from edgellm.cli.server_options import HTTP_PORT, HTTPOptions
from edgellm.cli.views.console import err, is_terminal, print_event, say
from edgellm.engine import Model
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.errors import InvalidOption, PortTaken, TrustUnusable
from edgellm.http.middleware import HttpConfig, api_key, checked_host, http_folder, page_key
from edgellm.http.model_host import ServedEmbedder, keep_alive_seconds
from edgellm.http.running_servers import RunningServer, recorded
from edgellm.http.server import HttpServer
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.interfaces import chosen_hosts, own_hosts
from edgellm.rpc.trust.identity import pem_id, web_certificate
from edgellm.storage.model_files import name_of, resolve


@contextmanager
def http_server(options: HTTPOptions, replies: int, *, paired_only: bool) -> Iterator[HttpServer | None]:
    """Yield a server that writes up to `replies` at once, without a model yet; None with --no-http."""
    if not options.http:
        yield None
        return
    if (options.tls_cert is None) != (options.tls_key is None):
        raise InvalidOption("--tls-cert and --tls-key must be given together.", "Give both, or neither.")
    address = Address.of(options.http_host, HTTP_PORT if options.http_port is None else options.http_port)
    names = [] if address.loopback else _host_names(address)
    allowed = [checked_host(host) for host in options.allow_host]
    tls = file = key = None
    if not address.loopback:
        given = options.tls_cert and options.tls_key and (options.tls_cert.expanduser(), options.tls_key.expanduser())
        tls = given or web_certificate(http_folder(), names)
    if options.api_key_file is not None or paired_only or not address.loopback:
        file, key = api_key(options.api_key_file and options.api_key_file.expanduser())
    config = HttpConfig(
        tls, key, _page_key(), [*names, *allowed],
        options.allow_origin, replies, options.waiting, options.strict, keep_alive_seconds(options.keep_alive),
        print_event, dict(assigned("--alias", one, "NAME=MODEL") for one in options.alias),
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
    if file is not None:
        say(f"HTTP clients need the API key in {file}.", style="dim")
    if tls is not None and options.tls_cert is None:
        say(f"Clients must trust the certificate {tls[0]}, as with curl --cacert.", style="dim")
    try:
        with recorded(server.reached_at, server.address.port, server.certificate):
            yield server
    finally:
        server.stop(0)


@contextmanager
def embedding(server: HttpServer | None, model: str | None, hardware: Hardware) -> Iterator[None]:
    """Load an embedding model, if one is named, and have `server` embed with it."""
    if model is None:
        yield
        return
    if server is None:
        raise InvalidOption("--embeddings is for HTTP, and --no-http is given.", "Leave one of them out.")
    from edgellm.engine.embedding.embedder import Embedder  # an installation may be without it

    path = resolve(model)
    with Model.load(path, LoadSpec(hardware)) as loaded, Embedder(loaded) as embedder:
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
    if replace(server.address, host=server.reached_at).loopback:
        say("A phone reaches the page with --http-host 0.0.0.0, and a code to scan is shown then.", style="dim")
    elif server.config.page_key is not None and is_terminal(sys.stderr):
        show_phone_code(server, server.keys.new_code(), server.keys.CODE_SECONDS)
    else:
        say("Pair a phone with the page: edgellm pair", style="dim")


def show_phone_code(server: HttpServer | RunningServer, code: str, seconds: float) -> None:
    """Print the link by which a phone gets the page and a key to it; on a terminal that has room for it as a QR code,
    which is light on dark where there are no colours."""
    link, console, picture = f"{server.url}/#pair={code}", err(), StringIO()
    segno.make(link, error="l", micro=False).terminal(picture, border=2, compact=True)
    lines = picture.getvalue().splitlines()
    if shown := console.is_terminal and console.width > len(lines[0]) and console.encoding.startswith("utf"):
        say("\nOn a phone, scan this code:\n")
        for line in lines:
            console.print(Text.assemble("    ", (line, "#ffffff on #000000")), soft_wrap=True)
    say("\nor open this link:" if shown else "On a phone, open this link:")
    say(f"\n    {link}\n", style="bold cyan")
    say(f"It is for one phone, within {seconds / 60:.0f} minutes; `edgellm pair` shows a new one.", style="dim")
    if server.certificate:
        found = pem_id(Path(server.certificate).read_bytes())
        say(f"The phone may warn of the certificate, whose SHA-256 begins {str(found)[:16]}.", style="dim")


def _page_key() -> str | None:
    """Return the page's key; None, with a notice, where it cannot be stored, so that a tab keeps its own chats."""
    try:
        return page_key()
    except (InvalidOption, TrustUnusable) as error:
        say(f"The page stores no conversations: {error}", style="yellow")
        return None


def _host_names(address: Address) -> list[str]:
    """Return the names of a machine that listens at `address`, or at all of its own, those in the home first."""
    hosts = [address.host]
    if address.unspecified:
        hosts = list(dict.fromkeys([*chosen_hosts(), *sorted(own_hosts())]))
    node = platform.node().partition(".")[0].lower()
    return [*hosts, *([node, f"{node}.local"] if node.replace("-", "").isalnum() and node.isascii() else [])]
