"""`edgellm serve`: serve a pair, a verifier or layers, and announce that to other devices.

Loggers have the names of their modules. No prompt, no token, no key and no pairing code is ever logged.
"""

import logging

import typer

from edgellm.cli import options
from edgellm.cli.options import VERIFIER, HardwareOptions, ThinkOptions, with_records
from edgellm.cli.server_options import (
    OF_SERVERS,
    HTTPOptions,
    LogLevel,
    RoleOptions,
    ServedPair,
    WorkerOptions,
    check_role,
)
from edgellm.cli.views.console import print_event
from edgellm.errors import InvalidOption
from edgellm.spec.params import ReplyOptions


class _OneLine(logging.Formatter):
    """A formatter with one line per record, so that text from another device cannot forge a second one."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def log_to_stderr(level: LogLevel) -> None:
    """Log edgellm's records of `level` and above to stderr, and those of libraries from one level higher."""
    if level == "off":
        return
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.disable(logging.NOTSET)
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=min(number + 10, logging.ERROR), handlers=[handler], force=True)
    logging.getLogger("edgellm").setLevel(number)


@with_records
def serve(
    ctx: typer.Context,
    served: RoleOptions,
    models: ServedPair,
    http: HTTPOptions,
    link: WorkerOptions,
    think: ThinkOptions,
    hardware: HardwareOptions,
) -> None:
    from edgellm.cli import http_serving, serving
    from edgellm.http.model_host import keep_alive_seconds
    from edgellm.llm.pair_stats import tidy
    from edgellm.sleeping import AWAKE

    log_to_stderr(served.log_level)
    if served.keep_awake != "off":
        AWAKE.begin(keep_alive_seconds(served.keep_awake, "--keep-awake"), print_event)
    tidy()
    replies, at_once = ReplyOptions(**think.fields()), 8 if http.replies is None else http.replies
    check_role(served.role, ctx)
    if served.role == "verifier" and not served.upstream:
        options.refuse_given(ctx, OF_SERVERS, "belongs to --upstream", "Name a server with --upstream URL.")
    if served.role == "pair" and not http.http:
        raise InvalidOption("A pair is served over HTTP only.", "Leave --no-http out, or use --role verifier.")
    run = {
        "pair": serving.serve_pair,
        "verifier": serving.serve_gateway if served.upstream else serving.serve_verifier,
        "worker": serving.serve_worker,
    }[served.role]
    with (
        http_serving.http_server(http, at_once, paired_only=link.paired_only) as server,
        http_serving.embedding(server, http.embeddings, hardware.of(VERIFIER)),
    ):
        run(ctx, serving.Asked(served, models, http, link, hardware, replies, at_once), server)
