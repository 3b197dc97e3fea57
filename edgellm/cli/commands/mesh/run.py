"""`edgellm mesh run`: one reply from a model that is split over devices, and what each of them did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgellm.cli.commands.mesh.peers import find_home_workers, print_left_out, print_units, survey_workers
from edgellm.cli.options.hardware import DRAFT, VERIFIER, HardwareOptions, MeshHardware
from edgellm.cli.options.mesh import HomeOptions, RunOptions
from edgellm.cli.options.models import INTERRUPTED, Engine, PairOptions, ThinkOptions, model_names
from edgellm.cli.options.records import only, with_records
from edgellm.cli.views.console import say
from edgellm.cli.views.progress import Loading
from edgellm.cli.views.reply_printer import Display
from edgellm.errors import InvalidOption, PlanImpossible
from edgellm.layer_range import HERE
from edgellm.spec.params import ReplyOptions

if TYPE_CHECKING:
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.coldstart.home import Objective
    from edgellm.engine import ModelFile
    from edgellm.llm import LLM
    from edgellm.llm.home import EngineChoice, Workload
    from edgellm.llm.mesh_llm import OpenedMesh
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.mesh.placement import Placement
    from edgellm.rpc_engine.opening import OpenedRpc
    from edgellm.rpc_engine.plan import RpcPlacement
    from edgellm.storage.default_pair import ResolvedPair

AUTO = "auto"
CHAT_TOKENS = 256  # assumed prompt of a conversation, whose length is unknown


@with_records
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=model_names, help="As for mesh plan.")],
    prompt: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Question.")],
    asked: RunOptions,
    reply: Annotated[ReplyOptions, only("max_tokens", "temperature", "seed", "retrieval")],
    think: ThinkOptions,
    display: Annotated[Display, only("as_json", "explain")],
    hardware: MeshHardware,
) -> int:
    from edgellm.cli.views.reply_printer import print_reply
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.llm import compose
    from edgellm.llm.mesh_llm import OpenedMesh

    question = " ".join(prompt)
    if not question.strip():
        raise InvalidOption("The question is empty.", 'Ask something: edgellm mesh run MODEL "Why is the sky blue?"')
    if asked.split is not None and asked.devices is not None:
        raise InvalidOption("--split and --devices exclude each other.", "Leave one of them out.")
    options = replace(reply, **think.fields())
    spread = Spread.of(model, asked, asked.draft, hardware, explain=display.explain)
    if spread.choice.over_rpc and (asked.f32 or asked.devices is not None):
        raise InvalidOption(f"--{'f32' if asked.f32 else 'devices'} is for stages only.", "Leave it out.")
    workload = spread.workload(max(1, len(question) // 4), options.max_tokens, asked.objective)
    with spread.open(asked.split, asked.devices, workload, wide=asked.f32) as opened:
        reports = None
        if isinstance(opened, OpenedMesh):
            if display.explain:
                say(opened.reason, style="dim")
            reports = Reports(opened, as_json=display.as_json)
        summary = print_reply(opened.pair.reply(compose(question, system=asked.system), options), display)
        if reports is not None:
            reports.reply_finished(summary)
        return INTERRUPTED if summary.finish_reason == "cancelled" else 0


@dataclass(frozen=True, slots=True)
class OverDevicesPair:
    """A pair whose verifier is on several devices; `reports` and `mesh` are set for stages, None for RPC."""

    pair: LLM
    reports: Reports | None = None
    mesh: OpenedMesh | None = None


def over_devices(
    models: PairOptions, pair: ResolvedPair, max_tokens: int, hardware: HardwareOptions, *,
    display: Display, sessions: int = 1, history: bool = True,
) -> OverDevicesPair:  # fmt: skip
    """Open a mesh for `chat --mesh` and `serve --mesh`, with the draft model and the verifier of a `pair`.
    `models.mesh`: a split, the name of a devices file, or AUTO for the best split over the measured devices."""
    from edgellm.cli.views.timeline_view import Reports
    from edgellm.llm.mesh_llm import OpenedMesh

    mesh = models.mesh or AUTO
    home = HomeOptions(models.engine, models.peer)
    spread = Spread.of(str(pair.verifier), home, str(pair.draft), hardware, explain=display.explain)
    described = Path(mesh).expanduser() if mesh.endswith(".toml") else None
    if described is not None and spread.choice.over_rpc:
        raise InvalidOption(f"--mesh {mesh} is for stages only.", "Give a split, or --mesh auto.")
    # in a conversation the layers stay loaded, so the time of every token counts, not only that of the first
    workload = spread.workload(CHAT_TOKENS, max_tokens, "reply", sessions)
    split = None if mesh == AUTO or described is not None else mesh
    opened = spread.open(split, described, workload, rests=True, history=history)
    if isinstance(opened, OpenedMesh):
        return OverDevicesPair(opened.pair, Reports(opened, as_json=display.as_json), opened)
    return OverDevicesPair(opened.pair)


@dataclass(frozen=True, slots=True)
class Spread:
    """A model to be spread over devices, named `model` by the user, and what was asked for. `explain`: print why."""

    model: str
    file: ModelFile
    choice: EngineChoice
    home: HomeOptions
    draft: str
    hardware: HardwareOptions
    explain: bool

    @classmethod
    def of(cls, model: str, home: HomeOptions, draft: str, hardware: HardwareOptions, *, explain: bool) -> Spread:
        """Find the model and choose the engine."""
        from edgellm.engine import ModelFile
        from edgellm.storage import resolve

        file = ModelFile.open(resolve(model))
        return cls(model, file, engine_for(file, home.engine), home, draft, hardware, explain)

    def workload(self, tokens_in: int, tokens_out: int, objective: Objective, sessions: int = 1) -> Workload:
        """Return what is planned for, with this device's hardware."""
        from edgellm.llm.home import Workload

        own = self.hardware.of(VERIFIER)
        return Workload(tokens_in, tokens_out, objective, own.n_ctx, sessions, own)

    def open(
        self, split: str | None, described: Path | None, workload: Workload, *, wide: bool = False,
        rests: bool = False, history: bool = True,
    ) -> OpenedMesh | OpenedRpc:  # fmt: skip
        """Open the pair over devices: by `split`, as planned for those of a file, or as planned for the measured ones.
        `wide` and `rests` as for `MeshOptions`."""
        from edgellm.engine.gguf.memory import text_layers
        from edgellm.llm.home import place_described
        from edgellm.llm.mesh_llm import MeshOptions, open_mesh
        from edgellm.llm.model_loading import EngineConfig
        from edgellm.mesh import part_of
        from edgellm.mesh.fleet_file import read_fleet
        from edgellm.mesh.model_costs import model_costs

        over_rpc, stages, placed = self.choice.over_rpc, None, None
        if described is not None:
            stages = place_described(self.file, read_fleet(described), workload)
        elif split is None:
            if (survey := self._survey(workload)) is None:
                split = f"{HERE}:1-{text_layers(self.file.header) if over_rpc else model_costs(self.file).shape.layers}"
            elif over_rpc:
                placed = self._placed_over_rpc(survey, workload)
            else:
                stages = self._placed(survey, workload)
        config = EngineConfig(
            self.draft, hardware=workload.hardware, draft_hardware=self.hardware.of(DRAFT), history=history
        )
        if over_rpc:
            rpc = part_of("rpc", "opening")
            options = rpc.RpcOptions(split, placed, self.home.peer, workload.context, workload.sessions)
            with Loading() as loading:
                found: OpenedRpc = rpc.open_over_rpc(self.file, options, config, _notify, loading)
            return found
        options = MeshOptions(split, stages, self.home.peer, workload.context, workload.sessions, wide, rests)
        opened = open_mesh(self.file, options, config, _notify)
        if opened.phases is not None and opened.phases.following:
            say(opened.phases.sentence, style="dim")
        return opened

    def _survey(self, workload: Workload) -> Survey | None:
        """Measure the devices; return None without other devices, and then nothing is measured."""
        workers = find_home_workers(self.home.interface, self.home.peer)
        unusable = [(worker.name, worker.error) for worker in workers if worker.error is not None]
        if len(unusable) < len(workers):
            return survey_workers(self.file, workers, False, workload.hardware, by_stand_in=self.choice.over_rpc)
        print_left_out(unusable)
        say("No other device can be used, so this one holds all layers.", style="dim")
        return None

    def _placed(self, survey: Survey, workload: Workload) -> Placement:
        """Return the best stages on the measured devices; print why."""
        from edgellm.llm.home import place_stages
        from edgellm.mesh import ENGINES, part_of

        try:
            placed = place_stages(self.file, survey, workload)
        except PlanImpossible as error:
            if "rpc" not in ENGINES or not part_of("rpc", "backend").is_compiled_in():
                raise
            raise PlanImpossible(error.what, f"{error.next_step} Or add --engine rpc.") from None
        if deployed := placed.advice(self.model):
            _notify(deployed)
        say(placed.reason, style="dim")
        if self.explain:
            print_units(survey)
            for name, why in placed.why():
                say(f"{name}: {why}", style="dim")
        return placed

    def _placed_over_rpc(self, survey: Survey, workload: Workload) -> RpcPlacement:
        """Return the best placement over RPC; print why."""
        from edgellm.mesh import part_of

        placed: RpcPlacement = part_of("rpc", "opening").place_over_rpc(self.file, survey, workload)
        say(placed.plan.advice, style="dim")
        if (better := placed.one_model_each(self.model)) is not None:
            _notify(better)
        for name, why in placed.left_out if self.explain else ():
            say(f"left out: {name}: {why}", style="dim")
        return placed


def engine_for(file: ModelFile, asked: Engine) -> EngineChoice:
    """Return the engine for a model; say why where it is RPC without having been asked for."""
    from edgellm.llm.home import choose_engine

    choice = choose_engine(file, asked)
    if asked == "auto" and choice.over_rpc:
        say(f"engine: {choice.engine}. {choice.reason}", style="dim")
    return choice


def _notify(text: str) -> None:
    say(text, style="yellow")
