"""The options that several commands share: the models, where the verifier is, and how models think."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from edgellm.errors import EdgeError, InvalidOption
from edgellm.flags import AS_MODEL, Completion, flag

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

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking.")]
Interfaces = Annotated[
    list[str] | None,
    typer.Option(
        "--interface", metavar="NAME|IP", show_default="those of the home", rich_help_panel=DEVICES, help=_INTERFACE
    ),
]


def interface_flag() -> Any:
    """Return the field of a record that has `Interfaces`."""
    return flag((), _INTERFACE, "NAME|IP", panel=DEVICES, shown="those of the home")


def _completes(known: Callable[[], Iterable[tuple[str, str]]]) -> Completion:
    """Return the shell completion by names that are `known`, each with a line about it."""

    def complete(incomplete: str) -> Iterator[tuple[str, str]]:
        with suppress(OSError, EdgeError):
            yield from (one for one in known() if one[0].lower().startswith(incomplete.lower()))

    return complete


@_completes
def model_names() -> Iterator[tuple[str, str]]:
    """Yield the models on this machine, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import list_models

    yield from ((model.name, f"{model.origin}, {size(model.size)}") for model in list_models())


@_completes
def catalog_names() -> Iterator[tuple[str, str]]:
    """Yield the models of the catalogue, with their sizes."""
    from edgellm.cli.views.console import size
    from edgellm.storage import catalog

    yield from ((model.name, f"{model.title}, {size(model.size)}") for model in catalog().models.values())


def known_models(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the models on this machine, then those of the catalogue."""
    yield from model_names(incomplete)
    yield from catalog_names(incomplete)


@_completes
def peer_names() -> Iterator[tuple[str, str]]:
    """Yield the paired devices, with their short IDs."""
    from edgellm.rpc.trust.peer_store import Peers

    yield from ((peer.name, peer.id.short) for peer in Peers().all())


@_completes
def conversation_ids() -> Iterator[tuple[str, str]]:
    """Yield the conversations, with their first questions."""
    from edgellm.cli.views.console import one_line
    from edgellm.storage.chat_log import Conversations

    yield from ((one.id, one_line(one.title)[:60]) for one in Conversations().all())


Engine: TypeAlias = Literal["auto", "stages", "rpc"]
"""The engines that spread a model over devices."""
ENGINES = (
    "stages: each device computes its own layers of the file. rpc: llama.cpp's RPC, also for models whose layers "
    "cannot be cut apart. auto: stages where layers can be cut, else rpc."
)


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
    engine: Engine = flag("auto", ENGINES, "auto|stages|rpc")
    verifier_tier: str | None = flag(
        None, "How a stock server (http://...) verifies.", TIERS, panel=DRAFTS, shown="the best way that it has"
    )
    verifier_key_file: Path | None = flag(
        None, "File with a stock server's key.", "FILE", panel=DRAFTS, shown="$EDGELLM_VERIFIER_KEY"
    )

    def upstream(self) -> UpstreamOptions | None:
        """Return the options for a stock server, None without any. Raises InvalidOption for an unknown tier."""
        return upstream_options(self.verifier_tier, self.verifier_key_file)


def upstream_options(tier: str | None, key: Path | None, option: str = "--verifier-tier") -> UpstreamOptions | None:
    """Return the options for a stock server with a file with its `key`, None without any. Raises InvalidOption for an
    unknown tier from `option`."""
    if tier is None and key is None:
        return None
    from edgellm.upstream.opening import UpstreamOptions
    from edgellm.upstream.rows import Tier

    if tier is not None and tier not in set(Tier):
        raise InvalidOption(f"{option} is {tier!r}.", f"Choose one of {', '.join(Tier)}.")
    return UpstreamOptions(None if tier is None else Tier(tier), None if key is None else key.expanduser())


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
        """Return the fields of `ReplyOptions` for these options. Raise InvalidOption where `think` is neither a word
        nor a number, or an argument is not NAME=VALUE."""
        words: dict[str, bool | None] = {"auto": None, "on": True, "off": False}
        think: bool | int | str | None = words.get(self.think, self.think)
        if isinstance(think, str):
            if not re.fullmatch("[0-9]{1,9}", think):
                raise InvalidOption(f"--think is {think!r}.", "Choose auto, on, off, or a number of tokens.")
            think = int(think)
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {"think": think, "template_args": effort | dict(map(_argument, self.template_arg))}


def _argument(text: str) -> tuple[str, object]:
    """Return the name and the value of an argument; a value that is no JSON is a text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        next_step = "Write NAME=VALUE, such as enable_thinking=false; VALUE is JSON or plain text."
        raise InvalidOption(f"--template-arg is {text!r}.", next_step)
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
