"""`edgellm mesh deploy` and `edgellm mesh layers`: send layers to devices, list and remove them."""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edgellm.cli.commands.mesh.peers import held_by, paired_workers
from edgellm.cli.options.hardware import PLANNING, DeployHardware
from edgellm.cli.options.mesh import DeployOptions, HomeOptions
from edgellm.cli.options.models import AsJson, Interfaces, model_names
from edgellm.cli.options.records import only, refuse_given, with_records
from edgellm.cli.views.console import emit, err, is_terminal, make_sure, one_line, out, say, size, table
from edgellm.cli.views.device_table import find_home_workers, progress, survey_workers
from edgellm.cli.views.progress import Loading
from edgellm.errors import EdgeError, InvalidOption
from edgellm.layer_range import HERE, LayerRange, StageShare, ranges, read_split

if TYPE_CHECKING:
    from edgellm.mesh.deploy import DeployPart, DeployProgress
    from edgellm.rpc.discovery.workers import Worker

_LINE_SECONDS = 5.0  # pause between two lines of progress, if there is no bar
_MEGABIT = 125_000.0  # bytes


class LayerAction(enum.StrEnum):
    """Actions on the layers of a device."""

    LIST = "list"
    CLEAN = "clean"


@with_records
def deploy(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=model_names, help="As for mesh plan.")],
    asked: DeployOptions,
    home: Annotated[HomeOptions, only("peer", "interface")],
    hardware: DeployHardware,
    as_json: AsJson = False,
) -> None:
    from edgellm.coldstart.plan import plan
    from edgellm.engine import ModelFile
    from edgellm.llm.home import PLAN_SECONDS, Workload, planned_positions, within
    from edgellm.mesh.deploy import deploy as send_layers
    from edgellm.mesh.deploy import deploy_parts
    from edgellm.rpc.trust.trust import Trust
    from edgellm.storage import resolve
    from edgellm.storage.layers.manifest import manifest_of

    if asked.split is not None:
        refuse_given(ctx, PLANNING, "is for a plan, and --split says what is sent", "Leave one of them out.")
    file = ModelFile.open(resolve(model))
    if asked.split is None:
        own = hardware.of_planned()
        own = replace(own, n_ctx=planned_positions(file, own.n_ctx, asked.tokens_in + asked.tokens_out))
        workload = Workload(asked.tokens_in, asked.tokens_out, "reply" if asked.reply else "ttft", hardware=own)
        survey = survey_workers(file, find_home_workers(home.interface, home.peer), False, own)
        found = plan(workload.home(file, survey.fleet()), within(PLAN_SECONDS))
        say(found.advice)
        say(f"Memory is counted for a context of {own.n_ctx:,} tokens; change it with --ctx-size.", style="dim")
        named, workers = found.advised.shares, dict(survey.workers)
        if [one.name for one in named] == [HERE]:
            say("There is nothing to deploy: the plan uses this device alone, which has the model.")
            if as_json:
                emit("[]")
            return
    else:
        named = read_split(asked.split)
        addressed = all(one.name == HERE or ":" in one.name for one in named)
        workers = {} if addressed else {worker.name: worker for worker in find_home_workers(home.interface, home.peer)}
    parts = deploy_parts(named, workers)
    with Loading("reading") as loading:
        manifest = manifest_of(file, [part.layers for part in parts], lambda share: loading(file.path.name, share))
    with transfer_progress(parts) as update:
        done = send_layers(
            file, manifest, parts, trust=Trust.load() if workers else None, rate=asked.rate * _MEGABIT, notify=update
        )
    if as_json:
        emit(json.dumps([_row(moved) for moved in done], indent=2))
    else:
        out().print(_table(done))
    failed = [moved for moved in done if moved.error is not None]
    for moved in failed:
        text, name = str(moved.error), moved.part.name
        say(text if text.startswith(name) else f"{name}: {text}")
    if failed:
        raise typer.Exit(1)


@contextmanager
def transfer_progress(parts: Sequence[DeployPart]) -> Iterator[Callable[[DeployProgress], None]]:
    """Yield a function that shows the progress of a device: a bar on a terminal, else a line now and then."""
    if not is_terminal(sys.stderr):
        printed: dict[str, float] = {}

        def line(moved: DeployProgress) -> None:
            name, now = moved.part.name, time.monotonic()
            if now - printed.setdefault(name, now) >= _LINE_SECONDS and not moved.done:
                printed[name] = now
                say(f"{name}: {size(moved.arrived)} of {size(moved.total)}, {moved.activity}", style="dim")

        yield line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TextColumn("{task.fields[doing]}"))  # fmt: skip
    with Progress(*columns, console=err(), transient=True) as progress:
        tasks: dict[str, TaskID] = {
            part.name: progress.add_task(one_line(part.name), total=None, doing="") for part in parts
        }

        def bar(moved: DeployProgress) -> None:
            progress.update(
                tasks[moved.part.name], completed=moved.arrived, total=moved.total, doing=one_line(moved.activity)
            )

        yield bar


def _row(moved: DeployProgress) -> dict[str, Any]:
    part = moved.part
    return {
        "device": part.name, "first_layer": part.layers.start + 1, "last_layer": part.layers.stop, "bytes": moved.total,
        "already": moved.already, "sent": moved.sent, "seconds": round(moved.seconds, 3), "attempts": moved.attempts,
        "error": None if moved.error is None else str(moved.error),
    }  # fmt: skip


