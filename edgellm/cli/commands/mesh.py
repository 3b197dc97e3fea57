"""`edgellm mesh plan`: the best split of a model over devices; `edgellm mesh run`: a reply by a split model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgellm.cli import options
from edgellm.cli.commands.mesh_devices import (
    HomeOptions,
    Objective,
    find_home_workers,
    print_left_out,
    print_units,
    survey_workers,
    units,
)
from edgellm.cli.options import option
from edgellm.cli.views.console import emit_json, say
from edgellm.cli.views.progress import Loading, activity
from edgellm.cli.views.reply_printer import Display, print_reply
from edgellm.errors import ContextFull, InvalidOption, PlanImpossible
from edgellm.layer_range import HERE
from edgellm.spec.params import ReplyOptions
from edgellm.storage import resolve

if TYPE_CHECKING:
    from edgellm.cli.views.mesh_view import Reports
    from edgellm.coldstart.problem import Fleet
    from edgellm.engine import Message, Model, ModelFile
    from edgellm.llm import LLM
    from edgellm.llm.mesh_llm import EngineChoice, OpenedMesh, Workload
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.mesh.placement import Placement
    from edgellm.rpc_engine.plan import RpcPlacement


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan, and its devices if not those of this home."""

    devices: Path | None = option(None, "FILE.toml")
    preset: str | None = option(None, "NAME")
    tokens_in: int = option(1024, "N", least=1)
    tokens_out: int = option(128, "N", least=0)
    objective: Objective = option("ttft")
    overlap: Literal["paper", "receiving", "streamed"] = option("streamed")
    warm: bool = option(False, names=("--warm",))
    time_limit: float = option(10.0, "SECONDS", least=0.0)
    measure: bool = option(False, names=("--measure",))


@options.with_records
def plan(
    ctx: typer.Context,
    asked: PlanOptions,
    home: HomeOptions,
    hardware: options.PlanHardware,
    model: str | None = typer.Argument(None, metavar="[MODEL]", autocompletion=options.model_names, show_default=False),
    as_json: options.AsJson = False,
) -> None:
    from edgellm.cli.views.mesh_view import print_rpc_plan, rpc_figures, say_context
    from edgellm.engine import ModelFile
    from edgellm.llm.mesh_llm import Workload, planned_positions
    from edgellm.mesh import part_of

    described = asked.devices is not None or asked.preset is not None
    _check_hardware(ctx, home.engine, described=described, has_file=model is not None)
    file = None if model is None else ModelFile.open(resolve(model))
    own, tokens = hardware.of_planned(), asked.tokens_in + asked.tokens_out
    own = replace(own, n_ctx=None if file is None else planned_positions(file, own.n_ctx, tokens))
    workload = Workload(asked.tokens_in, asked.tokens_out, asked.objective, hardware=own, cold=not asked.warm)
    if described or model is None or file is None:
        _show_stages(asked, file, _fleet(asked), workload, as_json=as_json)
        return
    choice = engine_for(file, home.engine)
    workers = find_home_workers(home.interface, home.peer)
    survey = survey_workers(file, workers, asked.measure, own, by_stand_in=choice.over_rpc)
    row: dict[str, Any] = {"engine": choice.engine, "engine_reason": choice.reason, "doubtful": survey.doubts()}
    if not choice.over_rpc:
        _show_stages(asked, file, survey.fleet(), workload, survey, row | {"units": units(survey)}, as_json=as_json)
        return
    placed = part_of("rpc", "opening").place_over_rpc(file, survey, workload)
    if as_json:
        emit_json(row | {"reason": choice.reason, **rpc_figures(placed), "context_length": own.n_ctx})
        return
    print_rpc_plan(placed, model)
    say_context(own.n_ctx)
    print_units(survey)


def _show_stages(
    asked: PlanOptions, file: ModelFile | None, fleet: Fleet, workload: Workload, survey: Survey | None = None,
    more: dict[str, Any] | None = None, *, as_json: bool,
) -> None:  # fmt: skip
    """Make and print a plan for a fleet; for a measured one, what is to be deployed, too, and `more` for a script."""
    from edgellm.cli.views.mesh_view import figures, print_plan, say_context
    from edgellm.coldstart.plan import plan as best_plan
    from edgellm.coldstart.problem import Home
    from edgellm.llm.mesh_llm import missing_layers, within

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


