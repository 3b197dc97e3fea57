"""`edgellm mesh`: a model whose layers are split over devices."""

from __future__ import annotations

import enum
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.commands.mesh.deploy import deploy, layers
from edgellm.cli.commands.mesh.peers import peers
from edgellm.cli.commands.mesh.run import Engine, EngineName, Objective, Workers, choice_of, engine_line, run
from edgellm.cli.commands.pair import Interfaces
from edgellm.cli.help_examples import FLEET_FILE, model_names
from edgellm.cli.help_pages import add_command, command_group
from edgellm.cli.model_options import PLANNING, HardwareOptions, refuse_given, with_plan_hardware
from edgellm.cli.views.console import emit, out, say
from edgellm.cli.views.device_table import print_units, progress, survey_home
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.coldstart.cost_model import ModelCosts
    from edgellm.coldstart.plan import Plan, PlanOption
    from edgellm.coldstart.problem_builder import MemoryOverhead
    from edgellm.engine import ModelFile
    from edgellm.engine.hardware import Hardware
    from edgellm.llm.home.plan import HomePlan
    from edgellm.llm.home.stages import Asked
    from edgellm.llm.home.target import PlanTarget
    from edgellm.mesh.fleet_file import Fleet
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.mesh.ggml_rpc.engine_choice import EngineChoice

_RUN = (
    "Without --split and --devices, this device, the paired ones and those at --peer are measured if that was not done "
    "before. The best split of the layers that they have is run; a better one that needs a deployment is printed. All "
    "devices load at once. If one is lost, others that hold its layers take over, and the reply goes on. MODEL must be "
    "a file on this machine, for its tokenizer and for layers that no other device has."
)

mesh = command_group("mesh", "Split one model over several devices.")

_PEERS = "Measurements are kept with their age; --json prints all of them, with the reasons."
_DEPLOY = (
    "Layers that a device has are not sent again, and an interrupted transfer resumes where it stopped. Layers are "
    "sent to paired devices only, which need the right to files on both sides, and are checked by their SHA-256."
)
_LAYERS = (
    "Layers in use are never removed. A store at its limit first removes pieces that were cut here from a whole model, "
    "and then the layers that were not used for longest."
)


class Overlap(enum.StrEnum):
    """Work that a device may do while it still loads."""

    PAPER = "paper"
    RECEIVING = "receiving"
    STREAMED = "streamed"


@with_plan_hardware
def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", autocompletion=model_names, show_default=False,
                       help="Name from `edgellm ls`, user/repo[:quant], or path. Not needed if the devices "
                       "file or the preset describes a model."),
    ] = None,
    devices: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Devices file; see --help-all.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Named devices: csgo, those of the paper.", show_default=False)
    ] = None,
    tokens_in: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the prompt.")] = 1024,
    tokens_out: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens of the reply.")] = 128,
    objective: Annotated[
        Objective, typer.Option(help="Time to minimise: to the first token (ttft), or to the end of the reply.")
    ] = Objective.TTFT,
    overlap: Annotated[
        Overlap,
        typer.Option(help="What a device does while it loads: nothing (paper), receive, or also compute (streamed)."),
    ] = Overlap.STREAMED,
    warm: Annotated[bool, typer.Option("--warm", help="Assume that every device has its layers loaded.")] = False,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="After this time use the best plan so far.")
    ] = 10.0,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure all devices again.")
    ] = False,
    engine: EngineName = Engine.AUTO,
    peer: Workers = None,
    interface: Interfaces = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the plan: a .png or .svg file.", show_default=False)
    ] = None,
    *,
    hardware: HardwareOptions,
) -> None:  # fmt: skip
    from edgellm.coldstart.plan import plan as best_plan
    from edgellm.engine import ModelFile
    from edgellm.llm.home.plan import compare_engines
    from edgellm.llm.home.stages import PLAN_SECONDS
    from edgellm.llm.home.target import PlanTarget
    from edgellm.mesh.model_costs import model_costs
    from edgellm.storage import resolve

    _check_hardware(ctx, engine, described=devices is not None or preset is not None, has_file=model is not None)
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise InvalidOption(f"--plot cannot write {plot}.", "Use a file name that ends in .png or .svg.")
    home: Survey | None = None
    compared: HomePlan | None = None
    file = None if model is None else ModelFile.open(resolve(model))
    own = _with_context(hardware.of_planned(), file, tokens_in + tokens_out)
    if devices is None and preset is None and model is not None and file is not None:
        target = PlanTarget(tokens_in, tokens_out, objective.value, hardware=own, cold=not warm)
        choice = choice_of(file, engine)
        if choice.over_rpc and plot is not None:  # before anything is measured
            raise InvalidOption(
                f"--plot draws stages, and this plan is over RPC: {choice.reason.rstrip('.')}.", "Leave it out."
            )
        home = survey_home(file, interface, measure, peer or (), hardware=own, by_stand_in=choice.over_rpc)
        compared = compare_engines(file, home, choice, target, min(time_limit, PLAN_SECONDS))
        if compared.choice.over_rpc:
            show_over_rpc(model, file, home, compared, target, as_json)
            if plot is not None:
                say(f"{plot} is not written: it draws stages, and this plan is over RPC.")
            return
    fleet = _fleet(devices, preset) if home is None else home.fleet()
    planned = _described(fleet) if file is None else model_costs(file)
    overhead = _overhead(own, file)
    began = time.perf_counter()
    with progress("planning"):
        found = best_plan(
            fleet.devices, planned, tokens_in, tokens_out, objective=objective.value, overlap=overlap.value,
            links=fleet.links, cold=not warm, stop=lambda: time.perf_counter() - began > time_limit,
            overhead=overhead,
        )  # fmt: skip
    milliseconds = 1e3 * (time.perf_counter() - began)
    rival = None if compared is None else compared.rpc
    asked = None if compared is None or warm else compared.asked
    moves = None if home is None or file is None else _moves(file, found, home, asked)
    if plot is not None:
        _draw(found, planned, plot)
    if as_json:
        from edgellm.cli.views.rpc_plan_view import rpc_figures

        doubts = {} if home is None else {"doubtful": home.doubts()}
        rpc = {} if rival is None else {"rpc": rpc_figures(rival)}
        whole = figures(found, milliseconds, overlap.value) | {"context_length": own.n_ctx}
        engines = {} if compared is None else engine_figures(compared.choice)
        emit(json.dumps(whole | engines | _moves_row(moves) | _units_row(home) | doubts | rpc))
        return
    from edgellm.cli.views.plan_view import print_plan

    cards = {} if home is None else {name: one.figures.unit for name, one in home.speeds.items() if one.figures.unit}
    print_plan(out(), found, planned, tokens_in, tokens_out, milliseconds, moves, cards)
    if compared is not None and compared.choice.by_times:
        say(engine_line(compared.choice), style="dim")
    _say_context(own)
    if home is not None:
        print_units(home)
    if plot is not None:
        say(f"wrote {plot}", style="dim")


