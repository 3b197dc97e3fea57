"""The devices that can hold layers; `edgellm mesh peers` lists them, `deploy` and `layers` send and list layers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from edgellm.cli import options
from edgellm.cli.options import option
from edgellm.cli.views.console import Columns, emit, emit_json, format_age, make_sure, one_line, say, show, tell
from edgellm.cli.views.progress import ProgressBar, activity
from edgellm.errors import EdgeError, InvalidOption, size
from edgellm.layer_range import HERE, StageShare, ranges, read_split
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.model_files import resolve

if TYPE_CHECKING:
    from edgellm.engine import ModelFile
    from edgellm.engine.hardware import Hardware
    from edgellm.llm.mesh_llm import Workload
    from edgellm.mesh.deploy import DeployProgress
    from edgellm.mesh.fleet_profiler import MeasuredSpeed, Survey
    from edgellm.rpc.layers import Worker


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan, and its devices if not those of this home."""

    engine: options.Engine = option("auto", "auto|stages|rpc")
    peer: tuple[str, ...] = option((), "[NAME=]HOST:PORT")
    devices: Path | None = option(None, "FILE.toml")
    preset: str | None = option(None, "NAME")
    tokens_in: int = option(1024, "N", least=1)
    tokens_out: int = option(128, "N", least=0)
    objective: options.Objective = option("ttft")
    overlap: Literal["paper", "receiving", "streamed"] = option("streamed")
    time_limit: float = option(2.0, "SECONDS", least=0.0)
    measure: bool = option(False, names=("--measure",))

    def workload(self, file: ModelFile | None, own: Hardware) -> Workload:
        """Return the reply that is planned for, with this device's `own` hardware."""
        from edgellm.llm.mesh_llm import Workload, planned_positions

        tokens = self.tokens_in + self.tokens_out
        own = replace(own, n_ctx=None if file is None else planned_positions(file, own.n_ctx, tokens))
        return Workload(self.tokens_in, self.tokens_out, self.objective, hardware=own)


def peers(as_json: options.AsJson = False) -> None:
    workers = find_home_workers()
    rows = [_row(worker) for worker in (None, *workers)]
    show(rows, _COLUMNS, as_json, empty="")
    if not workers and not as_json:
        say("No device is paired with this one. Pair one with: edgellm pair")
    if any(row["speed"] is None and not row["trouble"] for row in rows) and not as_json:
        say("Measure the other devices with: edgellm mesh plan MODEL --measure", "dim")


def find_home_workers(peers: Sequence[str] = ()) -> list[Worker]:
    """Return the workers among the paired devices, and those at the addresses `peers`, [NAME=]HOST:PORT."""
    from edgellm.mesh.fleet_profiler import discover_workers
    from edgellm.rpc.discovery.interfaces import chosen_hosts
    from edgellm.rpc.link import Endpoint

    places = [Endpoint.parse(peer) for peer in peers]
    with activity("looking for devices"):
        return discover_workers(chosen_hosts(), places)


def survey_workers(
    model: ModelFile, workers: Sequence[Worker], fresh: bool, hardware: Hardware, *, by_stand_in: bool = False
) -> Survey:
    """Return the figures of this device and of `workers`, measured if unknown or `fresh`; print which are left out."""
    from edgellm.mesh.fleet_profiler import survey, timed_model
    from edgellm.mesh.weight_cache import ComputeUnit

    with activity("asking the devices") as update:
        found = survey(
            workers, timed_model(model, by_stand_in=by_stand_in), remeasure=fresh,
            notify=lambda device, doing: update(f"{device}: {doing}"), unit=ComputeUnit.choose(hardware),
        )  # fmt: skip
    print_left_out(found.left_out)
    if doubts := found.doubts():
        named = "; ".join(doubts)
        say(f"Doubtful figures: {named}. Run again with --measure when the devices are idle.", style="yellow")
    return found


def print_left_out(devices: Sequence[tuple[str, EdgeError | str]]) -> None:
    """Print which devices cannot be used, and why."""
    for name, trouble in devices:
        say(f"left out: {name}: {trouble}", style="dim")


