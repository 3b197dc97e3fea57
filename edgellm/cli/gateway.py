"""The gateway of `edgellm serve --upstream`: stock servers verify, and no model is computed here."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from edgellm.cli.announcing import print_server_event, say_how_to_use, serve_until_stopped
from edgellm.cli.http_options import print_urls
from edgellm.cli.model_options import HardwareOptions, on_command_line
from edgellm.cli.views.console import say
from edgellm.errors import EdgeError, InvalidOption

if TYPE_CHECKING:
    from edgellm.http.server import HttpServer
    from edgellm.llm import LLM
    from edgellm.services.server.gateway_server import ServedGatewayModel
    from edgellm.spec.params import ReplyOptions
    from edgellm.upstream.gateway.opening import GatewayModel
    from edgellm.upstream.opening import UpstreamOptions
    from edgellm.verifier.in_process import ColocatedVerifier


def check_gateway(ctx: typer.Context, model: list[str] | None, hardware: HardwareOptions) -> None:
    """Refuse a gateway without a tokenizer, and options for a model that it does not load."""
    if on_command_line(ctx, "draft"):
        raise InvalidOption("--draft has no meaning with --upstream: no model is computed here.", "Leave it out.")
    if not model:
        raise InvalidOption(
            "--upstream needs a model with the server's tokenizer.",
            "Name one with -m, such as the devices' draft model; nothing but its tokenizer is loaded.",
        )
    if on_command_line(ctx, "sessions"):
        raise InvalidOption("--sessions has no meaning with --upstream: its servers keep the texts.", "Leave it out.")
    for name, given in hardware.given.items():
        if given:
            raise InvalidOption(
                f"--{name.replace('_', '-')} has no meaning with --upstream: no model is computed here.",
                "Leave it out.",
            )


def _pair_over(model: GatewayModel, verifier: ColocatedVerifier) -> LLM:
    """Return a pair without a draft model, whose replies the servers of a gateway's `model` write beside those of
    devices, as `verifier`."""
    from edgellm.llm import LLM
    from edgellm.llm.llm import EXTRA_TOKENS
    from edgellm.llm.model_loading import OpenedVerifier, sampling_behind

    pool = model.pool
    where = ", ".join(str(one.url) for one in pool.servers)
    finding = "; ".join(one.opened.finding for one in pool.servers)
    remote = OpenedVerifier(
        verifier, lambda: pool.identity, pool.ready, "", where, model.text.n_vocab,
        sampling_behind(verifier, model.text), finding,
    )  # fmt: skip
    return LLM(
        model.text, draft=None, verifier=verifier, model_hash=remote.model_hash, remote=remote, extra=EXTRA_TOKENS
    )


def run_gateway(
    http: HttpServer | None, addresses: list[str], options: UpstreamOptions | None, tokenizers: list[str], host: str,
    port: int, paired_only: bool, announce: bool, interface: list[str] | None, defaults: ReplyOptions,
) -> None:  # fmt: skip
    """Serve devices, and HTTP clients with `http`, by the stock servers at these addresses, until Ctrl-C."""
    from edgellm.http.model_host import ServedModel
    from edgellm.services.server.gateway_server import TIMING, serve_gateway
    from edgellm.storage import resolve
    from edgellm.upstream.gateway.metrics import GatewayCollector
    from edgellm.upstream.opening import UpstreamOptions

    options = replace(options or UpstreamOptions(), timing=TIMING)
    server = serve_gateway(
        addresses, [resolve(one) for one in tokenizers], options=options, host=host, port=port,
        paired_only=paired_only, on_event=print_server_event,
    )  # fmt: skip

    def say_how() -> None:
        several = len(server.models) > 1
        say_how_to_use(server, interface, [model.name for model in server.models] if several else ())

    with ExitStack() as closing:
        if http is not None and not server.models:
            http.open_without_model("None of the servers behind this gateway has answered yet.")

        def open_model(served: ServedGatewayModel) -> None:
            model = served.model
            for one in model.pool.servers:
                named = f"{model.name}: " * (len(server.models) > 1)
                say(f"{named}{one.opened.finding}.", style="dim")
                for notice in one.opened.notices:
                    say(notice)
            if http is not None:
                pair = closing.enter_context(_pair_over(model, served.verifying.inside()))
                pair.check_options(defaults)
                over_http = ServedModel(pair, pair.name, in_turns=False, options=defaults)
                (http.open if model is server.models[0] else http.add)(over_http)

        def open_late(served: ServedGatewayModel) -> None:
            try:
                open_model(served)
            except EdgeError as error:
                say(f"{served.model.name} is not served over HTTP. {error}", style="yellow")
            if len(server.models) > 1:  # else it is as it was
                say_how()

        server.watch(open_model, open_late)
        say_how()
        if http is not None:
            http.add_metrics(GatewayCollector(lambda: server.backends, lambda: len(server.away)))
            print_urls(http)
        serve_until_stopped(server, http, interface, announce=announce)
