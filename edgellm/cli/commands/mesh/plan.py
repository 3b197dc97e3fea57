"""`edgellm mesh plan`: the best split of a model over devices."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.commands.mesh.peers import find_home_workers, print_units, survey_workers, units
from edgellm.cli.commands.mesh.run import engine_for
from edgellm.cli.options.hardware import PLANNING, PlanHardware
from edgellm.cli.options.mesh import HomeOptions, PlanOptions
from edgellm.cli.options.models import AsJson, Engine, model_names
from edgellm.cli.options.records import refuse_given, with_records
from edgellm.cli.views.console import emit, say
from edgellm.cli.views.progress import activity
from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.engine import ModelFile
    from edgellm.llm.home import Workload
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
    from edgellm.cli.views.plan_view import print_rpc_plan, rpc_figures, say_context
    from edgellm.engine import ModelFile
    from edgellm.llm.home import Workload, planned_positions
    from edgellm.mesh import part_of
    from edgellm.storage import resolve

    described = asked.devices is not None or asked.preset is not None
    _check_hardware(ctx, home.engine, described=described, has_file=model is not None)
    if asked.plot is not None and asked.plot.suffix.lower() not in (".png", ".svg"):
        raise InvalidOption(f"--plot cannot write {asked.plot}.", "Use a file name that ends in .png or .svg.")
    file = None if model is None else ModelFile.open(resolve(model))
    own, tokens = hardware.of_planned(), asked.tokens_in + asked.tokens_out
    own = replace(own, n_ctx=None if file is None else planned_positions(file, own.n_ctx, tokens))
    workload = Workload(asked.tokens_in, asked.tokens_out, asked.objective, hardware=own, cold=not asked.warm)
    if described or model is None or file is None:
        _show_stages(asked, file, _fleet(asked), workload, as_json=as_json)
        return
    choice = engine_for(file, home.engine)
    if choice.over_rpc and asked.plot is not None:  # refused before the measurement
        why = choice.reason.rstrip(".")
        raise InvalidOption(f"--plot draws stages, and this plan is over RPC: {why}.", "Leave it out.")
    workers = find_home_workers(home.interface, home.peer)
    survey = survey_workers(file, workers, asked.measure, own, by_stand_in=choice.over_rpc)
    row: dict[str, Any] = {"engine": choice.engine, "engine_reason": choice.reason, "doubtful": survey.doubts()}
    if not choice.over_rpc:
        _show_stages(asked, file, survey.fleet(), workload, survey, row | {"units": units(survey)}, as_json=as_json)
        return
    placed = part_of("rpc", "opening").place_over_rpc(file, survey, workload)
    if as_json:
        row |= {"reason": choice.reason, **rpc_figures(placed), "context_length": workload.positions}
        emit(json.dumps(row))
        return
    print_rpc_plan(placed, model)
    say_context(own.n_ctx)
    print_units(survey)


def _show_stages(
    asked: PlanOptions, file: ModelFile | None, fleet: Fleet, workload: Workload, survey: Survey | None = None,
    more: dict[str, Any] | None = None, *, as_json: bool,
) -> None:  # fmt: skip
    """Make and print a plan for a fleet; with the `survey` in which it was measured, what is to be deployed, and `more`
    about it for a script, too."""
    from edgellm.cli.views.plan_view import figures, print_plan, say_context
    from edgellm.coldstart.home import Home
    from edgellm.coldstart.plan import plan as best_plan
    from edgellm.llm.home import missing_layers, within
    from edgellm.llm.mesh_timeline import save

    if file is not None:
        home = workload.home(file, fleet)
    elif fleet.model is None:
        next_step = "Give a MODEL, or add a [model] table to the devices file."
        raise InvalidOption("There is no model to plan for.", next_step)
    else:
        home = Home(
            fleet.devices, fleet.model, workload.tokens_in, workload.tokens_out, workload.objective, fleet.links,
            cold=workload.cold,
        )  # fmt: skip
    began, moves = time.perf_counter(), None
    with activity("planning"):
        found = best_plan(replace(home, overlap=asked.overlap), within(asked.time_limit))
    milliseconds = 1e3 * (time.perf_counter() - began)
    if survey is not None and file is not None:
        with activity("asking the devices for their layers"):
            moves = missing_layers(file, found.option.shares, survey)
    if asked.plot is not None:
        try:
            save(found, asked.plot)
        except OSError as error:
            what = f"{asked.plot} cannot be written: {error.strerror}."
            raise InvalidOption(what, "Choose another file.") from None
    context = workload.hardware.n_ctx
    if as_json:
        row = figures(found, milliseconds) | {"context_length": context} | (more or {})
        if moves is not None:
            row["move"] = [{"device": name, "bytes": count} for name, count in moves]
        emit(json.dumps(row))
        return
    speeds = {} if survey is None else survey.speeds
    print_plan(found, milliseconds, moves, {name: one.figures.unit for name, one in speeds.items()})
    say_context(context)
    if survey is not None:
        print_units(survey)
    if asked.plot is not None:
        say(f"wrote {asked.plot}", style="dim")


def _check_hardware(ctx: typer.Context, engine: Engine, *, described: bool, has_file: bool) -> None:
    """Refuse options for hardware on the command line on which this plan does not depend."""
    of_file = ("ctx_size", "cache_type")
    if described:
        others = [name for name in PLANNING if name not in of_file]
        why = "has no meaning with described devices: their speed and memory are as described"
        refuse_given(ctx, others, why, "Leave it out.")
    if not has_file:
        refuse_given(ctx, of_file, "needs a model file: what is described has no keys and values", "Name a MODEL.")
    if engine == "stages":
        next_step = "Leave it out, and give it to edgellm mesh run."
        refuse_given(ctx, ("batch_size",), "does not change a plan of stages", next_step)


def _fleet(asked: PlanOptions) -> Fleet:
    from edgellm.mesh import fleet_file

    if asked.devices is not None and asked.preset is not None:
        raise InvalidOption("--devices and --preset exclude each other.", "Leave one of them out.")
    if asked.devices is not None:
        return fleet_file.read_fleet(asked.devices)
    if asked.preset is not None:
        return fleet_file.preset(asked.preset)
    raise InvalidOption(
        "There are no devices to plan for.",
        "Give a MODEL, to measure this device and the paired ones; or --devices with a file (see `edgellm mesh plan"
        " --help`); or --preset csgo.",
    )
