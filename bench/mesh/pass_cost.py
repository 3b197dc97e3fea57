"""Measure what it costs to have a model's layers in blocks, and on several devices, once everything is loaded.

    python -m bench.mesh.pass_cost [MODEL] [--threads 1] [--repeats 9] [--stored] [--no-hops] [--name NAME]

*Blocks*: the uncut model in one context beside chains of blocks of 1, 2 and 4 layers, all in one process, for passes of
1, 8 and 64 rows behind 64 others; in turns, eight passes at once, with the same attention everywhere. Milliseconds of
processor time, which leaves out other programs; so it is for one thread.

*Stored* (`--stored`): the same for layers of a store, one by one as they lie there, and joined as a stage loads them
(about 32 MB in a piece); with the time to load them, and to join them the first time.

*Hops*: a token, and eight drafted tokens, through 1 to 4 workers in processes of their own on this machine. Rows go
`direct` from worker to worker, or are `passed on` by the coordinator.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from bench.harness.report import write
from bench.harness.statistics import alternate, spread
from edgellm.engine import Block, Context, Ids, Model, check_gguf, cut
from edgellm.engine.gguf.shard import check_cuttable
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.layer_sources import StoredLayers
from edgellm.mesh.messages import StageSpec
from edgellm.spec.types import GREEDY, NO_IDS, Chunk
from edgellm.storage import fingerprint, resolve
from edgellm.storage.layers.store import LayerStore, cut_layers
from edgellm.verifier.requests import VerifyRequest
from testkit.processes.worker import WorkerProcess

BEFORE = 64
ROWS = (1, 8, 64)
SIZES = (1, 2, 4)
CONTEXT = 256
WORKERS = 4
IN_A_ROW = 8  # so that a processor's caches hold what is measured, and not what was measured before


@dataclass(frozen=True)
class Chain:
    """Blocks in a row."""

    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, model: Path, size: int, threads: int | None, closing: ExitStack, folder: Path) -> Chain:
        n, paths = check_cuttable(check_gguf(model)), []
        for first in range(0, n, size):
            last = min(n, first + size) - 1
            paths.append(folder / f"{size}-{first}.gguf")
            cut(model, paths[-1], first, last, head=last == n - 1)
        return cls.over(paths, threads, closing)

    @classmethod
    def over(cls, paths: Sequence[Path], threads: int | None, closing: ExitStack) -> Chain:
        """Of files, the last of which has the head."""
        blocks = []
        for path in paths:
            shard = closing.enter_context(Model.load(path))
            blocks.append(Block(shard, head=path is paths[-1], n_ctx=CONTEXT, rows=BEFORE, threads=threads))
            closing.callback(blocks[-1].close)
        return cls(tuple(blocks))

    def forward(self, ids: Ids, start: int) -> None:
        data: Any = ids
        for block in self.blocks:
            data = block.forward(data, start=start, outputs=1)


def timed(run: Callable[[], object], clock: Callable[[], float] = perf_counter, turns: int = 1) -> float:
    began = clock()
    for _ in range(turns):
        run()
    return 1e3 * (clock() - began) / turns


def blocks(model: Path, threads: int | None, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a pass, in one context and in blocks."""
    ids = np.arange(100, 100 + BEFORE + max(ROWS), dtype=np.int32)
    with ExitStack() as closing, tempfile.TemporaryDirectory() as folder:
        chains = {size: Chain.of(model, size, threads, closing, Path(folder)) for size in SIZES}
        whole = closing.enter_context(Model.load(model))
        flash = chains[1].blocks[0]._context.flash  # noqa: SLF001  # the same for both
        context = Context(whole, n_ctx=CONTEXT, n_batch=BEFORE, threads=threads, flash=flash)
        closing.callback(context.close)

        def uncut(rows: int) -> None:
            context.rollback(BEFORE)
            context.decode(ids[BEFORE : BEFORE + rows])

        context.decode(ids[:BEFORE])
        for chain in chains.values():
            chain.forward(ids[:BEFORE], 0)
        found = []
        for rows in ROWS:
            passes = [partial(uncut, rows)]
            passes += [partial(chain.forward, ids[BEFORE : BEFORE + rows], BEFORE) for chain in chains.values()]
            runs = [partial(timed, one, process_time, IN_A_ROW) for one in passes]
            for run in runs:
                run()
            taken = alternate(repeats, *runs)
            found.append({
                "rows": rows, "uncut_ms": spread(taken[0]),
                "blocks_ms": {str(size): spread(times) for size, times in zip(SIZES, taken[1:], strict=True)},
            })  # fmt: skip
    return found


def stored(model: Path, threads: int | None, repeats: int) -> dict[str, Any]:
    """Milliseconds for layers of a store, one by one and joined: to find them, to load them, and of a pass."""
    ids = np.arange(100, 100 + BEFORE + max(ROWS), dtype=np.int32)
    with ExitStack() as closing, tempfile.TemporaryDirectory() as folder:
        store = LayerStore(Path(folder), 2**40)
        recipe = cut_layers(model, store)
        layers, chains = StoredLayers(store), []
        found: dict[str, Any] = {}
        single = [path for piece in recipe.pieces if (path := store.find(piece)) is not None]
        began = perf_counter()
        joined = row(layers, recipe.digest, recipe.layers)
        found["joining_ms"] = 1e3 * (perf_counter() - began)
        found["found_again_ms"] = timed(partial(row, layers, recipe.digest, recipe.layers))
        for name, paths in (("single", single), ("joined", joined)):
            began = perf_counter()
            chains.append(Chain.over(paths, threads, closing))
            found[name] = {"pieces": len(paths), "bytes": sum(path.stat().st_size for path in paths),
                           "loading_ms": 1e3 * (perf_counter() - began), "passes": []}  # fmt: skip
        for chain in chains:
            chain.forward(ids[:BEFORE], 0)
        for rows in ROWS:
            runs = [partial(timed, partial(chain.forward, ids[BEFORE : BEFORE + rows], BEFORE), process_time, IN_A_ROW)
                    for chain in chains]  # fmt: skip
            for run in runs:
                run()
            for name, times in zip(("single", "joined"), alternate(repeats, *runs), strict=True):
                found[name]["passes"].append({"rows": rows, "ms": spread(times)})
        return found


