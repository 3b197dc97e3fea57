"""`edgellm mesh`: which device of the home holds which layers of a model."""

from __future__ import annotations

import enum
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.commands.mesh.deploy import deploy, layers
from edgellm.cli.commands.mesh.peers import peers
from edgellm.cli.commands.mesh.run import Objective, Workers, run
from edgellm.cli.commands.pair import Interfaces
from edgellm.cli.help_examples import model_names, taught
from edgellm.cli.views.console import emit, out, say
from edgellm.cli.views.device_table import looked
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.coldstart.cost_model import ModelCosts
    from edgellm.coldstart.plan import Plan, PlanOption
    from edgellm.mesh.fleet_file import Fleet
    from edgellm.mesh.fleet_profiler import Survey

_RUN = (
    "Without --split and --devices, this device, the paired ones and those at --peer are measured where that was not "
    "done before, and the best split of the layers that they have is run; it says what would be better. "
    "All devices begin to load at once. When one is lost, the others take over its layers where they hold them, and "
    "the text goes on. MODEL is a file that is here: its tokenizer is needed, and its layers are here too if need be."
)

mesh = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Hold one model on several machines.")

_PEERS = "Figures are kept with their age; `--json` has all of them, with the reasons."
_DEPLOY = (
    "What is there already is not sent again; what was cut off goes on where it stopped. Layers leave this machine for "
    "paired devices alone, with the right to files here and there, and are checked by their SHA-256."
)
_LAYERS = (
    "What is in use is never removed. A store has a limit; what was used least goes first, and before that what was "
    "made here: pieces that suit a stage, cut from a whole model or joined from small layers."
)


class Overlap(enum.StrEnum):
    """The work that a device may do while it still loads."""

    PAPER = "paper"
    RECEIVING = "receiving"
    STREAMED = "streamed"


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", autocompletion=model_names, show_default=False,
                       help="A name from `edgellm ls`, user/repo[:quant], or a path. Not needed where the file of "
                       "devices or the preset describes one."),
    ] = None,
    devices: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="What the devices can do; see below.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Devices known by name: csgo, the paper's.", show_default=False)
    ] = None,
    tokens_in: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the prompt.")] = 1024,
    tokens_out: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens of the reply.")] = 128,
    objective: Annotated[
        Objective, typer.Option(help="What shall be soonest: the first token (ttft) or the end of the reply.")
    ] = Objective.TTFT,
    overlap: Annotated[
        Overlap,
        typer.Option(help="While a device loads it does nothing else (paper), receives, or computes too (streamed)."),
    ] = Overlap.STREAMED,
    warm: Annotated[bool, typer.Option("--warm", help="Every device has its layers loaded already.")] = False,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="Then the best plan so far, and how good it is for sure.")
    ] = 10.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the devices now, also those that were measured before.")
    ] = False,
    peer: Workers = None,
    interface: Interfaces = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it: a .png or .svg file.", show_default=False)
    ] = None,
) -> None:  # fmt: skip
    from edgellm.coldstart.plan import plan as best_plan
    from edgellm.storage import resolve

    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise InvalidOption(f"--plot is {plot}.", "Name a file that ends in .png or .svg.")
    home: Survey | None = None
    if devices is None and preset is None and model is not None:
        home = looked(resolve(model), interface, measure, peer or ())
    fleet = _fleet(devices, preset) if home is None else home.fleet()
    planned = _model(model, fleet)
    began = time.perf_counter()
    found = best_plan(
        fleet.devices, planned, tokens_in, tokens_out, objective=objective.value, overlap=overlap.value,
        links=fleet.links, cold=not warm, stop=lambda: time.perf_counter() - began > time_limit,
    )  # fmt: skip
    milliseconds = 1e3 * (time.perf_counter() - began)
    moves = None if home is None or model is None else _moves(resolve(model), found, home)
    if plot is not None:
        _drawn(found, planned, plot)
    if as_json:
        doubts = {} if home is None else {"doubtful": home.doubts()}
        emit(json.dumps(figures(found, milliseconds, overlap.value) | _moves_row(moves) | doubts))
        return
    from edgellm.cli.views.plan_view import show

    show(out(), found, planned, tokens_in, tokens_out, milliseconds, moves)
    if plot is not None:
        say(f"drawn: {plot}", style="dim")


