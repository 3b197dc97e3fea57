"""`edgellm mesh deploy` and `edgellm mesh layers`: bring layers to the devices, list and remove them."""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edgellm.cli.commands.mesh.peers import held_by, there
from edgellm.cli.commands.mesh.run import Workers
from edgellm.cli.commands.pair import Interfaces
from edgellm.cli.help_examples import model_names
from edgellm.cli.views.console import Loading, emit, err, is_terminal, one_line, out, say, size
from edgellm.cli.views.device_table import doing, looked, sought
from edgellm.errors import EdgeError, InvalidOption
from edgellm.layer_range import HERE, LayerRange, StageShare, ranges, read_split

if TYPE_CHECKING:
    from edgellm.mesh.deploy import DeployPart, Moved
    from edgellm.rpc.discovery.workers import Worker
    from edgellm.storage.layers.store import LayerStore

_EVERY = 5.0  # seconds between two lines where there is no bar
_MEGABIT = 125_000.0  # bytes


class LayerAction(enum.StrEnum):
    """Actions on the layers that a device has."""

    LIST = "list"
    CLEAN = "clean"


def deploy(
    model: Annotated[str, typer.Argument(metavar="MODEL", autocompletion=model_names, help="As for mesh plan.")],
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME:A-B,NAME:C-D", show_default="as mesh plan says",
                     help="Who gets which layers, counted from 1: `here`, paired devices by name, or HOST:PORT."),
    ] = None,
    tokens_in: Annotated[int, typer.Option(metavar="N", min=1, help="Plan for prompts of so many tokens.")] = 1024,
    tokens_out: Annotated[int, typer.Option(metavar="N", min=0, help="And replies of so many.")] = 128,
    reply: Annotated[bool, typer.Option("--reply", help="Plan for the end of the reply, not its first token.")] = False,
    rate: Annotated[
        float, typer.Option(metavar="MBIT", min=0.0, help="Mbit/s over all lines together at most; 0: no limit.")
    ] = 0.0,
    peer: Workers = None,
    interface: Interfaces = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    from edgellm.mesh.deploy import deploy as bring
    from edgellm.mesh.home_workers import parts_of
    from edgellm.rpc.trust.trust import Trust
    from edgellm.storage import resolve
    from edgellm.storage.layers.manifest import recipe_of

    path = resolve(model)
    if split is None:
        named, workers = _planned(path, tokens_in, tokens_out, reply, interface, peer or ())
        if [one.name for one in named] == [HERE]:
            say("Nothing has to be brought anywhere: the model is here, and whole.")
            if as_json:
                emit("[]")
            return
    else:
        named = read_split(split)
        addressed = all(one.name == HERE or ":" in one.name for one in named)
        workers = {} if addressed else {worker.name: worker for worker in sought(interface, peer or ())}
    parts = parts_of(named, workers)
    with Loading("reading") as loading:
        recipe = recipe_of(path, lambda share: loading(path.name, share))
    with shown(parts) as tell:
        done = bring(path, recipe, parts, trust=Trust.here() if workers else None, rate=rate * _MEGABIT, tell=tell)
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


def _planned(
    path: Path, tokens_in: int, tokens_out: int, reply: bool, interface: list[str] | None, peers: Sequence[str]
) -> tuple[tuple[StageShare, ...], Mapping[str, Worker]]:
    from edgellm.coldstart.plan import plan
    from edgellm.mesh.model_costs import model_of
    from edgellm.mesh.placement import of_way

    found = looked(path, interface, False, peers)
    fleet = found.fleet()
    made = plan(
        fleet.devices, model_of(path), tokens_in, tokens_out, objective="reply" if reply else "ttft", links=fleet.links
    )
    say(made.advice)
    return of_way(made.advised), found.workers