def _table(done: Sequence[DeployProgress]) -> Table:
    sizes = ("SIZE", "HAD", "SENT", "TIME", "RATE")
    made = table("DEVICE", "LAYERS", *sizes, "", right=sizes)
    for moved in done:
        rate = f"{8e-6 * moved.sent / moved.seconds:.0f} Mbit/s" if moved.sent and moved.seconds else "-"
        made.add_row(
            one_line(moved.part.name), str(moved.part.layers), size(moved.total),
            size(moved.already), size(moved.sent), f"{moved.seconds:.1f} s", rate,
            "complete" if moved.error is None else f"{size(moved.arrived)} arrived",
        )  # fmt: skip
    return made


def layers(
    action: Annotated[
        LayerAction,
        typer.Argument(metavar="ACTION", help="list: layers by device. clean: remove those that are not in use."),
    ] = LayerAction.LIST,
    on: Annotated[
        str | None, typer.Option(metavar="DEVICE", show_default="all", help="Device: here, a name, or HOST:PORT.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", show_default="all", help="Layers of this model only."),
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Remove without asking.")] = False,
    interface: Interfaces = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from edgellm.mesh.deploy import deploy_parts

    workers = [] if on == HERE or (on and ":" in on) else paired_workers(interface)
    if on is not None:
        (part,) = deploy_parts([StageShare(on, LayerRange(0, 1))], {worker.name: worker for worker in workers})
        chosen: list[Worker | None] = [part.worker]
    else:
        chosen = [None, *workers]
    if action is LayerAction.LIST:
        _list(chosen, model, as_json)
        return
    if on is None:
        raise InvalidOption("`mesh layers clean` needs a device.", "For example: edgellm mesh layers clean --on here")
    _clean(chosen[0], model, yes, as_json)


def _list(chosen: Sequence[Worker | None], model: str | None, as_json: bool) -> None:
    fingerprint = _fingerprint(model)
    rows = [row for worker in chosen for row in _held(worker) if fingerprint in ("", row["fingerprint"])]
    if as_json:
        emit(json.dumps(rows, indent=2))
        return
    made = table("DEVICE", "MODEL", "LAYERS", "SIZE", "ARRIVING", right=("SIZE", "ARRIVING"), fold="MODEL")
    for row in rows:
        arriving = size(row["arriving"]) if row["arriving"] else "-"
        layers = f"{row['layers']} of {row['of']}{', cut here' if row['made'] else ''}"
        made.add_row(one_line(row["device"]), one_line(row["model"]), layers, size(row["size"]), arriving)
    if rows:
        out().print(made)
    else:
        say("There are no layers. Deploy some with: edgellm mesh deploy MODEL")
    for worker in chosen:
        say(_disk_use(worker), style="dim")


def _held(worker: Worker | None) -> Iterator[dict[str, Any]]:
    if worker is not None:
        for one, held in zip(worker.facts.models if worker.facts else (), held_by(worker), strict=True):
            yield {
                "device": worker.name, "fingerprint": one.manifest.fingerprint, "of": one.manifest.layers, **held,
                "arriving": one.arriving, "used": one.used, "made": False,
            }  # fmt: skip
        return
    from edgellm.storage.layers.store import CUT, LayerStore

    for mine in LayerStore().models():
        yield {
            "device": HERE, "fingerprint": mine.manifest.fingerprint, "of": mine.manifest.layers,
            "model": mine.manifest.name, "layers": ranges(mine.layers), "size": mine.size,
            "arriving": sum(mine.arriving.values()), "used": mine.used, "made": mine.owner == CUT,
        }  # fmt: skip


def _disk_use(worker: Worker | None) -> str:
    if worker is None:
        from edgellm.storage.layers.store import LayerStore

        store = LayerStore()
        return f"here: {size(store.size)} of {size(store.limit)}; {size(store.free())} free on the disk ({store.root})"
    if worker.facts is None:
        return f"{worker.name}: {worker.error}"
    facts = worker.facts
    return f"{worker.name}: {size(facts.size)} of {size(facts.limit)}; {size(facts.free)} free on the disk"


def _clean(worker: Worker | None, model: str | None, yes: bool, as_json: bool) -> None:
    fingerprint = _fingerprint(model)
    name = "here" if worker is None else worker.name
    chosen = [row for row in _held(worker) if fingerprint in ("", row["fingerprint"])]
    listed = ", ".join(f"{row['model']} {row['layers']} ({size(row['size'])})" for row in chosen)
    if chosen:
        make_sure("remove", f"{one_line(listed)} on {name}", yes=yes)
    pieces, removed, in_use = (0, 0, 0) if not chosen and fingerprint else _remove(worker, fingerprint)
    if as_json:
        emit(json.dumps({"device": name, "pieces": pieces, "bytes": removed, "in_use": in_use}))
        return
    kept = f"; {in_use} in use were kept" if in_use else ""
    say(f"{name}: removed {pieces} pieces, {size(removed)}{kept}")


def _remove(worker: Worker | None, fingerprint: str) -> tuple[int, int, int]:
    if worker is None:
        from edgellm.storage.layers.store import LayerStore

        removed = LayerStore().clean(fingerprint or None)
        return removed.pieces, removed.size, removed.in_use
    from edgellm.mesh.deploy import clean_worker

    return clean_worker(worker, fingerprint)


def _fingerprint(model: str | None) -> str:
    """Return the fingerprint of a model by name; empty for all models."""
    if model is None:
        return ""
    from edgellm.storage import fingerprint, resolve

    with progress(f"reading {model}"):
        try:
            return fingerprint(resolve(model))
        except OSError as error:
            raise EdgeError(f"{model} cannot be read: {error.strerror}.", "Check its permissions.") from None
