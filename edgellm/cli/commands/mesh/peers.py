"""The devices that can hold layers: finding and measuring them, and `edgellm mesh peers`, a table of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.options.models import AsJson, Interfaces, model_names
from edgellm.cli.views.console import Columns, format_age, one_line, say, show, size
from edgellm.cli.views.progress import activity
from edgellm.layer_range import HERE, ranges

if TYPE_CHECKING:
    from edgellm.engine import ModelFile
    from edgellm.engine.hardware import Hardware
    from edgellm.errors import EdgeError
    from edgellm.mesh.fleet_profiler import MeasuredLink, MeasuredSpeed, Survey
    from edgellm.rpc.discovery.workers import Worker


def peers(
    measure: Annotated[
        str | None,
        typer.Option(metavar="MODEL", autocompletion=model_names, show_default=False,
                     help="Measure all devices now, with layers of this model's shape and quantisation."),
    ] = None,
    interface: Interfaces = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    from edgellm.engine import ModelFile
    from edgellm.engine.hardware import ON_PROCESSOR
    from edgellm.storage import resolve

    if measure is not None:
        survey_workers(ModelFile.open(resolve(measure)), find_home_workers(interface), True, ON_PROCESSOR)
    workers = paired_workers(interface)
    rows = [_row(worker) for worker in (None, *workers)]
    show(rows, _COLUMNS, as_json, empty="")
    if as_json:
        return
    if not workers:
        say("No device is paired with this one. Pair one with: edgellm pair")
    if any(row["speed"] is None and not row["trouble"] for row in rows):
        say("Measure the other devices with --measure MODEL, or by `edgellm mesh plan MODEL`.", "dim")


def paired_workers(interface: Sequence[str] | None) -> list[Worker]:
    """Return the paired devices as workers."""
    from edgellm.rpc.discovery.interfaces import chosen_hosts
    from edgellm.rpc.discovery.workers import find_workers
    from edgellm.rpc.trust.trust import Trust

    trust = Trust.load()
    known = trust.peers.all()
    with activity("asking the devices"):
        return find_workers(trust, known, chosen_hosts(interface or ())) if known else []


def find_home_workers(interface: Sequence[str] | None, peers: Sequence[str] = ()) -> list[Worker]:
    """Return the workers among the paired devices, and those at the addresses `peers`, [NAME=]HOST:PORT."""
    from edgellm.mesh.fleet_profiler import discover_workers, parse_peer
    from edgellm.rpc.discovery.interfaces import chosen_hosts

    places = [parse_peer(peer) for peer in peers]
    with activity("looking for devices"):
        return discover_workers(chosen_hosts(interface or ()), places)


def survey_workers(
    model: ModelFile, workers: Sequence[Worker], fresh: bool, hardware: Hardware, *, by_stand_in: bool = False
) -> Survey:
    """Measure a model on this device with its `hardware`, and on `workers`, if unknown or `fresh`; print which are left
    out. `by_stand_in` as for `measure_workers`."""
    from edgellm.mesh.fleet_profiler import measure_workers

    with activity("asking the devices") as update:
        found = measure_workers(
            model, workers, fresh, lambda device, doing: update(f"{device}: {doing}"), hardware, by_stand_in=by_stand_in
        )
    print_left_out(found.left_out)
    for sentence in found.doubts():
        say(sentence, style="yellow")
    return found


def print_left_out(devices: Sequence[tuple[str, EdgeError]]) -> None:
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
    """Return the layers that a worker, or this device, has of each model. Layers that arrive are counted as `size` of
    a worker."""
    if worker is None:
        from edgellm.storage.layers.store import CUT, LayerStore

        return [
            {"device": HERE, "fingerprint": one.manifest.fingerprint, "of": one.manifest.layers,
             "model": one.manifest.name, "layers": ranges(one.layers), "size": one.size,
             "arriving": sum(one.arriving.values()), "used": one.used, "made": one.owner == CUT}
            for one in LayerStore().models()
        ]  # fmt: skip
    found = []
    for one in worker.facts.models if worker.facts is not None else ():
        pieces = [one.manifest.pieces[place] for place in one.pieces]
        found.append({
            "device": worker.name, "fingerprint": one.manifest.fingerprint, "of": one.manifest.layers,
            "model": one.manifest.name, "layers": ranges({layer for piece in pieces for layer in piece.layers}),
            "size": sum(piece.size for piece in pieces) + one.arriving, "arriving": one.arriving, "used": one.used,
            "made": False,
        })  # fmt: skip
    return found


def _row(worker: Worker | None) -> dict[str, Any]:
    """Return the facts of a worker, or of this device."""
    from edgellm.mesh.fleet_profiler import stored_link, stored_speed

    peer = address = trouble = there = line = None
    if worker is not None:
        peer, line = worker.peer, stored_link(worker)
        address, trouble = (None if one is None else str(one) for one in (worker.address, worker.error))
        there = sorted(worker.rights if worker.error is None else getattr(peer, "granted", ()))
    speed = stored_speed(worker)
    return {
        "name": HERE if worker is None else worker.name,
        "id": None if peer is None else str(peer.id), "short": "" if peer is None else peer.id.short,
        "may_here": None if peer is None else sorted(peer.rights), "may_there": there,
        "address": address, "trouble": trouble, "speed": None if speed is None else _speed(speed),
        "line": None if line is None else _line(line),
        "held": [{key: one[key] for key in ("model", "layers", "size")} for one in held(worker)],
    }  # fmt: skip


def _line(line: MeasuredLink) -> dict[str, Any]:
    return {
        "round_trip_ms": round(1e3 * line.line.round_trip, 3), "up_mbps": round(line.line.up / 1e6, 1),
        "down_mbps": round(line.line.down / 1e6, 1), "taken": line.taken, "age_s": _age(line.taken),
        "reason": line.reason, "doubtful": line.doubtful,
    }  # fmt: skip


def _speed(speed: MeasuredSpeed) -> dict[str, Any]:
    figures, curve = speed.figures, speed.utilisation
    rates = [speed.shape.flops(rows) / taken for rows, taken in zip(figures.rows, figures.seconds, strict=True)]
    same = ("disk_reason", "memory", "memory_reason", "threads", "processor", "unit", "unit_reason", "taken", "reason",
            "doubt")  # fmt: skip
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


def _held(row: dict[str, Any]) -> str:
    return ", ".join(f"{one['model']} {one['layers']}" for one in row["held"]) or row["trouble"] or "none"


_COLUMNS: Columns = {
    "NAME": lambda row: row["name"],
    "ID": lambda row: row["short"] or "-",
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
    "LAYERS": _held,
}
