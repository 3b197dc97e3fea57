"""The devices that hold layers: finding and measuring them with progress on the screen, and a table of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.table import Table

from edgellm.cli.views.console import err, format_age, is_terminal, one_line, say, size

if TYPE_CHECKING:
    from edgellm.engine import ModelFile
    from edgellm.engine.hardware import Hardware
    from edgellm.errors import EdgeError
    from edgellm.mesh.fleet_profiler import MeasuredLink, MeasuredSpeed, Survey
    from edgellm.rpc.discovery.workers import Worker

_QUIET_SECONDS = 1.0  # time before progress is printed


def find_home_workers(interface: Sequence[str] | None, peers: Sequence[str] = ()) -> list[Worker]:
    """Return the workers among the paired devices, and those at the addresses `peers`, [NAME=]HOST:PORT."""
    from edgellm.mesh.fleet_profiler import discover_workers, parse_peer
    from edgellm.rpc.discovery.interfaces import chosen_hosts

    places = [parse_peer(peer) for peer in peers]
    with progress("looking for devices"):
        return discover_workers(chosen_hosts(interface or ()), places)


def survey_workers(
    model: ModelFile, workers: Sequence[Worker], fresh: bool, hardware: Hardware, *, by_stand_in: bool = False
) -> Survey:
    """Measure a model on this device with its `hardware`, and on `workers`, if unknown or `fresh`; print which are left
    out. `by_stand_in` as for `measure_workers`."""
    from edgellm.mesh.fleet_profiler import measure_workers

    with progress("asking the devices") as update:
        found = measure_workers(
            model, workers, fresh, lambda device, activity: update(f"{device}: {activity}"), hardware,
            by_stand_in=by_stand_in,
        )  # fmt: skip
    print_left_out(found.left_out)
    for sentence in found.doubts():
        say(sentence, style="yellow")
    return found


def print_left_out(devices: Sequence[tuple[str, EdgeError]]) -> None:
    """Print which devices cannot be used, and why."""
    for name, trouble in devices:
        say(f"left out: {name}: {trouble}", style="dim")


def print_units(home: Survey) -> None:
    """Print the unit that computes on each device, and why."""
    for name, speed in home.speeds.items():
        figures = speed.figures
        unit = figures.unit or "the processor"
        say(one_line(f"{name} computes on {unit} ({figures.processor}): {figures.unit_reason}."), style="dim")


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current activity: a spinner on a terminal, else a line each after a second."""
    began = time.monotonic()
    if is_terminal(sys.stderr):
        with err().status(one_line(first)) as status:
            yield lambda text: status.update(one_line(text))
        return
    printed: set[str] = set()

    def update(text: str) -> None:
        if time.monotonic() - began > _QUIET_SECONDS and text not in printed:
            printed.add(text)
            say(one_line(text), style="dim")

    yield update


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the devices: their rights, speed and layers."""
    devices = Table(box=None, pad_edge=False)
    titles = ("NAME", "ID", "MAY HERE", "MAY THERE", "COMPUTES", "READS", "DISK", "MEMORY", "LINE", "MEASURED",
              "LAYERS")  # fmt: skip
    for title in titles:
        devices.add_column(title, overflow="fold")
    for row in rows:
        devices.add_row(*(one_line(str(cell)) for cell in _cells(row)))
    return devices


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    speed, line = row["speed"], row["line"]
    yield row["name"]
    yield row["short"] or "-"
    for key in ("may_here", "may_there"):
        yield "-" if row[key] is None else ", ".join(row[key]) or "nothing"
    if speed is None:
        yield from ("-", "-", "-", "-")
    else:
        slow, fast = speed["gflops"][0], max(speed["gflops"])
        yield f"{_rate(slow)}-{_rate(fast)} GFLOP/s" + (f" ({speed['unit']})" if speed["unit"] else "")
        yield f"{speed['weights_gb_s']:.1f} GB/s" if speed["weights_gb_s"] else "-"
        yield f"{speed['disk_mb_s']:.0f} MB/s"
        yield size(speed["memory"])
    if line is None:
        yield "-"
    else:
        yield f"{line['round_trip_ms']:.1f} ms, {line['up_mbps']:.0f}/{line['down_mbps']:.0f} Mbit/s"
    yield "never" if speed is None else format_age(speed["age_s"]) + (", doubtful" if speed["doubt"] else "")
    held = [f"{one['model']} {one['layers']}" for one in row["held"]]
    yield row["trouble"] if row["trouble"] and not held else ", ".join(held) or "none"


def row_of(
    name: str,
    worker: Worker | None,
    speed: MeasuredSpeed | None,
    line: MeasuredLink | None,
    held: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the facts of a device for a script; without a `worker`, of this device."""
    peer = None if worker is None else worker.peer
    there = None if worker is None else sorted(worker.rights if worker.error is None else getattr(peer, "granted", ()))
    return {
        "name": name,
        "id": None if peer is None else str(peer.id),
        "short": "" if peer is None else peer.id.short,
        "may_here": None if peer is None else sorted(peer.rights),
        "may_there": there,
        "address": None if worker is None or worker.address is None else str(worker.address),
        "trouble": None if worker is None or worker.error is None else str(worker.error),
        "speed": None if speed is None else _speed(speed),
        "line": None if line is None else {
            "round_trip_ms": round(1e3 * line.line.round_trip, 3), "up_mbps": round(line.line.up / 1e6, 1),
            "down_mbps": round(line.line.down / 1e6, 1), "taken": line.taken, "age_s": _age(line.taken),
            "reason": line.reason, "doubtful": line.doubtful,
        },
        "held": list(held),
    }  # fmt: skip


def _speed(speed: MeasuredSpeed) -> dict[str, Any]:
    figures, curve = speed.figures, speed.utilisation
    rates = [speed.shape.flops(rows) / taken for rows, taken in zip(figures.rows, figures.seconds, strict=True)]
    return {
        "model": speed.model, "tokens": list(figures.rows), "layer_ms": [1e3 * taken for taken in figures.seconds],
        "gflops": [round(rate / 1e9, 2) for rate in rates], "peak_gflops": round(curve.peak / 1e9, 2), "b": curve.b,
        "fit_worst": round(curve.worst, 3),
        "weights_gb_s": round(figures.layer / figures.seconds[0] / 1e9, 2) if figures.rows[0] == 1 else None,
        "disk_mb_s": round(figures.disk / 1e6, 1), "disk_reason": figures.disk_reason, "memory": figures.memory,
        "memory_reason": figures.memory_reason, "threads": figures.threads, "processor": figures.processor,
        "unit": figures.unit, "unit_reason": figures.unit_reason,
        "taken": figures.taken, "age_s": _age(figures.taken), "reason": figures.reason,
        "doubt": figures.doubt,
    }  # fmt: skip


def _rate(gflops: float) -> str:
    return f"{gflops:.0f}" if gflops >= 10.0 else f"{gflops:.2g}"


def _age(taken: int) -> int:
    return max(0, int(time.time()) - taken)
