"""The options of `edgellm serve`, and which of its roles uses them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import typer

from edgellm.cli.options import (
    DEFAULT,
    DEFAULT_DRAFT,
    DEFAULT_VERIFIER,
    DEVICES,
    DRAFTS,
    TIERS,
    PairOptions,
    ThinkOptions,
    dashed,
    interface_flag,
    model_names,
    on_command_line,
    peer_names,
)  # fmt: skip
from edgellm.errors import InvalidOption
from edgellm.flags import flag

HTTP_PORT = 8080
PORT = 50151  # a copy: `edgellm.rpc.channel` is slow to import
Role: TypeAlias = Literal["pair", "verifier", "worker"]
LogLevel: TypeAlias = Literal["off", "error", "warning", "info", "debug"]
"""The levels of a log; each includes the levels before it."""


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """The role, and the models or stock servers that serve."""

    role: Role = flag(
        "pair", "pair: answer over HTTP, as edgellm chat does. verifier: also verify drafts of other devices. "
        "worker: compute layers of models that are split over devices.",
    )  # fmt: skip
    model: tuple[str, ...] = flag(
        (), "Verifier model; for a worker, a model that it has whole; with --upstream one with the server's tokenizer, "
        "several times for several tokenizers.", "MODEL", names=("-m", "--model"), complete=model_names,
        shown=DEFAULT_VERIFIER,
    )  # fmt: skip
    upstream: tuple[str, ...] = flag(
        (), "Role verifier: stock server (http://...) that verifies in place of a model here, with the tokenizer of "
        "--model; several with one model share the work and stand in for each other.", "URL[#MODEL]",
    )  # fmt: skip
    upstream_tier: str | None = flag(
        None, "How the servers of --upstream verify.", TIERS, panel=DRAFTS, shown="the best way that each has"
    )
    upstream_key_file: Path | None = flag(
        None, "File with the key of the servers of --upstream.", "FILE", panel=DRAFTS, shown="$EDGELLM_VERIFIER_KEY"
    )
    sessions: int | None = flag(
        None, "Role verifier: replies of devices whose text it keeps in memory at once.", "N", least=1, panel=DEVICES,
        shown="8, or as many as fit",
    )  # fmt: skip
    log_level: LogLevel = flag(
        "off", "Log requests, connections and lost devices to stderr; never a prompt.", panel="Output"
    )

    @property
    def only_model(self) -> str | None:
        """Return the model that is named. Raise InvalidOption for several, which only a gateway has."""
        if len(self.model) > 1:
            raise InvalidOption(f"{len(self.model)} models are named: {', '.join(self.model)}.", "Give -m once.")
        return next(iter(self.model), None)


@dataclass(frozen=True, slots=True)
class ServedPair(PairOptions):
    """The models of a served pair."""

    draft: str = flag(
        DEFAULT, "Role pair: small model that drafts, or 'none'. Roles pair and verifier: an EAGLE-3 head of the "
        "verifier.", "MODEL", complete=model_names, shown=DEFAULT_DRAFT,
    )  # fmt: skip
    verifier: str = flag(
        DEFAULT, "Role pair: bigger model that verifies, or its address.", "MODEL|HOST:PORT|URL|auto",
        complete=model_names, shown=DEFAULT_VERIFIER,
    )  # fmt: skip
    peer: tuple[str, ...] = flag(
        (), "Role pair: paired device to use as verifier; with --mesh the address of a worker.", "DEVICE|HOST:PORT",
        complete=peer_names,
    )  # fmt: skip
    prompt_cache: float = flag(
        0.0, "Pair: disk space for what models have read when they are closed, so that conversations go on at once; 0: "
        "nothing of a request is written to disk.", "GB", least=0.0, panel="Conversation",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The options by which other devices reach this one."""

    host: str = flag(
        "127.0.0.1", "Address to listen on: by default for this machine only, any other for paired devices.", "HOST"
    )
    port: int = flag(PORT, "TCP port; 0: the system chooses.", "PORT")
    paired_only: bool = flag(
        False, "Require pairing (mutual TLS) on this machine too, and an API key.", names=("--paired-only",),
        panel=DEVICES,
    )  # fmt: skip
    announce: bool = flag(True, "Announce the server to paired devices by multicast DNS.", panel=DEVICES)
    interface: tuple[str, ...] = interface_flag()