def _check_hardware(ctx: typer.Context, engine: Engine, *, described: bool, has_file: bool) -> None:
    """Refuse options for hardware on the command line on which this plan does not depend."""
    of_file = ("ctx_size", "cache_type")
    if described:
        refuse_given(
            ctx, [name for name in PLANNING if name not in of_file],
            "has no meaning with described devices: their speed and memory are as described", "Leave it out.",
        )  # fmt: skip
    if not has_file:
        refuse_given(ctx, of_file, "needs a model file: what is described has no keys and values", "Name a MODEL.")
    if engine is Engine.STAGES:
        refuse_given(
            ctx, ("batch_size",), "does not change a plan of stages", "Leave it out, and give it to edgellm mesh run."
        )


def _with_context(hardware: Hardware, file: ModelFile | None, tokens: int) -> Hardware:
    """Return `hardware` with the context that is planned for; without one where no model file is."""
    from edgellm.llm.mesh_llm import planned_positions

    return replace(hardware, n_ctx=None if file is None else planned_positions(file, hardware.n_ctx, tokens))


def _overhead(hardware: Hardware, file: ModelFile | None) -> MemoryOverhead:
    """Return the memory beside weights for one reply, as `mesh run` counts it; none where no model file is."""
    from edgellm.coldstart.problem_builder import MemoryOverhead
    from edgellm.llm.mesh_llm import overhead_of

    if file is None or hardware.n_ctx is None:
        return MemoryOverhead()
    return overhead_of(file.header, hardware.n_ctx, sessions=1, cache_type=hardware.cache_type)


def _say_context(hardware: Hardware) -> None:
    if hardware.n_ctx is not None:
        say(f"Memory is counted for a context of {hardware.n_ctx:,} tokens; change it with --ctx-size.", style="dim")


def show_over_rpc(
    model: str, file: ModelFile, home: Survey, compared: HomePlan, target: PlanTarget, as_json: bool
) -> None:
    """Print the plan of a model over llama.cpp's RPC, which is made if it was not for the choice of the engine."""
    from edgellm.cli.views.rpc_plan_view import print_rpc_plan, rpc_figures
    from edgellm.llm.home.over_rpc import place_over_rpc

    choice, placed = compared.choice, compared.rpc or place_over_rpc(file, home, target)
    if as_json:
        row = engine_figures(choice) | {"reason": choice.reason, **rpc_figures(placed)}
        emit(json.dumps(row | {"context_length": target.positions, "doubtful": home.doubts()}))
        return
    print_rpc_plan(out(), placed, model, target.tokens_in, target.tokens_out)
    if compared.asked is not None:  # else it was said before they were asked
        say(engine_line(choice), style="dim")
    if deployed := compared.deployment(model):
        say(deployed, style="yellow")
    _say_context(target.hardware)
    print_units(home)