def _check_hardware(ctx: typer.Context, engine: options.Engine, *, described: bool, has_file: bool) -> None:
    of_file = ("ctx_size", "cache_type")
    if described:
        others = [name for name in options.PLANNING if name not in of_file]
        why = "has no meaning with described devices: their speed and memory are as described"
        options.refuse_given(ctx, others, why, "Leave it out.")
    if not has_file:
        options.refuse_given(
            ctx, of_file, "needs a model file: what is described has no keys and values", "Name a MODEL."
        )
    if engine == "stages":
        next_step = "Leave it out, and give it to edgellm mesh run."
        options.refuse_given(ctx, ("batch_size",), "does not change a plan of stages", next_step)


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


@dataclass(frozen=True, slots=True)
class RunOptions(HomeOptions):
    """The split of a model over devices, and the question."""

    split: str | None = option(None, "NAME:A-B,NAME:C-D", shown="the best one")
    devices: Path | None = option(None, "FILE.toml")
    draft: str = option("none", "MODEL", complete=options.model_names)
    system: str | None = option(None, "TEXT", names=("-s", "--system"))
    objective: Objective = option("ttft")
    f16: bool = option(False, names=("--f16",), panel=options.DEVICES)


@options.with_records
def run(
    asked: RunOptions,
    reply: Annotated[ReplyOptions, "max_tokens", "temperature", "seed", "retrieval"],
    think: options.ThinkOptions,
    display: Annotated[Display, "as_json", "explain"],
    hardware: options.MeshHardware,
    model: str = typer.Argument(..., metavar="MODEL", autocompletion=options.model_names),
    prompt: list[str] = typer.Argument(..., metavar="PROMPT"),
) -> int:
    from edgellm.llm import compose

    question = " ".join(prompt)
    if not question.strip():
        raise InvalidOption("The question is empty.", 'Ask something: edgellm mesh run MODEL "Why is the sky blue?"')
    if asked.split is not None and asked.devices is not None:
        raise InvalidOption("--split and --devices exclude each other.", "Leave one of them out.")
    wanted = replace(reply, **think.fields())
    spread = Spread.of(model, asked, asked.draft, hardware, explain=display.explain)
    if spread.choice.over_rpc and (asked.f16 or asked.devices is not None):
        raise InvalidOption(f"--{'f16' if asked.f16 else 'devices'} is for stages only.", "Leave it out.")
    messages = compose(question, system=asked.system)
    workload = spread.workload(spread.prompt_tokens(messages), wanted.max_tokens, asked.objective)
    pair, opened = spread.open(asked.split, asked.devices, replace(workload, half=asked.f16))
    with pair:
        reports = reports_on(opened, display)
        if opened is not None and display.explain:
            say(opened.reason, style="dim")
        summary = print_reply(pair.reply(messages, wanted), display)
        if reports is not None:
            reports.reply_finished(summary)
        return options.INTERRUPTED if summary.finish_reason == "cancelled" else 0


def reports_on(opened: OpenedMesh | None, display: Display) -> Reports | None:
    """Return what reports on the replies of a mesh; None over RPC, where no device measures its work."""
    from edgellm.cli.views.mesh_view import Reports

    return None if opened is None else Reports(opened, as_json=display.as_json)


def over_devices(
    models: options.PairOptions, max_tokens: int, hardware: options.HardwareOptions, *,
    messages: Sequence[Message] = (), explain: bool = False, sessions: int = 1, history: bool = True,
) -> tuple[LLM, OpenedMesh | None]:  # fmt: skip
    """Open the pair of `models`, whose names are resolved, over devices for `chat --mesh` and `serve --mesh`.
    `models.mesh`: a split, the name of a devices file, or AUTO for the best split over the measured devices. `messages`
    are the first request, so far as it is known."""
    mesh, home = models.mesh or AUTO, HomeOptions(models.engine, models.peer)
    spread = Spread.of(models.verifier, home, models.draft, hardware, explain=explain)
    described = Path(mesh).expanduser() if mesh.endswith(".toml") else None
    if described is not None and spread.choice.over_rpc:
        raise InvalidOption(f"--mesh {mesh} is for stages only.", "Give a split, or --mesh auto.")
    # in a conversation the layers stay loaded, so the time of every token counts, not only that of the first
    split, tokens = None if mesh == AUTO or described is not None else mesh, spread.prompt_tokens(messages)
    if not tokens:
        tokens = PlanOptions().tokens_in
        if split is None:
            assumed = f"{tokens} tokens are assumed, as by edgellm mesh plan, and a reply of {max_tokens}"
            say(f"No prompt is known yet: {assumed}.", style="dim")
    workload = spread.workload(tokens, max_tokens, "reply", sessions)
    return spread.open(split, described, workload, rests=True, history=history)


