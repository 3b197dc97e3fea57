"""`edgellm mesh plan`: the best split of a model over devices; `edgellm mesh run`: a reply by a split model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import options
from edgellm.cli.commands.mesh_devices import (
    PlanOptions,
    find_home_workers,
    print_left_out,
    print_units,
    survey_workers,
    units,
)
from edgellm.cli.views.console import emit_json, say
from edgellm.cli.views.progress import ProgressBar, activity
from edgellm.errors import ContextFull, InvalidOption, PlanImpossible
from edgellm.layer_range import HERE
from edgellm.storage.model_files import resolve

if TYPE_CHECKING:
    from edgellm.coldstart.problem import Fleet
    from edgellm.engine import Message, Model, ModelFile
    from edgellm.llm import LLM
    from edgellm.llm.mesh_llm import EngineChoice, OpenedMesh, Workload
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.mesh.placement import Placement
    from edgellm.rpc_engine.plan import RpcPlacement


@options.with_records
def plan(
    ctx: typer.Context,
    asked: PlanOptions,
    hardware: Annotated[options.PlanHardware, *options.PLANNING],
    model: str | None = typer.Argument(None, metavar="[MODEL]", show_default=False),
    as_json: options.AsJson = False,
) -> None:
    from edgellm.cli.views.mesh_view import print_rpc_plan, rpc_figures, say_context
    from edgellm.engine import ModelFile
    from edgellm.mesh import part_of

    described = asked.devices is not None or asked.preset is not None
    _check_hardware(ctx, described=described, has_file=model is not None)
    file = None if model is None else ModelFile.open(resolve(model))
    workload = asked.workload(file, hardware.of(options.VERIFIER))
    if described or model is None or file is None:
        _show_stages(asked, file, _fleet(asked), workload, as_json=as_json)
        return
    choice = engine_for(file, asked.engine)
    workers = find_home_workers(asked.peer)
    survey = survey_workers(file, workers, asked.measure, workload.hardware, by_stand_in=choice.over_rpc)
    row: dict[str, Any] = {"engine": choice.engine, "engine_reason": choice.reason, "doubtful": survey.doubts()}
    if not choice.over_rpc:
        _show_stages(asked, file, survey.fleet(), workload, survey, row | {"units": units(survey)}, as_json=as_json)
        return
    placed = part_of("rpc", "opening").place_over_rpc(file, survey, workload)
    if as_json:
        emit_json(row | {"reason": choice.reason, **rpc_figures(placed), "context_length": workload.hardware.n_ctx})
        return
    print_rpc_plan(placed, model)
    say_context(workload.hardware.n_ctx)
    print_units(survey)


def _show_stages(
    asked: PlanOptions, file: ModelFile | None, fleet: Fleet, workload: Workload, survey: Survey | None = None,
    more: dict[str, Any] | None = None, *, as_json: bool,
) -> None:  # fmt: skip
    """Make and print a plan for a fleet; for a measured one, what is to be deployed, too, and `more` for a script."""
    from edgellm.cli.views.mesh_view import figures, print_plan, say_context
    from edgellm.coldstart.plan import plan as best_plan
    from edgellm.llm.mesh_llm import missing_layers
    from edgellm.mesh.placement import within

    home = workload.home(file, fleet)
    began, moves, once = time.perf_counter(), None, ""
    with activity("planning"):
        found = best_plan(replace(home, overlap=asked.overlap), within(asked.time_limit))
    milliseconds = 1e3 * (time.perf_counter() - began)
    if survey is not None and file is not None:
        with activity("asking the devices for their layers"):
            moves, once = missing_layers(file, found.advised.shares, survey)
    context = workload.hardware.n_ctx
    if as_json:
        row = figures(found, milliseconds) | {"context_length": context} | (more or {})
        if moves is not None:
            row["move"] = [{"device": name, "bytes": count} for name, count in moves.items()]
        emit_json(row)
    else:
        speeds = {} if survey is None else survey.speeds
        print_plan(found, milliseconds, moves, {name: one.figures.unit for name, one in speeds.items()})
        if once:
            say(once, style="yellow")
        say_context(context)
        if survey is not None:
            print_units(survey)


def _check_hardware(ctx: typer.Context, *, described: bool, has_file: bool) -> None:
    of_file = ("ctx_size", "cache_type")
    if described:
        others = [name for name in options.PLANNING if name not in of_file]
        why = "has no meaning with described devices: their speed and memory are as described"
        options.refuse_given(ctx, others, why, "Leave it out.")
    if not has_file:
        options.refuse_given(
            ctx, of_file, "needs a model file: what is described has no keys and values", "Name a MODEL."
        )


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


AUTO = "auto"


def run(
    context: typer.Context,
    model: str = typer.Argument(..., metavar="MODEL"),
    words: list[str] | None = typer.Argument(None, metavar="[PROMPT]"),
    split: str | None = typer.Option(None, metavar="NAME:A-B,NAME:C-D", show_default="the best one"),
    devices: Path | None = typer.Option(None, metavar="FILE.toml"),
) -> int:
    from edgellm.cli.commands.models import checked_first, talk

    if split is not None and devices is not None:
        raise InvalidOption("--split and --devices exclude each other.", "Leave one of them out.")
    mesh = split or (AUTO if devices is None else str(devices))
    given = ("--draft", "none", "--verifier", checked_first(model), "--mesh", mesh, "--objective", "ttft")
    return talk(context, [*given, "--no-history", *(words or ())])


def over_devices(
    models: options.PairOptions, max_tokens: int, hardware: options.HardwareOptions, *,
    messages: Sequence[Message] = (), explain: bool = False, sessions: int = 1, history: bool = True,
) -> tuple[LLM, OpenedMesh | None]:  # fmt: skip
    """Open the pair of `models`, whose names are resolved, over devices; over RPC the pair is all that is returned.
    `models.mesh`: a split, the name of a devices file, or AUTO for the best split over the measured devices. `messages`
    are the first request, so far as it is known. `explain`: print why."""
    from edgellm.engine import ModelFile
    from edgellm.llm.mesh_llm import Workload, open_mesh, open_text, place_described
    from edgellm.llm.model_loading import EngineConfig
    from edgellm.mesh import part_of
    from edgellm.mesh.fleet_file import read_fleet

    split, file = models.mesh or AUTO, ModelFile.open(resolve(models.verifier))
    choice, text = engine_for(file, models.engine), open_text(file)
    described = Path(split).expanduser() if split.endswith(".toml") else None
    if choice.over_rpc and (models.f16 or described is not None):
        raise InvalidOption(f"{'--f16' if models.f16 else f'--mesh {split}'} is for stages only.", "Leave it out.")
    tokens = _prompt_tokens(file, text, messages)
    if not messages and (described is not None or split == AUTO):
        assumed = f"{tokens} tokens are assumed, as by edgellm mesh plan, and a reply of {max_tokens}"
        say(f"No prompt is known yet: {assumed}.", style="dim")
    own = hardware.of(options.VERIFIER)
    workload = Workload(tokens, max_tokens, models.objective, sessions, own, half=models.f16)
    layers: Any = split
    if described is not None:
        layers = place_described(file, read_fleet(described), workload)
        if layers.phases is not None and layers.phases.sentence:
            say(layers.phases.sentence, style="dim")
    elif split == AUTO:
        layers = _placed(models, file, workload, over_rpc=choice.over_rpc, explain=explain)
    config = EngineConfig(
        models.draft, hardware=own, draft_hardware=hardware.of(options.DRAFT), peers=models.peer, history=history,
        replies=sessions,
    )  # fmt: skip
    if choice.over_rpc:
        open_over_rpc = part_of("rpc", "opening").open_over_rpc
        with ProgressBar() as loading:
            return open_over_rpc(file, layers, config, _notify, loading, text=text), None
    opened = open_mesh(file, layers, config, _notify, half=models.f16, text=text)
    return opened.pair, opened


def _prompt_tokens(file: ModelFile, text: Model, messages: Sequence[Message]) -> int:
    """Return the number of tokens of a request, of which a conversation sends as many as fit."""
    from edgellm.engine.memory_fit import positions_of
    from edgellm.llm.messages import PromptWriter

    most = positions_of(file, None)
    try:
        writer = PromptWriter(text, most, grammars=False)
        return len(writer.ids(messages)) if messages else PlanOptions().tokens_in
    except ContextFull:
        return most


def _placed(
    models: options.PairOptions, file: ModelFile, workload: Workload, *, over_rpc: bool, explain: bool
) -> str | Placement | RpcPlacement:
    """Return a split, stages or a placement over RPC on the measured devices, and print why. Without other devices
    nothing is measured, and the split is this device."""
    from edgellm.mesh import part_of
    from edgellm.mesh.placement import model_costs

    workers = find_home_workers(models.peer)
    unusable = [(worker.name, worker.error) for worker in workers if worker.error is not None]
    if len(unusable) == len(workers):
        print_left_out(unusable)
        say("No other device can be used, so this one holds all layers.", style="dim")
        layers = file.header.text_layers if over_rpc else model_costs(file).shape.layers
        return f"{HERE}:1-{layers}"
    survey = survey_workers(file, workers, False, workload.hardware, by_stand_in=over_rpc)
    if not over_rpc:
        return _stages(models.verifier, file, survey, workload, explain=explain)
    placed: RpcPlacement = part_of("rpc", "opening").place_over_rpc(file, survey, workload)
    say(placed.advice, style="dim")
    if (better := placed.one_model_each(models.verifier)) is not None:
        _notify(better)
    if explain:
        print_left_out(placed.left_out)
    return placed


def _stages(model: str, file: ModelFile, survey: Survey, workload: Workload, *, explain: bool) -> Placement:
    from edgellm.llm.mesh_llm import place_stages
    from edgellm.mesh import ENGINES, part_of

    try:
        placed = place_stages(file, survey, workload)
    except PlanImpossible as error:
        if "rpc" not in ENGINES or not part_of("rpc", "backend").is_compiled_in():
            raise
        raise PlanImpossible(error.what, f"{error.next_step} Or add --engine rpc.") from None
    if deployed := placed.advice(model):
        _notify(deployed)
    say(f"For a prompt of {workload.tokens_in} tokens: {' '.join(placed.sentences)}", style="dim")
    if explain:
        print_units(survey)
        for name, why in placed.why():
            say(f"{name}: {why}", style="dim")
    return placed


def engine_for(file: ModelFile, asked: options.Engine) -> EngineChoice:
    """Return the engine for a model; say why where it is RPC without having been asked for."""
    from edgellm.llm.mesh_llm import choose_engine

    choice = choose_engine(file, asked)
    if asked == "auto" and choice.over_rpc:
        say(f"engine: {choice.engine}. {choice.reason}", style="dim")
    return choice


def _notify(text: str) -> None:
    say(text, style="yellow")