@contextmanager
def shown(parts: Sequence[DeployPart]) -> Iterator[Callable[[Moved], None]]:
    """Show the progress of every device: bars on a terminal, else a line now and then."""
    if not is_terminal(sys.stderr):
        said: dict[str, float] = {}

        def line(moved: Moved) -> None:
            name, now = moved.part.name, time.monotonic()
            if now - said.setdefault(name, now) >= _EVERY and not moved.done:
                said[name] = now
                say(f"{name}: {size(moved.arrived)} of {size(moved.total)}, {moved.doing}", style="dim")

        yield line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TextColumn("{task.fields[doing]}"))  # fmt: skip
    with Progress(*columns, console=err(), transient=True) as progress:
        tasks: dict[str, TaskID] = {
            part.name: progress.add_task(one_line(part.name), total=None, doing="") for part in parts
        }

        def bar(moved: Moved) -> None:
            progress.update(
                tasks[moved.part.name], completed=moved.arrived, total=moved.total, doing=one_line(moved.doing)
            )

        yield bar


def _row(moved: Moved) -> dict[str, Any]:
    part = moved.part
    return {
        "device": part.name, "first_layer": part.layers.start + 1, "last_layer": part.layers.stop, "bytes": moved.total,
        "already": moved.already, "sent": moved.sent, "seconds": round(moved.seconds, 3), "attempts": moved.attempts,
        "error": None if moved.error is None else str(moved.error),
    }  # fmt: skip