def _fleet(devices: Path | None, preset: str | None) -> Fleet:
    from edgellm.mesh import fleet_file as fleet

    if devices is not None and preset is not None:
        raise InvalidOption("Both --devices and --preset are given.", "Give one of them.")
    if devices is not None:
        return fleet.read_fleet(devices)
    if preset is not None:
        return fleet.preset(preset)
    raise InvalidOption(
        "Nothing is known of your devices yet.",
        "Describe them in a file and name it with --devices (`edgellm mesh plan --help` shows one), try"
        " --preset csgo, or name a MODEL, for which this device and the paired ones are then measured.",
    )


def _moves(model: Path, found: Plan, home: Survey) -> list[tuple[str, int]]:
    """Return the bytes that each device still lacks of its layers."""
    from edgellm.cli.views.device_table import doing
    from edgellm.llm.mesh_llm import to_bring
    from edgellm.mesh.placement import of_plan

    with doing("asking who has what"):
        return to_bring(model, of_plan(found), home)


def _moves_row(moves: list[tuple[str, int]] | None) -> dict[str, Any]:
    return {} if moves is None else {"move": [{"device": name, "bytes": count} for name, count in moves]}


def _model(name: str | None, fleet: Fleet) -> ModelCosts:
    if name is not None:
        from edgellm.mesh.model_costs import model_of
        from edgellm.storage import resolve

        return model_of(resolve(name))
    if fleet.model is None:
        raise InvalidOption(
            "No model is named, and the file of devices describes none.",
            "Name one behind `mesh plan`, or write a [model] table.",
        )
    return fleet.model


def _drawn(found: Plan, model: ModelCosts, path: Path) -> None:
    from edgellm.llm.mesh_timeline import save

    try:
        save(found, model.name, path)
    except OSError as error:
        raise InvalidOption(f"{path} cannot be written: {error.strerror}.", "Name another file.") from None


def figures(found: Plan, milliseconds: float, overlap: str) -> dict[str, Any]:
    """Return the plan for a script; layers counted from 1, both ends included; null where something does not fit."""

    def seconds(way: PlanOption | None) -> float | None:
        return None if way is None else found.seconds(way)

    keys = ("device", "first_layer", "last_layer", "load_s", "wait_s", "network_s", "compute_s", "finish_s")
    return {
        "ttft_s": found.way.ttft_s, "token_s": found.way.token_s, "reply_s": found.way.reply_s,
        "objective": found.objective, "overlap": overlap, "planner_ms": milliseconds, "optimal": found.optimal,
        "gap": found.gap, "reason": found.reason, "advice": found.advice,
        "stages": [
            {**{key: told[key] for key in keys}, "bytes": int(stage.size), "reason": stage.reason}
            for stage in found.way.stages
            for told in (stage.to_json(),)
        ],
        "unused": [{"device": device, "reason": reason} for device, reason in found.unused],
        "baselines": {
            "even": seconds(found.even), "heuristic": seconds(found.heuristic),
            "best_single": seconds(found.best_single), "ideal_single": seconds(found.ideal_single),
        },
        "warm_single_s": seconds(found.warm_single),
    }  # fmt: skip


def _help() -> str:
    from edgellm.cli.help_examples import FLEET_FILE

    return taught(
        "mesh plan", "Plan which device holds which layers, so that a cold model answers soonest.", FLEET_FILE
    )


mesh.command("plan", help=_help())(plan)
mesh.command(
    "peers", help=taught("mesh peers", "See the devices that can hold layers: rights, speed, layers.", _PEERS)
)(peers)
mesh.command("deploy", help=taught("mesh deploy", "Bring to each device the layers that it needs.", _DEPLOY))(deploy)
mesh.command("layers", help=taught("mesh layers", "See which layers are where, and remove them.", _LAYERS))(layers)
mesh.command("run", help=taught("mesh run", "Have one reply written by a model that several devices hold.", _RUN))(run)
