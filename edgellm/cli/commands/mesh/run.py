"""`edgellm mesh run`: one reply from a model that is split over devices, and what each of them did."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli.commands.pair import Interfaces
from edgellm.cli.help_examples import model_names
from edgellm.cli.model_options import (
    DRAFT,
    VERIFIER,
    HardwareOptions,
    ReasoningEffort,
    Seed,
    Temperature,
    TemplateArgs,
    Think,
    thinking,
    with_mesh_hardware,
)
from edgellm.cli.views.console import Loading, say
from edgellm.cli.views.device_table import find_home_workers, print_left_out, print_units, survey_workers
from edgellm.errors import EdgeError, InvalidOption
from edgellm.layer_range import HERE

if TYPE_CHECKING:
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.engine import ModelFile
    from edgellm.llm import LLM
    from edgellm.llm.home.plan import HomePlan
    from edgellm.llm.home.target import PlanTarget
    from edgellm.llm.mesh_llm import OpenedMesh
    from edgellm.llm.rpc_llm import OpenedRpc
    from edgellm.mesh.fleet_file import Fleet
    from edgellm.mesh.ggml_rpc.engine_choice import EngineChoice
    from edgellm.mesh.ggml_rpc.placement import RpcPlacement

INTERRUPTED = 130
AUTO = "auto"
CHAT_TOKENS = 256  # of a prompt, in a conversation whose length is unknown


class Engine(enum.StrEnum):
    """What spreads a model over devices."""

    AUTO = "auto"
    STAGES = "stages"
    RPC = "rpc"


class Objective(enum.StrEnum):
    """The time that a plan minimises: to the first token, or to the end of the reply."""

    TTFT = "ttft"
    REPLY = "reply"


Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:A-B,NAME:C-D", show_default="the best one",
        help="Layers of each device, counted from 1. NAME: here, a paired device, or HOST:PORT.",
    ),
]  # fmt: skip
Workers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer", metavar="[NAME=]HOST:PORT", show_default=False,
        help="Address of a worker besides the paired ones. In a run, a worker without layers replaces a lost one.",
    ),
]  # fmt: skip
Devices = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml", show_default=False, help="Devices file to plan for; see edgellm mesh plan --help-all."
    ),
]
OverDevices = Annotated[
    str | None,
    typer.Option(
        metavar="SPLIT|FILE.toml|auto", show_default=False,
        help="Split the verifier over devices, as in mesh run; 'auto': by the best split. --peer then adds workers by "
        "their addresses.",
    ),
]  # fmt: skip


EngineName = Annotated[
    Engine,
    typer.Option(
        "--engine", metavar="auto|stages|rpc", show_default="auto",
        help="stages: each device computes its own layers of the file. rpc: llama.cpp's RPC, also for models whose "
        "layers cannot be cut apart. auto: the one that is predicted to be faster, where both are possible.",
    ),
]  # fmt: skip


@with_mesh_hardware
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=model_names, help="As for mesh plan.")],
    prompt: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Question.")],
    split: Split = None,
    devices: Devices = None,
    engine: EngineName = Engine.AUTO,
    peer: Workers = None,
    draft: Annotated[
        str,
        typer.Option(metavar="MODEL", autocompletion=model_names, help="Small model that drafts; 'none': no drafts."),
    ] = "none",
    system: Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum tokens of the answer.")] = 512,
    think: Think = "auto",
    reasoning_effort: ReasoningEffort = None,
    template_arg: TemplateArgs = None,
    temperature: Temperature = None,
    seed: Seed = None,
    retrieval: Annotated[
        str, typer.Option(metavar="auto|off|SOURCES", help="Sources to copy drafts from; see edgellm chat --help.")
    ] = "auto",
    objective: Annotated[
        Objective, typer.Option(help="Without --split: time to minimise, to the first token or the reply's end.")
    ] = Objective.TTFT,
    interface: Interfaces = None,
    f32: Annotated[bool, typer.Option("--f32", help="Send activations as 32-bit, not 16-bit floats.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: each token, a summary, the stages.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Explain the split and each chunk.")] = False,
    *,
    hardware: HardwareOptions,
) -> int:  # fmt: skip
    from edgellm.cli.views.reply_printer import Display, print_reply
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.engine import ModelFile
    from edgellm.llm import compose
    from edgellm.llm.home.target import PlanTarget
    from edgellm.llm.mesh_llm import MeshOptions, open_mesh
    from edgellm.spec.params import ReplyOptions
    from edgellm.storage import resolve

    question = " ".join(prompt)
    if not question.strip():
        raise InvalidOption("The question is empty.", 'Ask something: edgellm mesh run MODEL "Why is the sky blue?"')
    reply_options = ReplyOptions(
        max_tokens=max_tokens, temperature=temperature, seed=seed, retrieval=retrieval,
        **thinking(think, reasoning_effort, template_arg),
    )  # fmt: skip
    fleet = _fleet(split, devices)
    file = ModelFile.open(resolve(model))
    own = hardware.of(VERIFIER)
    target = PlanTarget(max(1, len(question) // 4), max_tokens, objective.value, own.n_ctx, hardware=own)
    choice = choice_of(file, engine)
    if devices is not None or f32:
        if choice.over_rpc:
            raise InvalidOption(f"--{'f32' if f32 else 'devices'} is for stages only.", "Leave it out.")
        choice = choice.settled()
    plan: HomePlan | None = None
    if split is None and fleet is None:
        plan = plan_at_home(model, file, choice, engine, target, tuple(peer or ()), interface, explain=explain)
        choice, split = (choice, _all_here(file, choice)) if plan is None else (plan.choice, None)
    over = open_rpc(file, choice, split, plan, target, tuple(peer or ()), draft, hardware=hardware)
    if over is not None:
        with over:
            summary = print_reply(
                over.pair.reply(compose(question, system=system), reply_options),
                Display(as_json=as_json, explain=explain),
            )
            return INTERRUPTED if summary.finish_reason == "cancelled" else 0
    stages = None if plan is None else plan.stages
    options = MeshOptions(
        split, fleet, None if stages is None else stages.placement, tuple(peer or ()), target.context, sessions=1,
        wide=f32, tokens_out=max_tokens, tokens_in=target.tokens_in, objective=target.objective,
        phases=stages is None, phased=None if stages is None else stages.phased,
    )  # fmt: skip
    with open_mesh(
        file, options, draft=draft, hardware=own, draft_hardware=hardware.of(DRAFT),
        notify=lambda text: say(text, style="yellow"),
    ) as opened:  # fmt: skip
        say_phases(opened)
        if explain:
            say(opened.reason, style="dim")
        reports = Reports(opened, as_json=as_json)
        reply = opened.pair.reply(compose(question, system=system), reply_options)
        summary = print_reply(reply, Display(as_json=as_json, explain=explain))
        reports.reply_finished(summary)
        return INTERRUPTED if summary.finish_reason == "cancelled" else 0


def choice_of(file: ModelFile, asked: Engine) -> EngineChoice:
    """Return the engine for a model before devices are asked, and say why where it is RPC without having been asked
    for."""
    from edgellm.mesh.ggml_rpc.engine_choice import choose_engine

    choice = choose_engine(file, asked.value)
    if asked is Engine.AUTO and choice.over_rpc:
        say(engine_line(choice), style="dim")
    return choice


def engine_line(choice: EngineChoice) -> str:
    """Return a line that names the engine, and says why it is taken."""
    return f"engine: {choice.engine}. {choice.reason}"


@dataclass(frozen=True, slots=True)
class OverDevicesPair:
    """A pair whose verifier is on several devices; `reports` and `mesh` where it is there by stages."""

    pair: LLM
    reports: Reports | None = None
    mesh: OpenedMesh | None = None


def over_devices(
    mesh: str, model: str, peers: Sequence[str], draft: str, max_tokens: int, *, as_json: bool, explain: bool,
    sessions: int = 1, history: bool = True, hardware: HardwareOptions, engine: Engine = Engine.AUTO,
) -> OverDevicesPair:  # fmt: skip
    """Open a mesh for `chat --mesh` and `serve --mesh`. `mesh`: a split, the name of a devices file, or AUTO for the
    best split over the measured devices."""
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.engine import ModelFile
    from edgellm.llm.home.target import PlanTarget
    from edgellm.llm.mesh_llm import MeshOptions, open_mesh
    from edgellm.storage import resolve

    file = ModelFile.open(resolve(model))
    # in a conversation the layers stay loaded, so the time of every token counts, not only that of the first
    own = hardware.of(VERIFIER)
    target = PlanTarget(CHAT_TOKENS, max_tokens, "reply", own.n_ctx, sessions, own)
    choice = choice_of(file, engine)
    plan: HomePlan | None = None
    split = fleet = None
    if mesh == AUTO:
        plan = plan_at_home(model, file, choice, engine, target, peers, None, explain=explain)
        choice, split = (choice, _all_here(file, choice)) if plan is None else (plan.choice, None)
    elif not mesh.endswith(".toml"):
        split = mesh
    elif choice.over_rpc:
        raise InvalidOption(f"--mesh {mesh} is for stages only.", "Give a split, or --mesh auto.")
    else:
        fleet = _fleet(None, Path(mesh).expanduser())
    over = open_rpc(file, choice, split, plan, target, peers, draft, hardware=hardware, history=history)
    if over is not None:
        return OverDevicesPair(over.pair)
    stages = None if plan is None else plan.stages
    options = MeshOptions(
        split, fleet, None if stages is None else stages.placement, tuple(peers), target.context, sessions,
        tokens_in=target.tokens_in, tokens_out=max_tokens, objective=target.objective, phases=stages is None,
        phased=None if stages is None else stages.phased, rests=True,
    )  # fmt: skip
    opened = open_mesh(
        file, options, draft=draft, history=history, hardware=own, draft_hardware=hardware.of(DRAFT),
        notify=lambda text: say(text, style="yellow"),
    )  # fmt: skip
    say_phases(opened)
    return OverDevicesPair(opened.pair, Reports(opened, as_json=as_json), opened)


def say_phases(opened: OpenedMesh) -> None:
    """Say which placements are planned to take over behind a reply."""
    if opened.phases is not None and opened.phases.following:
        from edgellm.cli.views.phase_view import phase_lines

        for line in phase_lines(opened.phases.plan, opened.phases.problem, opened.phases.names):
            say(line, style="dim")


def open_rpc(
    file: ModelFile, choice: EngineChoice, split: str | None, plan: HomePlan | None, target: PlanTarget,
    peers: Sequence[str], draft: str, *, hardware: HardwareOptions, history: bool = True,
) -> OpenedRpc | None:  # fmt: skip
    """Open a model over llama.cpp's RPC, by a split, or as planned for the measured devices. Return None where stages
    are to be opened: by the `choice`, or because RPC fails and the plan has stages, too."""
    from edgellm.llm.rpc_llm import RpcOptions, open_over_rpc

    if not choice.over_rpc:
        return None
    options = RpcOptions(split, None if plan is None else plan.rpc, tuple(peers), target.context, target.sessions)
    try:
        with Loading() as loading:
            return open_over_rpc(
                file, options, draft=draft, hardware=target.hardware, draft_hardware=hardware.of(DRAFT),
                history=history, notify=lambda text: say(text, style="yellow"), progress=loading,
            )  # fmt: skip
    except EdgeError as error:
        if plan is None or plan.stages is None:
            raise
        say(f"{error}", style="yellow")
        say("engine: stages. RPC was predicted to be faster, but the model could not be opened over it.", style="dim")
        return None


def plan_at_home(
    model: str, file: ModelFile, choice: EngineChoice, asked: Engine, target: PlanTarget, peers: Sequence[str],
    interface: Sequence[str] | None, *, explain: bool,
) -> HomePlan | None:  # fmt: skip
    """Return the plan for a model on the measured devices, with the engine that is better where the `choice` is
    undecided; print its reason. Without other devices nothing is measured, and there is no plan."""
    from edgellm.llm.home.plan import plan_home

    workers = find_home_workers(interface, peers)
    if all(worker.error is not None for worker in workers):
        print_left_out([(worker.name, worker.error) for worker in workers if worker.error is not None])
        say("No other device can be used, so this one holds all layers.", style="dim")
        return None
    home = survey_workers(file, workers, False, target.hardware, by_stand_in=choice.over_rpc)
    plan = plan_home(file, home, choice, target)
    if asked is Engine.AUTO and plan.choice is not choice and (plan.choice.over_rpc or plan.choice.by_times):
        say(engine_line(plan.choice), style="dim")
    if deployed := plan.deployment(model):
        say(deployed, style="yellow")
    if plan.choice.over_rpc and plan.rpc is not None:
        _say_over_rpc(plan.rpc, model, explain=explain)
    elif plan.stages is not None:
        say(plan.stages.placement.reason, style="dim")
        if explain:
            print_units(home)
            for name, why in plan.stages.placement.why():
                say(f"{name}: {why}", style="dim")
    return plan


def _say_over_rpc(placed: RpcPlacement, model: str, *, explain: bool) -> None:
    say(placed.plan.advice, style="dim")
    if (better := placed.one_model_each(model)) is not None:
        say(better, style="yellow")
    if explain:
        for name, why in placed.left_out:
            say(f"left out: {name}: {why}", style="dim")


def _all_here(file: ModelFile, choice: EngineChoice) -> str:
    """Return the split with all layers on this device."""
    from edgellm.mesh.ggml_rpc.costs import rpc_costs
    from edgellm.mesh.model_costs import model_costs

    return f"{HERE}:1-{rpc_costs(file).layers if choice.over_rpc else model_costs(file).shape.layers}"


def _fleet(split: str | None, devices: Path | None) -> Fleet | None:
    from edgellm.mesh.fleet_file import read_fleet

    if split is not None and devices is not None:
        raise InvalidOption("--split and --devices exclude each other.", "Leave one of them out.")
    return None if devices is None else read_fleet(devices)