def _table(done: Sequence[Moved]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("DEVICE", "LAYERS", "SIZE", "THERE BEFORE", "SENT", "TIME", "RATE", ""):
        table.add_column(title, justify="left" if title in ("DEVICE", "LAYERS", "") else "right", no_wrap=True)
    for moved in done:
        rate = f"{8e-6 * moved.sent / moved.seconds:.0f} Mbit/s" if moved.sent and moved.seconds else "-"
        table.add_row(
            one_line(moved.part.name), str(moved.part.layers), size(moved.total),
            size(moved.already), size(moved.sent), f"{moved.seconds:.1f} s", rate,
            "whole" if moved.error is None else f"{size(moved.arrived)} are there",
        )  # fmt: skip
    return table


def layers(
    action: Annotated[
        LayerAction, typer.Argument(metavar="ACTION", help="list: what is where. clean: remove what is not in use.")
    ] = LayerAction.LIST,
    on: Annotated[
        str | None, typer.Option(metavar="DEVICE", show_default="all", help="One of them: `here`, or a name.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="MODEL", show_default="all", help="Of this model alone.")
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    interface: Interfaces = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from edgellm.mesh.home_workers import parts_of

    workers = [] if on == HERE or (on and ":" in on) else there(interface)
    if on is not None:
        (part,) = parts_of([StageShare(on, LayerRange(0, 1))], {worker.name: worker for worker in workers})
        chosen: list[Worker | None] = [part.worker]
    else:
        chosen = [None, *workers]
    if action is LayerAction.LIST:
        _list(chosen, model, as_json)
        return
    if on is None:
        raise InvalidOption("`mesh layers clean` needs a device.", "Such as: edgellm mesh layers clean --on here")
    _clean(chosen[0], model, yes, as_json)


def _list(chosen: Sequence[Worker | None], model: str | None, as_json: bool) -> None:
    wanted = _fingerprint(model)
    rows = [row for worker in chosen for row in _held(worker) if wanted in ("", row["fingerprint"])]
    if as_json:
        emit(json.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("DEVICE", "MODEL", "LAYERS", "SIZE", "ARRIVING"):
        table.add_column(title, justify="right" if title in ("SIZE", "ARRIVING") else "left", overflow="fold")
    for row in rows:
        arriving = size(row["arriving"]) if row["arriving"] else "-"
        of = "made here" if row["made"] else f"of {row['of']}"
        table.add_row(
            one_line(row["device"]), one_line(row["model"]), f"{row['layers']} {of}", size(row["size"]), arriving
        )
    if rows:
        out().print(table)
    else:
        say("There are no layers. Bring some with: edgellm mesh deploy MODEL")
    for worker in chosen:
        say(_room(worker), style="dim")


def _held(worker: Worker | None) -> Iterator[dict[str, Any]]:
    if worker is not None:
        for one, held in zip(worker.facts.models if worker.facts else (), held_by(worker), strict=True):
            yield {
                "device": worker.name, "fingerprint": one.recipe.fingerprint, "of": one.recipe.layers, **held,
                "arriving": one.arriving, "used": one.used, "made": False,
            }  # fmt: skip
        return
    from edgellm.storage.layers.store import LayerStore

    store = LayerStore()
    for mine in store.models():
        yield {
            "device": HERE, "fingerprint": mine.recipe.fingerprint, "of": mine.recipe.layers,
            "model": mine.recipe.name, "layers": ranges(mine.layers), "size": mine.size,
            "arriving": sum(mine.arriving.values()), "used": mine.used, "made": False,
        }  # fmt: skip
    yield from _made(store)


def _made(store: LayerStore) -> Iterator[dict[str, Any]]:
    """Yield the files that stages here have made from a whole model or from small layers; they can be made again."""
    from edgellm.engine import check_gguf
    from edgellm.storage.layers.store import layers_of

    for fingerprint, files in store.made.models().items():
        name = fingerprint[:16]
        with suppress(EdgeError, OSError):  # the file may have just been removed
            name = str(check_gguf(files[0].path).metadata.get("general.name") or name)
        yield {
            "device": HERE, "fingerprint": fingerprint, "of": None, "model": name,
            "layers": ", ".join(ranges(layers_of(file)) for file in files), "size": sum(file.size for file in files),
            "arriving": 0, "used": max(file.used for file in files), "made": True,
        }  # fmt: skip


def _room(worker: Worker | None) -> str:
    if worker is None:
        from edgellm.storage.layers.store import LayerStore

        store = LayerStore()
        return (
            f"here: {size(store.size)} of {size(store.limit)}; {size(store.free())} are free on the disk ({store.root})"
        )
    if worker.facts is None:
        return f"{worker.name}: {worker.trouble}"
    facts = worker.facts
    return f"{worker.name}: {size(facts.size)} of {size(facts.limit)}; {size(facts.free)} are free on the disk"


def _clean(worker: Worker | None, model: str | None, yes: bool, as_json: bool) -> None:
    wanted = _fingerprint(model)
    name = "here" if worker is None else worker.name
    going = [row for row in _held(worker) if wanted in ("", row["fingerprint"])]
    listed = ", ".join(f"{row['model']} {row['layers']} ({size(row['size'])})" for row in going)
    if going and not yes:
        if not is_terminal(sys.stdin):
            raise InvalidOption(f"This would remove on {name}: {listed}.", "Add --yes to do it without being asked.")
        if not typer.confirm(f"Remove on {name}: {one_line(listed)}?", err=True):
            raise typer.Exit(1)
    pieces, gone, in_use = (0, 0, 0) if not going and wanted else _removed(worker, wanted)
    if as_json:
        emit(json.dumps({"device": name, "pieces": pieces, "bytes": gone, "in_use": in_use}))
        return
    stayed = f"; {in_use} are in use and stay" if in_use else ""
    say(f"{name}: {pieces} pieces removed, {size(gone)}{stayed}")


def _removed(worker: Worker | None, fingerprint: str) -> tuple[int, int, int]:
    if worker is None:
        from edgellm.storage.layers.store import LayerStore

        gone = LayerStore().clean(fingerprint or None)
        return gone.pieces, gone.size, gone.in_use
    from edgellm.mesh.home_workers import clean_worker

    return clean_worker(worker, fingerprint)


def _fingerprint(model: str | None) -> str:
    """Return the fingerprint of a model by name; empty for all models."""
    if model is None:
        return ""
    from edgellm.storage import fingerprint, resolve

    with doing(f"reading {model}"):
        try:
            return fingerprint(resolve(model))
        except OSError as error:
            raise EdgeError(f"{model} cannot be read: {error.strerror}.", "Check its permissions.") from None