def units(home: Survey) -> list[dict[str, Any]]:
    """Return the unit that computes on each device, and why; None for the processor."""
    return [
        {"device": name, "unit": one.figures.unit or None, "processor": one.figures.processor,
         "reason": one.figures.unit_reason} for name, one in home.speeds.items()
    ]  # fmt: skip


def print_units(home: Survey) -> None:
    """Print the unit that computes on each device, and why."""
    for row in units(home):
        unit = row["unit"] or "the processor"
        say(one_line(f"{row['device']} computes on {unit} ({row['processor']}): {row['reason']}."), style="dim")


def held(worker: Worker | None) -> list[dict[str, Any]]:
    """Return the layers that a worker, or this device, has of each model."""
    from edgellm.storage.layer_store import CUT, LayerStore

    facts = LayerStore().facts() if worker is None else worker.facts
    return [
        {"device": HERE if worker is None else worker.name, "fingerprint": one.manifest.fingerprint,
         "of": one.manifest.layers, "model": one.manifest.name, "layers": ranges(one.layers), "used": one.used,
         "size": one.size, "arriving": one.arriving, "made": one.owner == CUT}
        for one in (() if facts is None else facts.models)
    ]  # fmt: skip


def _row(worker: Worker | None) -> dict[str, Any]:
    from edgellm.mesh.fleet_profiler import KeptFigures, key_of

    peer = address = trouble = there = line = None
    kept, key = KeptFigures.load(), key_of(worker)
    if worker is not None:
        peer, link = worker.peer, kept.lines.get(key)
        address, trouble = (None if one is None else str(one) for one in (worker.address, worker.error))
        there = sorted(worker.rights if worker.error is None else getattr(peer, "granted", ()))
        line = link and {
            "round_trip_ms": round(1e3 * link.line.round_trip, 3), "up_mbps": round(link.line.up / 1e6, 1),
            "down_mbps": round(link.line.down / 1e6, 1), "taken": link.taken, "age_s": _age(link.taken),
        }  # fmt: skip
    speed = kept.speeds.get(key)
    return {
        "name": HERE if worker is None else worker.name,
        "id": None if peer is None else str(peer.id), "short": "" if peer is None else peer.id.short,
        "may_here": None if peer is None else sorted(peer.rights), "may_there": there,
        "address": address, "trouble": trouble, "speed": None if speed is None else _speed(speed), "line": line,
        "held": [{key: one[key] for key in ("model", "layers", "size")} for one in held(worker)],
    }  # fmt: skip


def _speed(speed: MeasuredSpeed) -> dict[str, Any]:
    figures, curve = speed.figures, speed.utilisation
    rates = [speed.shape.flops(rows) / taken for rows, taken in zip(figures.rows, figures.seconds, strict=True)]
    same = ("memory", "processor", "unit", "unit_reason", "taken", "reason", "doubt")
    return {
        "model": speed.model, "tokens": list(figures.rows), "layer_ms": [1e3 * taken for taken in figures.seconds],
        "gflops": [round(rate / 1e9, 2) for rate in rates], "peak_gflops": round(curve.peak / 1e9, 2), "b": curve.b,
        "fit_worst": round(curve.worst, 3), "disk_mb_s": round(figures.disk / 1e6, 1), "age_s": _age(figures.taken),
        "weights_gb_s": round(figures.layer / figures.seconds[0] / 1e9, 2) if figures.rows[0] == 1 else None,
        **{name: getattr(figures, name) for name in same},
    }  # fmt: skip


def _age(taken: int) -> int:
    return max(0, int(time.time()) - taken)


def _computes(speed: dict[str, Any]) -> str:
    rates = [f"{rate:.0f}" if rate >= 10.0 else f"{rate:.2g}" for rate in (speed["gflops"][0], max(speed["gflops"]))]
    return f"{'-'.join(rates)} GFLOP/s" + (f" ({speed['unit']})" if speed["unit"] else "")


def _rights(rights: list[str] | None) -> str:
    return "-" if rights is None else ", ".join(rights) or "nothing"


