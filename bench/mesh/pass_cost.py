"""Measure the cost of splitting a model into blocks of layers, and of several devices, once everything is loaded.

    python -m bench.mesh.pass_cost [MODEL] [--threads 1] [--repeats 9] [--no-hops] [--name NAME]

*Blocks*: the uncut model in one context beside chains of blocks of 1, 2 and 4 layers, and of the pieces into which a
stage is cut, all in one process, for passes of 1, 8 and 64 rows after 64 others; in turns, eight passes at once, with
the same attention everywhere. Milliseconds of processor time, which leaves out other programs, so use one thread.

*Hops*: a token, and eight drafted tokens, through 1 to 4 workers in processes of their own on this machine. Rows go
`direct` from worker to worker, or are `passed on` by the coordinator.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
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
from edgellm.engine import Block, Context, ContextSpec, Ids, Model, ModelFile, cut
from edgellm.engine.gguf.cuttable import check_cuttable
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import StageSpec
from edgellm.spec.types import GREEDY, NO_IDS, Chunk
from edgellm.spec.verifier import VerifyRequest
from edgellm.storage import fingerprint, resolve
from edgellm.storage.layers.manifest import grid, layers_per_piece
from testkit.processes.worker import WorkerProcess

BEFORE = 64
ROWS = (1, 8, 64)
SIZES = (1, 2, 4)
CONTEXT = 256
WORKERS = 4
IN_A_ROW = 8  # so that the processor's caches hold what is measured


@dataclass(frozen=True)
class Chain:
    """Blocks in a row."""

    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, model: Path, size: int, threads: int | None, closing: ExitStack, folder: Path) -> Chain:
        n, blocks = check_cuttable(ModelFile.open(model).header), []
        for layers in grid(LayerRange(0, n), range(0, n, size)):
            path, head = folder / f"{size}-{layers.start}.gguf", layers.stop == n
            cut(model, path, layers.start, layers.last, head=head)
            shard = closing.enter_context(Model.load(path))
            blocks.append(Block(shard, head=head, n_ctx=CONTEXT, rows=BEFORE, threads=threads))
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


def sizes(model: Path) -> list[int]:
    """Return the sizes of blocks in layers, with that of a stage's pieces."""
    header = ModelFile.open(model).header
    return sorted({*SIZES, min(layers_per_piece(header), check_cuttable(header))})


def blocks(model: Path, threads: int | None, repeats: int) -> list[dict[str, Any]]:
    """Return the milliseconds of a pass, in one context and in blocks."""
    ids = np.arange(100, 100 + BEFORE + max(ROWS), dtype=np.int32)
    with ExitStack() as closing, tempfile.TemporaryDirectory() as folder:
        chains = {size: Chain.of(model, size, threads, closing, Path(folder)) for size in sizes(model)}
        whole = closing.enter_context(Model.load(model))
        flash = chains[1].blocks[0]._context.spec.native.flash  # noqa: SLF001  # the same for both
        context = Context(whole, ContextSpec(n_ctx=CONTEXT, n_batch=BEFORE, threads=threads, flash=flash))
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
                "blocks_ms": {str(size): spread(times) for size, times in zip(chains, taken[1:], strict=True)},
            })  # fmt: skip
    return found


def hops(model: Path, threads: int | None, repeats: int) -> list[dict[str, Any]]:
    """Return the milliseconds from a request to its verdict, for each number of workers."""
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
        mesh.record_tokens(0, mesh.generation, first)
    ids = np.arange(300, 300 + rows, dtype=np.int32)
    pipeline.ask(0, BEFORE, ids, VerifyRequest(0, GREEDY, BEFORE + 1, NO_IDS, Chunk(ids[1:]))).result()


def table(found: dict[str, Any]) -> str:
    """Return medians of passes, the additional cost of blocks, and the hops."""
    lines = [f"{found['model']}, {found['threads']} threads: median milliseconds of processor time for a pass"]
    counts = list(found["blocks"][0]["blocks_ms"])
    lines.append(f"{'rows':>5} {'uncut':>8}" + "".join(f"{f'blocks of {size}':>19}" for size in counts))
    for each in found["blocks"]:
        uncut = each["uncut_ms"]["median"]
        cells = (each["blocks_ms"][size]["median"] for size in counts)
        blocks = "".join(f"{ms:>11.2f} ({ms / uncut - 1:+.0%})" for ms in cells)
        lines.append(f"{each['rows']:>5} {uncut:>8.2f}{blocks}")
    for hop in found["hops"]:
        lines.append(f"{hop['workers']} workers, {hop['way']}, {hop['rows']} rows: {hop['ms']['median']:.2f} ms")  # noqa: PERF401
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="edgellm-verifier")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-hops", action="store_true", help="blocks alone")
    parser.add_argument("--name", default="pass_cost", help="of the result file")
    arguments = parser.parse_args()
    path = resolve(arguments.model)
    found: dict[str, Any] = {
        "model": path.name, "threads": arguments.threads, "load_average": os.getloadavg()[0],
        "blocks": blocks(path, arguments.threads, arguments.repeats),
        "hops": [] if arguments.no_hops else hops(path, arguments.threads, arguments.repeats),
    }  # fmt: skip
    print(table(found))
    print(f"written: {write(arguments.name, 'bench.mesh.pass_cost', found)}", file=sys.stderr)


if __name__ == "__main__":
    main()