@dataclass(frozen=True, slots=True)
class WorkerOptions(LinkOptions):
    """The options by which other devices reach this one, and store layers here."""

    memory: float | None = flag(
        None, "Worker: memory for layers and caches.", "GB", least=0.0, panel="Worker",
        shown="nine tenths of what is free at the start",
    )  # fmt: skip
    keep: float = flag(
        300.0, "Worker: time for which unused layers stay in memory.", "SECONDS", least=0.0, panel="Worker"
    )
    store: float | None = flag(
        None, "Worker: disk space for uploaded layers.", "GB", least=0.0, panel="Worker", shown="half of what is free"
    )
    rpc: bool = flag(
        False, "Worker: also serve llama.cpp's RPC to paired devices that may compute here. It runs what they send, "
        "with your rights.",
    )  # fmt: skip


_http = partial(flag, panel="HTTP")


@dataclass(frozen=True, slots=True)
class HTTPOptions:
    """The options for HTTP."""

    http: bool = _http(True, "Serve HTTP: OpenAI's API and others, and a web page.")
    http_host: str = flag(
        "127.0.0.1", "Address for HTTP. By default only this machine is served; others need the API key.", "HOST"
    )
    http_port: int | None = flag(
        None, "Port for HTTP; 0: the system chooses.", "PORT", shown=f"{HTTP_PORT}, or a free one"
    )
    api_key_file: Path | None = flag(
        None, "API key that HTTP clients must send; generated if the file is missing. Clients on other machines always "
        "need one.", "FILE", shown="none on this machine",
    )  # fmt: skip
    tls_cert: Path | None = _http(
        None, "TLS certificate for HTTP from other machines, in PEM.", "FILE", shown="a self-signed one"
    )
    tls_key: Path | None = _http(None, "Private key of the certificate, in PEM.", "FILE")
    replies: int | None = _http(
        None, "Replies generated at once over HTTP; each needs memory.", "N", shown="2; for a verifier 8"
    )
    waiting: int = _http(16, "Requests that may wait; more are refused.", "N")
    allow_origin: tuple[str, ...] = _http(
        (), "Origin of web pages elsewhere that may use HTTP here, such as https://chat.example.org; can be given "
        "several times.", "ORIGIN", shown="none",
    )  # fmt: skip
    allow_host: tuple[str, ...] = _http(
        (), "Further name by which HTTP clients may call this machine, such as host.docker.internal; can be given "
        "several times.", "HOST", shown="its own names",
    )  # fmt: skip
    strict: bool = _http(
        False, "Refuse HTTP requests with unknown parameters, which otherwise have no effect.", names=("--strict",)
    )
    keep_alive: str = _http(
        "5m", "Role pair: time such as 5m, 1h or -1 (no end) for which a model that a request named stays in memory "
        "unused. The pair itself stays until another model needs its memory.", "TIME",
    )  # fmt: skip
    embeddings: str | None = _http(
        None, "Embedding model for /v1/embeddings, beside the model that replies.", "MODEL", shown="none",
        complete=model_names,
    )  # fmt: skip
    plan: Path | None = _http(
        None, "Plan from `edgellm mesh plan --json` for the web page to draw.", "FILE", shown="none"
    )


def _names(record: type[Any]) -> set[str]:
    return {one.name for one in fields(record)}


_TEMPLATE = {*_names(ThinkOptions), "ctx_size", "batch_size"}  # options of a model that writes replies
_USES = {
    "pair": {*_names(ServedPair), *_TEMPLATE, "plan", "keep_alive"},
    "verifier": {
        "model", *_names(LinkOptions), *_TEMPLATE, "draft", "sessions", "upstream", "upstream_tier", "upstream_key_file"
    },
    "worker": {"model", *_names(WorkerOptions)},
}  # fmt: skip
_OF_A_PAIR = {"model": "Use --draft and --verifier.", "host": "Use --http-host.", "port": "Use --http-port."}


def check_role(role: Role, ctx: typer.Context) -> None:
    """Refuse options on the command line that do not belong to this role, except that one may be switched off."""
    for name in sorted(set().union(*_USES.values()) - _USES[role]):
        if on_command_line(ctx, name) and ctx.params[name] is not False:
            roles = [one for one, uses in _USES.items() if name in uses]
            instead = _OF_A_PAIR.get(name) if role == "pair" else None
            raise InvalidOption(
                f"{dashed(name)} belongs to the role{'s' * (len(roles) > 1)} {' and '.join(roles)}.",
                instead or "Leave it out, or use another --role.",
            )