_COLUMNS: Columns = {
    "NAME": "name",
    "ID": "short",
    "MAY HERE": lambda row: _rights(row["may_here"]),
    "MAY THERE": lambda row: _rights(row["may_there"]),
    "COMPUTES": lambda row: _computes(row["speed"]) if row["speed"] else "-",
    "READS": lambda row: (
        f"{row['speed']['weights_gb_s']:.1f} GB/s" if (row["speed"] or {}).get("weights_gb_s") else "-"
    ),
    "DISK": lambda row: f"{row['speed']['disk_mb_s']:.0f} MB/s" if row["speed"] else "-",
    "MEMORY": lambda row: size(row["speed"]["memory"]) if row["speed"] else "-",
    "LINE": lambda row: (
        "{round_trip_ms:.1f} ms, {up_mbps:.0f}/{down_mbps:.0f} Mbit/s".format(**row["line"]) if row["line"] else "-"
    ),
    "MEASURED": lambda row: (
        format_age(row["speed"]["age_s"]) + (", doubtful" if row["speed"]["doubt"] else "") if row["speed"] else "never"
    ),
    "LAYERS": lambda row: (
        ", ".join(f"{one['model']} {one['layers']}" for one in row["held"]) or row["trouble"] or "none"
    ),
}


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """The layers to send, and the devices to send them to."""

    split: str | None = option(None, "NAME:A-B,NAME:C-D", shown="as mesh plan advises")
    rate: float = option(0.0, "MBIT", least=0.0)


@options.with_records
def deploy(
    ctx: typer.Context,
    asked: DeployOptions,
    planned: Annotated[PlanOptions, "peer", "tokens_in", "tokens_out", "objective"],
    hardware: Annotated[options.PlanHardware, *options.PLANNING],
    model: str = typer.Argument(..., metavar="MODEL"),
    as_json: options.AsJson = False,
) -> None:
    from edgellm.engine import ModelFile
    from edgellm.mesh.deploy import deploy as send_layers
    from edgellm.mesh.deploy import deploy_parts
    from edgellm.storage.layer_pieces import manifest_of

    if asked.split is not None:
        options.refuse_given(
            ctx, options.PLANNING, "is for a plan, and --split says what is sent", "Leave one of them out."
        )
    file = ModelFile.open(resolve(model))
    workers: Mapping[str, Worker] = {}
    if asked.split is None:
        named, workers = _advised(file, planned, hardware.of(options.VERIFIER))
        if [one.name for one in named] == [HERE]:
            say("There is nothing to deploy: the plan uses this device alone, which has the model.")
            if as_json:
                emit("[]")
            return
    else:
        named = read_split(asked.split)
        if not all(one.name == HERE or ":" in one.name for one in named):
            workers = {worker.name: worker for worker in find_home_workers(planned.peer)}
    parts = deploy_parts(named, workers)
    with ProgressBar("reading") as loading:
        manifest = manifest_of(file, [part.layers for part in parts], lambda share: loading(file.path.name, share))
    with ProgressBar("sending to", "bytes") as bar:
        done = send_layers(
            file, manifest, parts, rate=asked.rate * 1e6 / 8,
            notify=lambda moved: bar(moved.part.name, moved.arrived, moved.total, moved.activity),
        )  # fmt: skip
    if as_json:
        emit_json([_sent_row(moved) for moved in done])
    else:
        show([_sent_row(moved) | {"moved": moved} for moved in done], _SENT, False, empty="")
    failed = [moved for moved in done if moved.error is not None]
    for moved in failed:
        text, name = str(moved.error), moved.part.name
        say(text if text.startswith(name) else f"{name}: {text}")
    if failed:
        raise typer.Exit(1)


def _advised(file: ModelFile, asked: PlanOptions, own: Hardware) -> tuple[tuple[StageShare, ...], dict[str, Worker]]:
    """Return the shares of the best plan, which is printed, and the workers by name."""
    from edgellm.cli.views.mesh_view import say_context
    from edgellm.coldstart.plan import plan
    from edgellm.mesh.placement import PLAN_SECONDS, within

    workload = asked.workload(file, own)
    survey = survey_workers(file, find_home_workers(asked.peer), False, workload.hardware)
    found = plan(workload.home(file, survey.fleet()), within(PLAN_SECONDS))
    say(found.advice)
    say_context(workload.hardware.n_ctx)
    return found.advised.shares, dict(survey.workers)


