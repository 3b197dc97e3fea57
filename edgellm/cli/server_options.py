"""The options of `edgellm serve`, and which of its roles uses them."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import typer

from edgellm.cli import options
from edgellm.cli.options import option
from edgellm.errors import InvalidOption
from edgellm.rpc import DEFAULT_PORT

HTTP_PORT = 8080
Role: TypeAlias = Literal["pair", "verifier", "worker"]
LogLevel: TypeAlias = Literal["off", "error", "warning", "info", "debug"]
"""The levels of a log; each includes the levels before it."""


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """The role, and the models or stock servers that serve."""

    role: Role = option("pair")
    model: tuple[str, ...] = option(
        (), "MODEL", names=("-m", "--model"), shown=options.DEFAULT_VERIFIER,
    )  # fmt: skip
    upstream: tuple[str, ...] = option((), "URL[#MODEL]")
    sessions: int | None = option(None, "N", least=1, panel=options.DEVICES, shown="8, or as many as fit")
    keep_awake: str = option("0", "TIME|off", panel=options.DEVICES)
    log_level: LogLevel = option("off", panel="Output")

    @property
    def only_model(self) -> str | None:
        """Return the model that is named. Raise InvalidOption for several, which only a gateway has."""
        if len(self.model) > 1:
            raise InvalidOption(f"{len(self.model)} models are named: {', '.join(self.model)}.", "Give -m once.")
        return next(iter(self.model), None)


@dataclass(frozen=True, slots=True)
class ServedPair(options.PairOptions):
    """The models of a served pair."""

    draft: str = option(options.DEFAULT, "MODEL", shown=options.DEFAULT_DRAFT)
    verifier: str = option(
        options.DEFAULT, "MODEL|HOST:PORT|URL|auto", shown=options.DEFAULT_VERIFIER,
    )  # fmt: skip
    peer: tuple[str, ...] = option((), "DEVICE|HOST:PORT")
    prompt_cache: float = option(0.0, "GB", least=0.0, panel="Conversation")


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The options by which other devices reach this one."""

    host: str = option("127.0.0.1", "HOST")
    port: int = option(DEFAULT_PORT, "PORT")
    paired_only: bool = option(False, names=("--paired-only",), panel=options.DEVICES)
    announce: bool = option(True, panel=options.DEVICES)


@dataclass(frozen=True, slots=True)
class WorkerOptions(LinkOptions):
    """The options by which other devices reach this one, and store layers here."""

    memory: float | None = option(
        None, "GB", least=0.0, panel="Worker", shown="nine tenths of what is free at the start",
    )  # fmt: skip
    keep: float = option(300.0, "SECONDS", least=0.0, panel="Worker")
    store: float | None = option(None, "GB", least=0.0, panel="Worker", shown="half of what is free")
    rpc: bool = option(False)


_http = partial(option, panel="HTTP")


@dataclass(frozen=True, slots=True)
class HTTPOptions:
    """The options for HTTP."""

    http: bool = _http(True)
    http_host: str = option("127.0.0.1", "HOST")
    http_port: int | None = option(None, "PORT", shown=f"{HTTP_PORT}, or a free one")
    api_key_file: Path | None = option(None, "FILE", shown="none on this machine")
    tls_cert: Path | None = _http(None, "FILE", shown="a self-signed one")
    tls_key: Path | None = _http(None, "FILE")
    replies: int | None = _http(None, "N", shown="8, or as many as fit")
    waiting: int = _http(16, "N")
    allow_origin: tuple[str, ...] = _http((), "ORIGIN", shown="none")
    allow_host: tuple[str, ...] = _http((), "HOST", shown="its own names")
    strict: bool = _http(False, names=("--strict",))
    alias: tuple[str, ...] = _http((), "NAME=MODEL", shown="none")
    keep_alive: str = _http("5m", "TIME")
    embeddings: str | None = _http(None, "MODEL", shown="none")


def _names(record: type[Any]) -> set[str]:
    return {one.name for one in fields(record)}


_TEMPLATE = {*_names(options.ThinkOptions), "ctx_size", "batch_size"}  # options of a model that writes replies
OF_SERVERS = ("verifier_tier", "verifier_key_file")  # options of stock servers, of a pair or behind a gateway
_USES = {
    "pair": {"model", *_names(ServedPair), *_TEMPLATE, "keep_alive"},
    "verifier": {
        "model", *_names(LinkOptions), *_TEMPLATE, "draft", "sessions", "upstream", *OF_SERVERS
    },
    "worker": {"model", *_names(WorkerOptions)},
}  # fmt: skip
_OF_A_PAIR = {"host": "Use --http-host.", "port": "Use --http-port."}


def check_role(role: Role, ctx: typer.Context) -> None:
    """Refuse options on the command line that do not belong to this role, except that one may be switched off."""
    for name in sorted(set().union(*_USES.values()) - _USES[role]):
        if options.on_command_line(ctx, name) and ctx.params[name] is not False:
            roles = [one for one, uses in _USES.items() if name in uses]
            instead = _OF_A_PAIR.get(name) if role == "pair" else None
            raise InvalidOption(
                f"{options.dashed(name)} belongs to the role{'s' * (len(roles) > 1)} {' and '.join(roles)}.",
                instead or "Leave it out, or use another --role.",
            )