@dataclass(frozen=True, slots=True)
class Spread:
    """A model to be spread over devices, named `model` by the user, its tokeniser `text`, and what was asked for.
    `explain`: print why."""

    model: str
    file: ModelFile
    choice: EngineChoice
    home: HomeOptions
    draft: str
    hardware: options.HardwareOptions
    explain: bool
    text: Model

    @classmethod
    def of(
        cls, model: str, home: HomeOptions, draft: str, hardware: options.HardwareOptions, *, explain: bool
    ) -> Spread:
        """Find the model and choose the engine."""
        from edgellm.engine import ModelFile
        from edgellm.llm.mesh_llm import open_text

        file = ModelFile.open(resolve(model))
        return cls(model, file, engine_for(file, home.engine), home, draft, hardware, explain, open_text(file))

    def prompt_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens of a request, of which a conversation sends as many as fit."""
        from edgellm.llm.mesh_llm import positions_of
        from edgellm.llm.messages import chat_ids

        most = positions_of(self.file, None)
        try:
            return len(chat_ids(self.text, messages, most)) if messages else 0
        except ContextFull:
            return most

    def workload(self, tokens_in: int, tokens_out: int, objective: Objective, sessions: int = 1) -> Workload:
        """Return what is planned for, with this device's hardware."""
        from edgellm.llm.mesh_llm import Workload

        own = self.hardware.of(options.VERIFIER)
        return Workload(tokens_in, tokens_out, objective, own.n_ctx, sessions, own)

    def open(
        self, split: str | None, described: Path | None, workload: Workload, *,
        rests: bool = False, history: bool = True,
    ) -> tuple[LLM, OpenedMesh | None]:  # fmt: skip
        """Open the pair by `split`, as planned for the devices of a file, or as planned for the measured ones; over RPC
        the pair is all that is returned."""
        from edgellm.llm.mesh_llm import MeshOptions, open_mesh, place_described
        from edgellm.llm.model_loading import EngineConfig
        from edgellm.mesh import part_of
        from edgellm.mesh.fleet_file import read_fleet

        stages, placed = None, None
        if described is not None:
            stages = place_described(self.file, read_fleet(described), workload)
            if stages.phases is not None and stages.phases.following:
                say(stages.phases.sentence, style="dim")
        elif split is None:
            split, stages, placed = self._placed(workload)
        config = EngineConfig(
            self.draft, hardware=workload.hardware, draft_hardware=self.hardware.of(options.DRAFT), history=history
        )
        sessions, half = workload.sessions, workload.half
        wanted = MeshOptions(split, stages, self.home.peer, workload.context, sessions, half, rests, text=self.text)
        if self.choice.over_rpc:
            open_over_rpc = part_of("rpc", "opening").open_over_rpc
            with Loading() as loading:
                return open_over_rpc(self.file, wanted, placed, config, _notify, loading), None
        opened = open_mesh(self.file, wanted, config, _notify)
        return opened.pair, opened

    def _placed(self, workload: Workload) -> tuple[str | None, Placement | None, RpcPlacement | None]:
        """Return a split, stages or a placement over RPC on the measured devices, and print why. Without other devices
        nothing is measured, and the split is this device."""
        from edgellm.engine.gguf.memory import text_layers
        from edgellm.mesh import part_of
        from edgellm.mesh.placement import model_costs

        workers, over_rpc = find_home_workers(self.home.interface, self.home.peer), self.choice.over_rpc
        unusable = [(worker.name, worker.error) for worker in workers if worker.error is not None]
        if len(unusable) < len(workers):
            survey = survey_workers(self.file, workers, False, workload.hardware, by_stand_in=over_rpc)
            if not over_rpc:
                return None, self._stages(survey, workload), None
            placed: RpcPlacement = part_of("rpc", "opening").place_over_rpc(self.file, survey, workload)
            say(placed.advice, style="dim")
            if (better := placed.one_model_each(self.model)) is not None:
                _notify(better)
            if self.explain:
                print_left_out(placed.left_out)
            return None, None, placed
        print_left_out(unusable)
        say("No other device can be used, so this one holds all layers.", style="dim")
        layers = text_layers(self.file.header) if over_rpc else model_costs(self.file).shape.layers
        return f"{HERE}:1-{layers}", None, None

    def _stages(self, survey: Survey, workload: Workload) -> Placement:
        from edgellm.llm.mesh_llm import place_stages
        from edgellm.mesh import ENGINES, part_of

        try:
            placed = place_stages(self.file, survey, workload)
        except PlanImpossible as error:
            if "rpc" not in ENGINES or not part_of("rpc", "backend").is_compiled_in():
                raise
            raise PlanImpossible(error.what, f"{error.next_step} Or add --engine rpc.") from None
        if deployed := placed.advice(self.model):
            _notify(deployed)
        say(f"For a prompt of {workload.tokens_in} tokens: {' '.join(placed.sentences)}", style="dim")
        if self.explain:
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
