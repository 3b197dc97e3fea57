"""`edgellm mesh peers`: the devices that can hold layers, with their rights, speed and layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli.options.models import Interfaces, model_names
from edgellm.cli.views.console import emit, out, say
from edgellm.cli.views.device_table import find_home_workers, progress, row_of, survey_workers, table
from edgellm.layer_range import HERE, ranges

if TYPE_CHECKING:
    from edgellm.rpc.discovery.workers import Worker


def peers(
    measure: Annotated[
        str | None,
        typer.Option(metavar="MODEL", autocompletion=model_names, show_default=False,
                     help="Measure all devices now, with layers of this model's shape and quantisation."),
    ] = None,
    interface: Interfaces = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    from edgellm.engine import ModelFile
    from edgellm.engine.hardware import ON_PROCESSOR
    from edgellm.mesh.fleet_profiler import stored_link, stored_speed
    from edgellm.storage import resolve
    from edgellm.storage.layers.store import LayerStore

    if measure is not None:
        survey_workers(ModelFile.open(resolve(measure)), find_home_workers(interface), True, ON_PROCESSOR)
    workers = paired_workers(interface)
    stored = LayerStore().models()
    held = [{"model": one.manifest.name, "layers": ranges(one.layers), "size": one.size} for one in stored]
    rows = [row_of(HERE, None, stored_speed(None), None, held)]
    rows += [row_of(one.name, one, stored_speed(one), stored_link(one), held_by(one)) for one in workers]
    if as_json:
        emit(json.dumps(rows, indent=2))
        return
    out().print(table(rows))
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
    with progress("asking the devices"):
        return find_workers(trust, known, chosen_hosts(interface or ())) if known else []


def held_by(worker: Worker) -> list[dict[str, Any]]:
    """Return the layers that a worker has of each model."""
    found = []
    for one in worker.facts.models if worker.facts is not None else ():
        pieces = [one.manifest.pieces[place] for place in one.pieces]
        layers = {layer for piece in pieces for layer in piece.layers}
        size = sum(piece.size for piece in pieces) + one.arriving
        found.append({"model": one.manifest.name, "layers": ranges(layers), "size": size})
    return found