def row(layers: StoredLayers, model: str, count: int) -> list[Path]:
    """The files that a stage of all layers loads."""
    found: list[Path] = []
    for piece in layers.pieces(model, LayerRange(0, count)):
        path = layers.find(model, LayerRange(piece.layers.start, count))
        assert path is not None
        found.append(path)
    return found


def hops(model: Path, threads: int | None, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds from a question to its verdict, through so many workers."""
    with Model.load(model) as loaded:
        n = loaded.n_layer
        work = StageSpec(
            fingerprint(model), loaded.name, LayerRange(0, n), n, loaded.n_embd, loaded.n_vocab, CONTEXT, 1
        )
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        workers = [WorkerProcess(model, Path(folder), threads) for _ in range(WORKERS)]
        for worker in workers:
            closing.callback(worker.close)
            worker.wait()
        for count in range(1, WORKERS + 1):
            ends = [round(n * at / count) for at in range(count + 1)]
            shares = [StageShare(str(at), LayerRange(a, b)) for at, (a, b) in enumerate(pairwise(ends))]
            runs: dict[str, Callable[[], float]] = {}
            with ExitStack() as meshes:
                for way in ("direct", "passed on")[: 1 if count == 1 else 2]:
                    members = [worker.member(str(at), way == "direct") for at, worker in enumerate(workers[:count])]
                    mesh = Mesh(members, shares, work)
                    meshes.callback(mesh.close)
                    for rows in (1, 8):
                        runs[f"{way}, {rows}"] = partial(timed, partial(_asked, mesh, rows))
                for run in runs.values():
                    run()
                taken = alternate(repeats, *runs.values())
            found += [
                {"workers": count, "way": key.split(", ")[0], "rows": int(key.split(", ")[1]), "ms": spread(times)}
                for key, times in zip(runs, taken, strict=True)
            ]
    return found


def _asked(mesh: Mesh, rows: int) -> None:
    pipeline, _ = mesh.pipeline()
    if not mesh.held(0, mesh.generation).size:
        first = np.arange(100, 100 + BEFORE, dtype=np.int32)
        pipeline.ask(0, 0, first, VerifyRequest(0, GREEDY, BEFORE, NO_IDS, Chunk())).result()
        mesh.hold(0, mesh.generation, first)
    ids = np.arange(300, 300 + rows, dtype=np.int32)
    pipeline.ask(0, BEFORE, ids, VerifyRequest(0, GREEDY, BEFORE + 1, NO_IDS, Chunk(ids[1:]))).result()


def table(found: dict[str, Any]) -> str:
    """Return medians of passes, how much more the blocks cost, and the hops."""
    lines = [f"{found['model']}, {found['threads']} threads: milliseconds of processor a pass, in the median"]
    lines.append(f"{'rows':>5} {'uncut':>8}" + "".join(f"{f'blocks of {size}':>19}" for size in SIZES))
    for each in found["blocks"]:
        uncut = each["uncut_ms"]["median"]
        cells = (each["blocks_ms"][str(size)]["median"] for size in SIZES)
        told = "".join(f"{ms:>11.2f} ({ms / uncut - 1:+.0%})" for ms in cells)
        lines.append(f"{each['rows']:>5} {uncut:>8.2f}{told}")
    if kept := found.get("stored"):
        for name in ("single", "joined"):
            one = kept[name]
            told = ", ".join(f"{each['rows']} rows {each['ms']['median']:.2f}" for each in one["passes"])
            lines.append(
                f"stored, {name}: {one['pieces']} pieces, {one['loading_ms']:.0f} ms to load; ms a pass: {told}"
            )
        lines.append(f"joining them the first time: {kept['joining_ms']:.0f} ms, later {kept['found_again_ms']:.1f} ms")
    for hop in found["hops"]:
        lines.append(f"{hop['workers']} workers, {hop['way']}, {hop['rows']} rows: {hop['ms']['median']:.2f} ms")  # noqa: PERF401
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="edgellm-verifier")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-hops", action="store_true", help="blocks alone")
    parser.add_argument("--stored", action="store_true", help="layers of a store alone, joined or not")
    parser.add_argument("--name", default="pass_cost", help="of the result file")
    arguments = parser.parse_args()
    path = resolve(arguments.model)
    found: dict[str, Any] = {
        "model": path.name, "threads": arguments.threads, "load_average": os.getloadavg()[0],
        "blocks": [] if arguments.stored else blocks(path, arguments.threads, arguments.repeats),
        "stored": stored(path, arguments.threads, arguments.repeats),
        "hops": [] if arguments.no_hops or arguments.stored else hops(path, arguments.threads, arguments.repeats),
    }  # fmt: skip
    print(table(found))
    print(f"written: {write(arguments.name, 'bench.mesh.pass_cost', found)}", file=sys.stderr)


if __name__ == "__main__":
    main()
