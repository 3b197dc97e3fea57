"""`edgellm mesh`: a model whose layers are split over devices."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.commands.mesh.run import engine_for
from edgellm.cli.options.hardware import PLANNING, PlanHardware
from edgellm.cli.options.mesh import HomeOptions, PlanOptions
from edgellm.cli.options.models import AsJson, Engine, model_names
from edgellm.cli.options.records import refuse_given, with_records
from edgellm.cli.views.console import emit, out, say
from edgellm.cli.views.device_table import find_home_workers, print_units, progress, survey_workers
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.coldstart.home import Home
    from edgellm.coldstart.plan import Plan
    from edgellm.engine import ModelFile
    from edgellm.engine.hardware import Hardware
    from edgellm.llm.home import EngineChoice, Workload
    from edgellm.mesh.fleet_file import Fleet
    from edgellm.mesh.fleet_profiler import Survey


@with_records
def plan(
    ctx: typer.Context,
    asked: PlanOptions,
    home: HomeOptions,
    hardware: PlanHardware,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", autocompletion=model_names, show_default=False,
                       help="Name from `edgellm ls`, user/repo[:quant], or path. Not needed if the devices "
                       "file or the preset describes a model."),
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    from edgellm.engine import ModelFile
    from edgellm.llm.home import Workload
    from edgellm.storage import resolve

    _check_hardware(ctx, home.engine, described=asked.described, has_file=model is not None)
    if asked.plot is not None and asked.plot.suffix.lower() not in (".png", ".svg"):
        raise InvalidOption(f"--plot cannot write {asked.plot}.", "Use a file name that ends in .png or .svg.")
    file = None if model is None else ModelFile.open(resolve(model))
    own = _with_context(hardware.of_planned(), file, asked.tokens_in + asked.tokens_out)
    workload = Workload(asked.tokens_in, asked.tokens_out, asked.objective.value, hardware=own, cold=not asked.warm)
    if asked.described or model is None or file is None:
        show_stages(asked, file, _fleet(asked.devices, asked.preset), workload, as_json=as_json)
        return
    choice = engine_for(file, home.engine)
    if choice.over_rpc and asked.plot is not None:  # refused before the measurement
        raise InvalidOption(
            f"--plot draws stages, and this plan is over RPC: {choice.reason.rstrip('.')}.", "Leave it out."
        )
    workers = find_home_workers(home.interface, home.peer)
    survey = survey_workers(file, workers, asked.measure, own, by_stand_in=choice.over_rpc)
    if choice.over_rpc:
        show_over_rpc(model, file, survey, workload, choice, as_json)
    else:
        show_stages(asked, file, survey.fleet(), workload, survey, choice, as_json=as_json)


def show_stages(
    asked: PlanOptions, file: ModelFile | None, fleet: Fleet, workload: Workload, survey: Survey | None = None,
    choice: EngineChoice | None = None, *, as_json: bool,
) -> None:  # fmt: skip
    """Make and print a plan for a fleet; with the `survey` in which it was measured, what is to be deployed, too."""
    from edgellm.cli.views.plan_view import figures, print_plan
    from edgellm.coldstart.plan import plan as best_plan
    from edgellm.llm.home import within

    home = _described(fleet, workload) if file is None else workload.home(file, fleet)
    began = time.perf_counter()
    with progress("planning"):
        found = best_plan(replace(home, overlap=asked.overlap.value), within(asked.time_limit))
    milliseconds = 1e3 * (time.perf_counter() - began)
    moves = None if survey is None or file is None else _moves(file, found, survey)
    if asked.plot is not None:
        _draw(found, asked.plot)
    if as_json:
        row = figures(found, milliseconds) | {"context_length": workload.hardware.n_ctx}
        if survey is not None and choice is not None and moves is not None:
            row |= _engine_row(choice) | _units_row(survey) | {"doubtful": survey.doubts()}
            row["move"] = [{"device": name, "bytes": count} for name, count in moves]
        emit(json.dumps(row))
        return
    speeds = {} if survey is None else survey.speeds
    print_plan(out(), found, milliseconds, moves, {name: one.figures.unit for name, one in speeds.items()})
    _say_context(workload.hardware)
    if survey is not None:
        print_units(survey)
    if asked.plot is not None:
        say(f"wrote {asked.plot}", style="dim")


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
    from edgellm.llm.home import planned_positions

    return replace(hardware, n_ctx=None if file is None else planned_positions(file, hardware.n_ctx, tokens))


def _say_context(hardware: Hardware) -> None:
    if hardware.n_ctx is not None:
        say(f"Memory is counted for a context of {hardware.n_ctx:,} tokens; change it with --ctx-size.", style="dim")


def show_over_rpc(
    model: str, file: ModelFile, survey: Survey, workload: Workload, choice: EngineChoice, as_json: bool
) -> None:
    """Print the plan of a model over llama.cpp's RPC."""
    from edgellm.cli.views.plan_view import print_rpc_plan, rpc_figures
    from edgellm.llm.home import place_over_rpc

    placed = place_over_rpc(file, survey, workload)
    if as_json:
        row = _engine_row(choice) | {"reason": choice.reason, **rpc_figures(placed)}
        emit(json.dumps(row | {"context_length": workload.positions, "doubtful": survey.doubts()}))
        return
    print_rpc_plan(out(), placed, model)
    _say_context(workload.hardware)
    print_units(survey)


def _engine_row(choice: EngineChoice) -> dict[str, Any]:
    return {"engine": choice.engine, "engine_reason": choice.reason}


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


def _moves(file: ModelFile, found: Plan, survey: Survey) -> list[tuple[str, int]]:
    """Return the bytes that each device still lacks of its layers."""
    from edgellm.llm.home import missing_layers

    with progress("asking the devices for their layers"):
        return missing_layers(file, found.option.shares, survey)


def _units_row(survey: Survey) -> dict[str, Any]:
    rows = []
    for name, one in survey.speeds.items():
        figures = one.figures
        rows.append(
            {"device": name, "unit": figures.unit or None, "processor": figures.processor,
             "reason": figures.unit_reason}
        )  # fmt: skip
    return {"units": rows}


def _described(fleet: Fleet, workload: Workload) -> Home:
    """Return the home of the devices and the model that a file describes."""
    from edgellm.coldstart.home import Home

    if fleet.model is None:
        raise InvalidOption(
            "There is no model to plan for.", "Give a MODEL, or add a [model] table to the devices file."
        )
    return Home(
        fleet.devices, fleet.model, workload.tokens_in, workload.tokens_out, workload.objective, fleet.links,
        cold=workload.cold,
    )  # fmt: skip


def _draw(found: Plan, path: Path) -> None:
    from edgellm.llm.mesh_timeline import save

    try:
        save(found, path)
    except OSError as error:
        raise InvalidOption(f"{path} cannot be written: {error.strerror}.", "Choose another file.") from None
