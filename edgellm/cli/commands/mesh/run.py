"""`edgellm mesh run`: one reply from a model that several devices hold, and what each of them did."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edgellm.cli.commands.pair import Interfaces
from edgellm.cli.help_examples import model_names
from edgellm.cli.views.console import say
from edgellm.cli.views.device_table import left_out, sought, surveyed
from edgellm.errors import InvalidOption
from edgellm.layer_range import HERE

if TYPE_CHECKING:
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.llm.mesh_llm import OpenedMesh
    from edgellm.mesh.fleet_file import Fleet
    from edgellm.mesh.placement import Placement

INTERRUPTED = 130
AUTO = "auto"
CHAT_TOKENS = 256  # of a prompt, in a conversation whose length is unknown


class Objective(enum.StrEnum):
    """The time that a plan minimises."""

    TTFT = "ttft"
    REPLY = "reply"


Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:A-B,NAME:C-D", show_default="as mesh plan says",
        help="Who holds which layers, counted from 1: `here`, paired devices by name, or HOST:PORT.",
    ),
]  # fmt: skip
Workers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer", metavar="[NAME=]HOST:PORT", show_default=False,
        help="Where a worker is, beside the paired ones. In a run, one that holds nothing takes over for who is lost.",
    ),
]  # fmt: skip
Devices = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml", show_default=False, help="Plan over these devices; see edgellm mesh plan --help."
    ),
]
OverDevices = Annotated[
    str | None,
    typer.Option(
        metavar="SPLIT|FILE.toml|auto", show_default=False,
        help="The verifier's layers are on several devices, as for mesh run; 'auto': wherever is best. --peer then "
        "says where workers are.",
    ),
]  # fmt: skip


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=model_names, help="As for mesh plan.")],
    prompt: Annotated[list[str], typer.Argument(metavar="PROMPT", help="The question.")],
    split: Split = None,
    devices: Devices = None,
    peer: Workers = None,
    draft: Annotated[
        str,
        typer.Option(metavar="MODEL", autocompletion=model_names, help="A small model that drafts; 'none': nobody."),
    ] = "none",
    system: Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="The system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="The longest reply.")] = 512,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 is greedy: always the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeats a sampled reply.", show_default="new")] = None,
    retrieval: Annotated[
        str, typer.Option(metavar="auto|off|SOURCES", help="Copy drafts from what was seen; see edgellm chat --help.")
    ] = "auto",
    context_length: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of prompt and reply.", show_default="4096 at most")
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="Without a split: what shall be soonest, the first token or the reply's end.")
    ] = Objective.TTFT,
    interface: Interfaces = None,
    f32: Annotated[bool, typer.Option("--f32", help="Send rows as 32-bit floats, twice the bytes of 16.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a token, a summary, the stages.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why it was done so.")] = False,
) -> int:  # fmt: skip
    from edgellm.cli.views.reply_printer import speak
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.llm import compose
    from edgellm.llm.mesh_llm import Options, open_mesh
    from edgellm.spec.params import ReplyOptions
    from edgellm.storage import resolve

    question = " ".join(prompt)
    if not question.strip():
        raise InvalidOption(
            "The question is empty.", 'Write one: edgellm mesh run MODEL "Where is my mug?" --split ...'
        )
    asked = ReplyOptions(max_tokens=max_tokens, temperature=temperature, seed=seed, retrieval=retrieval)
    path, fleet = resolve(model), _fleet(split, devices)
    wanted = PlanTarget(max(1, len(question) // 4), max_tokens, objective.value, context_length)
    placed: Placement | None = None
    if split is None and fleet is None:
        split, placed = at_home(model, path, wanted, tuple(peer or ()), interface, explain=explain)
    options = Options(
        split, fleet, placed, tuple(peer or ()), context_length, sessions=1, wide=f32, tokens_out=max_tokens,
        tokens_in=wanted.tokens_in, objective=wanted.objective,
    )  # fmt: skip
    with open_mesh(path, options, draft=draft, tell=lambda text: say(text, style="yellow")) as opened:
        if explain:
            say(opened.reason, style="dim")
        reports = Reports(opened, as_json=as_json)
        summary = speak(
            opened.pair.reply(compose(question, system=system), asked), as_json=as_json, explain=explain, stats=False
        )
        reports.heard(summary)
        return INTERRUPTED if summary.finish_reason == "cancelled" else 0


def over_devices(
    mesh: str, model: str, peers: Sequence[str], draft: str, max_tokens: int, *, as_json: bool, explain: bool,
    sessions: int = 1, history: bool = True,
) -> tuple[OpenedMesh, Reports]:  # fmt: skip
    """Open a mesh for `chat --mesh` and `serve --mesh`: `mesh` is a split, or names a file of devices, or is AUTO, the
    measured home."""
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.llm.mesh_llm import Options, open_mesh
    from edgellm.storage import resolve

    path = resolve(model)
    # in a conversation the layers stay loaded, so that every token's time counts, and not the first one's alone
    wanted = PlanTarget(CHAT_TOKENS, max_tokens, "reply", None)
    split: str | None = None
    fleet: Fleet | None = None
    placed: Placement | None = None
    if mesh == AUTO:
        split, placed = at_home(model, path, wanted, peers, None, explain=explain)
    elif mesh.endswith(".toml"):
        fleet = _fleet(None, Path(mesh).expanduser())
    else:
        split = mesh
    options = Options(
        split, fleet, placed, tuple(peers), sessions=sessions, tokens_in=wanted.tokens_in, tokens_out=max_tokens
    )
    opened = open_mesh(path, options, draft=draft, history=history, tell=lambda text: say(text, style="yellow"))
    return opened, Reports(opened, as_json=as_json)


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """The target of a plan: tokens of prompt and reply, the objective, and the context's length, if one is set."""

    tokens_in: int
    tokens_out: int
    objective: Literal["ttft", "reply"]
    context: int | None


def at_home(
    model: str, path: Path, wanted: PlanTarget, peers: Sequence[str], interface: Sequence[str] | None, *, explain: bool
) -> tuple[str, None] | tuple[None, Placement]:
    """Return the best placement over the measured devices, with the layers where they are; print why, and what would be
    better. Without another device nothing is measured: return a split that gives this one all layers."""
    from edgellm.llm.mesh_llm import place_at_home
    from edgellm.mesh.model_costs import model_of

    workers = sought(interface, peers)
    if all(worker.trouble is not None for worker in workers):
        left_out([(worker.name, worker.trouble) for worker in workers if worker.trouble is not None])
        say("No other device can be used: this one holds all layers.", style="dim")
        return f"{HERE}:1-{model_of(path).shape.layers}", None
    placed = place_at_home(
        path, surveyed(path, workers, False), tokens_in=wanted.tokens_in, tokens_out=wanted.tokens_out,
        objective=wanted.objective, context=wanted.context,
    )  # fmt: skip
    if advice := placed.advice(model):
        say(advice, style="yellow")
    say(placed.reason, style="dim")
    if explain:
        for name, why in placed.why():
            say(f"{name}: {why}", style="dim")
    return None, placed


def _fleet(split: str | None, devices: Path | None) -> Fleet | None:
    from edgellm.mesh.fleet_file import read_fleet

    if split is not None and devices is not None:
        raise InvalidOption("Both --split and --devices are given.", "Give one of them.")
    return None if devices is None else read_fleet(devices)
