"""`edgellm mesh deploy` and `edgellm mesh layers`: send layers to devices, list and remove them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from edgellm.cli.commands.mesh.peers import find_home_workers, held, paired_workers, survey_workers
from edgellm.cli.options.hardware import PLANNING, DeployHardware
from edgellm.cli.options.mesh import DeployOptions, HomeOptions
from edgellm.cli.options.models import AsJson, Interfaces, Yes, model_names
from edgellm.cli.options.records import only, refuse_given, with_records
from edgellm.cli.views.console import Columns, emit, emit_json, make_sure, one_line, say, show, size
from edgellm.cli.views.progress import Loading, activity, uploads
from edgellm.errors import EdgeError, InvalidOption
from edgellm.layer_range import HERE, LayerRange, StageShare, read_split

if TYPE_CHECKING:
    from edgellm.mesh.deploy import DeployProgress
    from edgellm.rpc.discovery.workers import Worker

_MEGABIT = 125_000.0  # bytes
LayerAction: TypeAlias = Literal["list", "clean"]


@with_records
def deploy(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=model_names, help="As for mesh plan.")],
    asked: DeployOptions,
    home: Annotated[HomeOptions, only("peer", "interface")],
    hardware: DeployHardware,
    as_json: AsJson = False,
) -> None:
    from edgellm.cli.views.plan_view import say_context
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
        say_context(own.n_ctx)
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
    with uploads(parts) as update:
        trust = Trust.load() if workers else None
        done = send_layers(file, manifest, parts, trust=trust, rate=asked.rate * _MEGABIT, notify=update)
    if as_json:
        emit_json([_row(moved) for moved in done])
    else:
        show([_row(moved) | {"moved": moved} for moved in done], _SENT, False, empty="")
    failed = [moved for moved in done if moved.error is not None]
    for moved in failed:
        text, name = str(moved.error), moved.part.name
        say(text if text.startswith(name) else f"{name}: {text}")
    if failed:
        raise typer.Exit(1)


def _row(moved: DeployProgress) -> dict[str, Any]:
    layers = moved.part.layers
    return {
        "device": moved.part.name, "first_layer": layers.start + 1, "last_layer": layers.stop, "bytes": moved.total,
        "already": moved.already, "sent": moved.sent, "seconds": round(moved.seconds, 3), "attempts": moved.attempts,
        "error": None if moved.error is None else str(moved.error),
    }  # fmt: skip


_SENT: Columns = {
    "DEVICE": lambda row: row["device"],
    "LAYERS": lambda row: str(row["moved"].part.layers),
    " SIZE": lambda row: size(row["bytes"]),
    " HAD": lambda row: size(row["already"]),
    " SENT": lambda row: size(row["sent"]),
    " TIME": lambda row: f"{row['seconds']:.1f} s",
    " RATE": lambda row: f"{8e-6 * row['sent'] / row['seconds']:.0f} Mbit/s" if row["sent"] and row["seconds"] else "-",
    "": lambda row: f"{size(row['moved'].arrived)} arrived" if row["error"] else "complete",
}


def layers(
    action: Annotated[
        LayerAction,
        typer.Argument(metavar="ACTION", help="list: layers by device. clean: remove those that are not in use."),
    ] = "list",
    on: Annotated[
        str | None, typer.Option(metavar="DEVICE", show_default="all", help="Device: here, a name, or HOST:PORT.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="MODEL", show_default="all", help="Layers of this model only."),
    ] = None,
    yes: Yes = False,
    interface: Interfaces = None,
    as_json: AsJson = False,
) -> None:
    from edgellm.mesh.deploy import deploy_parts

    workers = [] if on == HERE or (on and ":" in on) else paired_workers(interface)
    chosen: list[Worker | None] = [None, *workers]
    if on is not None:
        (part,) = deploy_parts([StageShare(on, LayerRange(0, 1))], {worker.name: worker for worker in workers})
        chosen = [part.worker]
    elif action == "clean":
        raise InvalidOption("`mesh layers clean` needs a device.", "Example: edgellm mesh layers clean --on here")
    fingerprint = _fingerprint(model)
    rows = [row for worker in chosen for row in held(worker) if fingerprint in ("", row["fingerprint"])]
    if action == "clean":
        _clean(chosen[0], rows, fingerprint, yes, as_json)
        return
    show(rows, _HELD, as_json, empty="There are no layers. Deploy some with: edgellm mesh deploy MODEL", fold="MODEL")
    for worker in () if as_json else chosen:
        say(_disk_use(worker), style="dim")


_HELD: Columns = {
    "DEVICE": lambda row: row["device"],
    "MODEL": lambda row: row["model"],
    "LAYERS": lambda row: f"{row['layers']} of {row['of']}{', cut here' if row['made'] else ''}",
    " SIZE": lambda row: size(row["size"]),
    " ARRIVING": lambda row: size(row["arriving"]) if row["arriving"] else "-",
}


def _disk_use(worker: Worker | None) -> str:
    if worker is None:
        from edgellm.storage.layers.store import LayerStore

        store = LayerStore()
        return f"here: {size(store.size)} of {size(store.limit)}; {size(store.free())} free on the disk ({store.root})"
    if (facts := worker.facts) is None:
        return f"{worker.name}: {worker.error}"
    return f"{worker.name}: {size(facts.size)} of {size(facts.limit)}; {size(facts.free)} free on the disk"


def _clean(worker: Worker | None, rows: list[dict[str, Any]], fingerprint: str, yes: bool, as_json: bool) -> None:
    """Remove the layers of `rows`; a `fingerprint` names their model, "" all models."""
    from edgellm.mesh.deploy import clean_worker
    from edgellm.storage.layers.store import LayerStore

    name = HERE if worker is None else worker.name
    pieces = removed = in_use = 0
    if rows:
        listed = ", ".join(f"{row['model']} {row['layers']} ({size(row['size'])})" for row in rows)
        make_sure("remove", f"{one_line(listed)} on {name}", yes=yes)
    if worker is None and (rows or not fingerprint):
        gone = LayerStore().clean(fingerprint or None)
        pieces, removed, in_use = gone.pieces, gone.size, gone.in_use
    elif worker is not None and (rows or not fingerprint):
        pieces, removed, in_use = clean_worker(worker, fingerprint)
    if as_json:
        emit(json.dumps({"device": name, "pieces": pieces, "bytes": removed, "in_use": in_use}))
        return
    kept = f"; {in_use} in use were kept" if in_use else ""
    say(f"{name}: removed {pieces} pieces, {size(removed)}{kept}")


def _fingerprint(model: str | None) -> str:
    """Return the fingerprint of a model by name; empty for all models."""
    from edgellm.storage import fingerprint, resolve

    if model is None:
        return ""
    with activity(f"reading {model}"):
        try:
            return fingerprint(resolve(model))
        except OSError as error:
            raise EdgeError(f"{model} cannot be read: {error.strerror}.", "Check its permissions.") from None