def _sent_row(moved: DeployProgress) -> dict[str, Any]:
    return StageShare(moved.part.name, moved.part.layers).to_json() | {
        "bytes": moved.total, "already": moved.already or 0, "sent": moved.sent, "seconds": round(moved.seconds, 3),
        "attempts": moved.attempts, "error": None if moved.error is None else str(moved.error),
    }  # fmt: skip


_SENT: Columns = {
    "DEVICE": "device",
    "LAYERS": lambda row: str(row["moved"].part.layers),
    " SIZE": lambda row: size(row["bytes"]),
    " HAD": lambda row: size(row["already"]),
    " SENT": lambda row: size(row["sent"]),
    " TIME": lambda row: f"{row['seconds']:.1f} s",
    " RATE": lambda row: f"{8e-6 * row['sent'] / row['seconds']:.0f} Mbit/s" if row["sent"] and row["seconds"] else "-",
    "": lambda row: f"{size(row['moved'].arrived)} arrived" if row["error"] else "complete",
}


def layers(
    action: Literal["list", "clean"] = typer.Argument("list", metavar="ACTION"),
    on: str | None = typer.Option(None, metavar="DEVICE", show_default="all"),
    model: str | None = typer.Option(None, "-m", "--model", metavar="MODEL", show_default="all"),
    yes: options.Yes = False,
    as_json: options.AsJson = False,
) -> None:
    from edgellm.mesh.deploy import worker_named

    if on is None and action == "clean":
        raise InvalidOption("`mesh layers clean` needs a device.", "Example: edgellm mesh layers clean --on here")
    workers = [] if on == HERE or (on and ":" in on) else find_home_workers()
    chosen: list[Worker | None] = [None, *workers]
    if on is not None:
        chosen = [worker_named(on, {worker.name: worker for worker in workers})]
    digest = ""
    if model is not None:
        with activity(f"reading {model}"):
            digest = fingerprint(resolve(model))
    rows = [row for worker in chosen for row in held(worker) if digest in ("", row["fingerprint"])]
    if action == "clean":
        _clean(chosen[0], rows, digest, yes, as_json)
        return
    show(rows, _HELD, as_json, empty="There are no layers. Deploy some with: edgellm mesh deploy MODEL", fold="MODEL")
    for worker in () if as_json else chosen:
        say(_disk_use(worker), style="dim")


_HELD: Columns = {
    "DEVICE": "device",
    "MODEL": "model",
    "LAYERS": lambda row: f"{row['layers']} of {row['of']}{', cut here' if row['made'] else ''}",
    " SIZE": lambda row: size(row["size"]),
    " ARRIVING": lambda row: size(row["arriving"]) if row["arriving"] else "-",
}


def _disk_use(worker: Worker | None) -> str:
    from edgellm.storage.layer_store import LayerStore

    store = LayerStore()
    name, facts, root = (
        (HERE, store.facts(), f" ({store.root})") if worker is None else (worker.name, worker.facts, "")
    )  # fmt: skip
    if facts is None:
        return f"{name}: {worker and worker.error}"
    return f"{name}: {size(facts.size)} of {size(facts.limit)}; {size(facts.free)} free on the disk{root}"


def _clean(worker: Worker | None, rows: list[dict[str, Any]], fingerprint: str, yes: bool, as_json: bool) -> None:
    """Remove the layers of `rows`; a `fingerprint` names their model, "" all models."""
    from edgellm.mesh.deploy import clean_worker
    from edgellm.storage.layer_store import CleanResult, LayerStore

    name, gone = HERE if worker is None else worker.name, CleanResult(0, 0, 0)
    if rows:
        listed = ", ".join(f"{row['model']} {row['layers']} ({size(row['size'])})" for row in rows)
        make_sure("remove", f"{one_line(listed)} on {name}", yes=yes)
    if rows or not fingerprint:
        gone = LayerStore().clean(fingerprint or None) if worker is None else clean_worker(worker, fingerprint)
    kept = f"; {gone.in_use} in use were kept" if gone.in_use else ""
    row = {"device": name, "pieces": gone.pieces, "bytes": gone.size, "in_use": gone.in_use}
    tell(row, as_json, f"{name}: removed {gone.pieces} pieces, {size(gone.size)}{kept}")