def engine_figures(choice: EngineChoice) -> dict[str, Any]:
    """Return the choice of the engine for a script: seconds are to the end of the reply, None for an engine that is
    impossible or was not asked for."""
    times = {"stages": choice.stages, "rpc": choice.rpc}
    seconds = {name: None if one is None else one.reply_s for name, one in times.items()}
    return {"engine": choice.engine, "engine_reason": choice.reason, "engine_reply_s": seconds}


def _fleet(devices: Path | None, preset: str | None) -> Fleet:
    from edgellm.mesh import fleet_file as fleet

    if devices is not None and preset is not None:
        raise InvalidOption("--devices and --preset exclude each other.", "Leave one of them out.")
    if devices is not None:
        return fleet.read_fleet(devices)
    if preset is not None:
        return fleet.preset(preset)
    raise InvalidOption(
        "There are no devices to plan for.",
        "Give a MODEL, to measure this device and the paired ones; or --devices with a file (see `edgellm mesh plan"
        " --help`); or --preset csgo.",
    )


def _moves(file: ModelFile, found: Plan, home: Survey, asked: Asked | None) -> list[tuple[str, int]]:
    """Return the bytes that each device still lacks of its layers. `asked` are the devices, if they were."""
    from edgellm.llm.home.stages import missing_layers
    from edgellm.mesh.placement import plan_shares

    with progress("asking the devices for their layers"):
        return missing_layers(file, plan_shares(found), home, asked)


def _moves_row(moves: list[tuple[str, int]] | None) -> dict[str, Any]:
    return {} if moves is None else {"move": [{"device": name, "bytes": count} for name, count in moves]}


def _units_row(home: Survey | None) -> dict[str, Any]:
    measured = {} if home is None else {name: speed.figures for name, speed in home.speeds.items()}
    return {} if home is None else {
        "units": [{"device": name, "unit": one.unit or None, "processor": one.processor, "reason": one.unit_reason}
                  for name, one in measured.items()]
    }  # fmt: skip


def _described(fleet: Fleet) -> ModelCosts:
    if fleet.model is None:
        raise InvalidOption(
            "There is no model to plan for.", "Give a MODEL, or add a [model] table to the devices file."
        )
    return fleet.model


def _draw(found: Plan, model: ModelCosts, path: Path) -> None:
    from edgellm.llm.mesh_timeline import save

    try:
        save(found, model.name, path)
    except OSError as error:
        raise InvalidOption(f"{path} cannot be written: {error.strerror}.", "Choose another file.") from None


def figures(found: Plan, milliseconds: float, overlap: str) -> dict[str, Any]:
    """Return the plan for a script. Layers are counted from 1, both ends included; what does not fit is None."""

    def seconds(way: PlanOption | None) -> float | None:
        return None if way is None else found.seconds(way)

    keys = ("device", "first_layer", "last_layer", "load_s", "wait_s", "network_s", "compute_s", "finish_s")
    return {
        "ttft_s": found.option.ttft_s, "token_s": found.option.token_s, "reply_s": found.option.reply_s,
        "objective": found.objective, "overlap": overlap, "planner_ms": milliseconds, "optimal": found.optimal,
        "gap": found.gap, "reason": found.reason, "advice": found.advice,
        "stages": [
            {**{key: row[key] for key in keys}, "bytes": int(stage.size), "reason": stage.reason}
            for stage in found.option.stages
            for row in (stage.to_json(),)
        ],
        "unused": [{"device": device, "reason": reason} for device, reason in found.unused],
        "baselines": {
            "even": seconds(found.even), "heuristic": seconds(found.heuristic),
            "best_single": seconds(found.best_single), "ideal_single": seconds(found.ideal_single),
        },
        "warm_single_s": seconds(found.warm_single),
    }  # fmt: skip


for _name, _command, _summary, _more in (
    ("plan", plan, "Plan which device holds which layers, for the quickest reply from a cold start.", FLEET_FILE),
    ("peers", peers, "List the devices that can hold layers: rights, speed, layers.", _PEERS),
    ("deploy", deploy, "Send each device the layers that it needs.", _DEPLOY),
    ("layers", layers, "List the layers of each device, or remove some.", _LAYERS),
    ("run", run, "Generate one reply from a model that is split over devices.", _RUN),
):
    add_command(mesh, _name, _command, _summary, _more)
