"""The options that several commands share: the models, where the verifier is, and how models think."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.errors import EdgeError, InvalidOption
from edgellm.flags import AS_MODEL, flag

if TYPE_CHECKING:
    from edgellm.upstream.opening import UpstreamOptions

DEFAULT = "default"  # a copy: `edgellm.storage.default_pair` is slow to import
DEFAULT_DRAFT, DEFAULT_VERIFIER = "smollm2:draft", "smollm2:135m"  # names on help pages
DEVICES = "Several devices"
DRAFTS = "Drafts and verification"
"""Sections of help pages."""
TIERS = "score|fan-out|continue"
_INTERFACE = "Network to use; can be given several times, or set with EDGELLM_INTERFACE."
INTERRUPTED = 130
"""The exit code of a reply that its user has stopped."""
_THINK = {"auto": None, "on": True, "off": False}

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Interfaces = Annotated[
    list[str] | None,
    typer.Option(
        "--interface", metavar="NAME|IP", show_default="those of the home", rich_help_panel=DEVICES, help=_INTERFACE
    ),
]


def interface_flag() -> Any:
    """Return the field of a record that has `Interfaces`."""
    return flag((), _INTERFACE, "NAME|IP", panel=DEVICES, shown="those of the home")


Names = Iterator[tuple[str, str]]
"""Names for shell completion, each with a line about it."""


def model_names(incomplete: str) -> Names:
    """Yield the models on this machine, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import list_models

    with suppress(OSError, EdgeError):
        for model in list_models():
            if model.name.lower().startswith(incomplete.lower()):
                yield model.name, f"{model.origin}, {size(model.size)}"


def catalog_names(incomplete: str) -> Names:
    """Yield the models of the catalogue, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import catalog

    for model in catalog().models.values():
        if model.name.startswith(incomplete.lower()):
            yield model.name, f"{model.title}, {size(model.size)}"


def known_models(incomplete: str) -> Names:
    """Yield the models on this machine, then those of the catalogue."""
    yield from model_names(incomplete)
    yield from catalog_names(incomplete)


def peer_names(incomplete: str) -> Names:
    """Yield the paired devices, with their short IDs."""
    from edgellm.rpc.trust.peer_store import Peers

    with suppress(OSError, EdgeError):
        for peer in Peers().all():
            if peer.name.lower().startswith(incomplete.lower()):
                yield peer.name, peer.id.short


def conversation_ids(incomplete: str) -> Names:
    """Yield the conversations, with their first questions."""
    from edgellm.cli.views.console import one_line
    from edgellm.storage.chat_log import Conversations

    with suppress(EdgeError):
        for one in Conversations().all():
            if one.id.startswith(incomplete):
                yield one.id, one_line(one.title)[:60]


class Engine(enum.StrEnum):
    """The engines that spread a model over devices."""

    AUTO = "auto"
    STAGES = "stages"
    RPC = "rpc"


ENGINES = (
    "stages: each device computes its own layers of the file. rpc: llama.cpp's RPC, also for models whose layers "
    "cannot be cut apart. auto: stages where layers can be cut, else rpc."
)
"""The help text of the option that chooses an engine."""


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The models of a conversation, and where the verifier is."""

    draft: str = flag(
        DEFAULT, "Small model that drafts, or an EAGLE-3 head of the verifier; 'none': the verifier writes alone.",
        "MODEL", names=("-m", "--draft"), variable="EDGELLM_DRAFT", shown=DEFAULT_DRAFT, complete=model_names,
    )  # fmt: skip
    verifier: str = flag(
        DEFAULT, "Bigger model that verifies, or the address of a served one (http://... for vLLM, llama-server and "
        "others); 'auto': the best paired device; 'none': the draft model writes alone.", "MODEL|HOST:PORT|URL|auto",
        variable="EDGELLM_VERIFIER", shown=DEFAULT_VERIFIER, complete=model_names,
    )  # fmt: skip
    peer: tuple[str, ...] = flag(
        (), "Paired device to use as verifier (name or address); the best one if given several times.",
        "DEVICE|HOST:PORT", complete=peer_names,
    )  # fmt: skip
    mesh: str | None = flag(
        None, "Split the verifier over devices, as in mesh run; 'auto': by the best split. --peer then adds workers by "
        "their addresses.", "SPLIT|FILE.toml|auto", panel=DEVICES,
    )  # fmt: skip
    engine: Engine = flag(
        Engine.AUTO,
        ENGINES,
        "auto|stages|rpc",
    )
    verifier_tier: str | None = flag(
        None, "How a stock server (http://...) verifies.", TIERS, panel=DRAFTS, shown="the best way that it has"
    )
    verifier_key_file: Path | None = flag(
        None, "File with a stock server's key.", "FILE", panel=DRAFTS, shown="$EDGELLM_VERIFIER_KEY"
    )

    def upstream(self) -> UpstreamOptions | None:
        """Return the options for a stock server, None without any. Raises InvalidOption for an unknown tier."""
        return upstream_options(self.verifier_tier, self.verifier_key_file)


def upstream_options(
    tier: str | None, key_file: Path | None, option: str = "--verifier-tier"
) -> UpstreamOptions | None:
    """Return the options for a stock server, None without any. Raises InvalidOption for an unknown tier from
    `option`."""
    if tier is None and key_file is None:
        return None
    from edgellm.upstream.opening import UpstreamOptions
    from edgellm.upstream.rows import Tier

    if tier is not None and tier not in set(Tier):
        raise InvalidOption(f"{option} is {tier!r}.", f"Choose one of {', '.join(Tier)}.")
    return UpstreamOptions(None if tier is None else Tier(tier), None if key_file is None else key_file.expanduser())


@dataclass(frozen=True, slots=True)
class ThinkOptions:
    """The options for thinking before the answer."""

    think: str = flag(
        "auto", "Have the model think before it answers; N: for at most N tokens. auto: as its chat template does.",
        "auto|on|off|N",
    )  # fmt: skip
    reasoning_effort: str | None = flag(
        None, "Level of thinking, for models that know levels: low, medium, high.", "LEVEL", panel="Thinking",
        shown=AS_MODEL,
    )  # fmt: skip
    template_arg: tuple[str, ...] = flag(
        (), "Argument for the model's chat template, such as enable_thinking=false; can be given several times.",
        "NAME=VALUE", panel="Thinking",
    )  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """Return the fields of `ReplyOptions` for these options.

        Raises:
            InvalidOption: `think` is neither a word nor a number, or an argument is not NAME=VALUE.
        """
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {"think": _think(self.think), "template_args": effort | dict(map(_argument, self.template_arg))}


def _think(text: str) -> bool | int | None:
    if text in _THINK:
        return _THINK[text]
    if not re.fullmatch("[0-9]{1,9}", text):
        raise InvalidOption(f"--think is {text!r}.", "Choose auto, on, off, or a number of tokens.")
    return int(text)


def _argument(text: str) -> tuple[str, object]:
    """Return the name and the value of an argument; a value that is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidOption(
            f"--template-arg is {text!r}.",
            "Write NAME=VALUE, such as enable_thinking=false; VALUE is JSON or plain text.",
        )
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
