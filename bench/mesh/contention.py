"""Measure what passes, loads and reading take from each other on one device.

    python -m bench.mesh.contention [MODEL] [--layers 12] [--repeats 5] [--throttled] [--seed 0]

While a reply is written, a device may load layers for another placement, and read the text there (`mesh/phases/`). A
stage computes single rows here, alone; beside another stage that loads a second copy of the model, dropped from memory
before; and beside one that reads a text. Without a MODEL it is one of the 0.5B shape with random weights. Rows: how
many times as long a pass, a load and a reading take beside the other work; the planner's figures for the same
(`coldstart/phases/model.py`) are in brackets. With `--throttled` all this happens on a machine of
`testkit.network.home` with 0.77 of a core and a disk of 110 MB/s (Linux, as root).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import write as write_result
from bench.harness.statistics import spread
from bench.mesh.plain_rpc import prompt_ids
from edgellm.coldstart.phases import Contention
from edgellm.engine import ModelFile
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.messages import MAX_ROWS, StageSpec
from edgellm.mesh.model_costs import model_costs
from edgellm.mesh.pipeline import LocalStageHost, Pipeline
from edgellm.mesh.weight_cache import WeightCache
from edgellm.spec.types import GREEDY, NO_IDS, Chunk
from edgellm.spec.verifier import VerifyRequest
from edgellm.storage.layers.store import LayerStore
from testkit.gguf.random_model import SHAPES, write
from testkit.network.home import Spec, home, why_not

PASSES = 20
READ = 256  # tokens of the text that is read
VOCABULARY = 8192
CONTEXT = 1024
GIGABYTES = 4


class OneStage:
    """All layers of a model as one stage in this process."""

    def __init__(self, path: Path, folder: Path) -> None:
        file = ModelFile.open(path)
        costs = model_costs(file)
        layers = costs.shape.layers
        whole = WholeModel(file, LayerStore(folder, GIGABYTES * 10**9))
        vocabulary = next(one.shape[-1] for one in file.header.tensors if one.name == "token_embd.weight")
        spec = StageSpec(
            whole.model, costs.name, LayerRange(0, layers), layers, int(costs.shape.d_model), vocabulary, CONTEXT, 1
        )
        for piece in whole.files(LayerRange(0, layers)):  # cut now, not while it is measured
            with piece.using():
                pass
        began = perf_counter()
        self._pipeline = Pipeline([(LocalStageHost("here", WeightCache(whole)), spec)])
        while not self._pipeline.records[0].whole:
            if self._pipeline.lost is not None:
                raise self._pipeline.lost[1].error
            threading.Event().wait(0.002)
        self.load_seconds = perf_counter() - began
        self._text = np.array(prompt_ids(READ), np.int32)

    def pass_seconds(self) -> float:
        """Compute one more row behind the text, and return the seconds."""
        return self._asked(READ, self._text[:1])

    def reading_seconds(self) -> float:
        """Read the text, and return the seconds."""
        return self._asked(0, self._text)

    def _asked(self, start: int, ids: Any) -> float:
        began = perf_counter()
        request = VerifyRequest(0, GREEDY, start + len(ids), NO_IDS, Chunk())
        self._pipeline.ask(0, start, ids, request, MAX_ROWS).result(600)
        return perf_counter() - began

    def close(self) -> None:
        self._pipeline.close()


def forget(folder: Path) -> None:
    """Drop the folder's files from memory."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(handle)


def beside(work: Callable[[], float], other: Callable[[], float]) -> tuple[float, list[float]]:
    """Return the seconds of some work in another thread, and those of `other`, repeated until that is over."""
    took: list[float] = []
    thread = threading.Thread(target=lambda: took.append(work()))
    thread.start()
    found = [other()]
    while thread.is_alive():
        found.append(other())
    thread.join()
    return took[0], found[:-1] or found  # the last one was partly alone


def measured(path: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Return the ratios of every repetition."""
    ratios: dict[str, list[float]] = {"passes": [], "loads": [], "passes_reading": [], "reading": []}
    copy = folder / "copy.gguf"
    shutil.copyfile(path, copy)
    stage = OneStage(path, folder / "first")
    stage.reading_seconds()

    def load() -> float:
        loaded = OneStage(copy, folder / "second")
        loaded.close()
        return loaded.load_seconds

    load()  # the pieces are cut
    for _ in range(repeats):
        alone = float(np.median([stage.pass_seconds() for _ in range(PASSES)]))
        forget(folder / "second")
        load_alone = load()
        forget(folder / "second")
        load_beside, passes = beside(load, stage.pass_seconds)
        ratios["passes"].append(float(np.mean(passes)) / alone)
        ratios["loads"].append(load_beside / load_alone)
        other = OneStage(copy, folder / "second")
        read_alone = other.reading_seconds()
        read_beside, passes = beside(other.reading_seconds, stage.pass_seconds)
        other.close()
        ratios["passes_reading"].append(float(np.mean(passes)) / alone)
        ratios["reading"].append(read_beside / read_alone)
    stage.close()
    return {name: spread(values) for name, values in ratios.items()}


def throttled(path: Path, folder: Path, repeats: int) -> dict[str, Any]:
    """Return `measured` of a throttled machine."""
    with home([Spec("laptop", disk=110.0, cpu=0.77)], folder) as (machine,):
        words = (str(path), "--folder", str(folder), "--repeats", str(repeats))
        out, err = machine.start(*words, module="bench.mesh.contention").communicate(timeout=600)
    if not out.strip():
        sys.exit(f"the throttled machine measured nothing:\n{err}")
    return dict(json.loads(out.splitlines()[-1]))


def table(found: dict[str, Any]) -> str:
    """Return a line for each ratio."""
    planned = Contention()
    rows = (
        ("a pass beside a load", "passes", planned.passes),
        ("a load beside passes", "loads", planned.loads),
        ("a pass beside a reading", "passes_reading", planned.reading),
        ("a reading beside passes", "reading", planned.reading),
    )
    lines = [f"{'':<26}median   least    most  (planned)"]
    for what, name, figure in rows:
        some = found[name]
        lines.append(f"{what:<26}{some['median']:>6.2f}  {some['min']:>6.2f}  {some['max']:>6.2f}  ({figure:g})")
    lines.append(f"{found['layers']} layers, {found['repeats']} times, load average {found['load_average']:.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--throttled", action="store_true")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # the process that measures, and prints JSON
    parser.add_argument("--name", default="contention", help="of the result file")
    args = parser.parse_args()
    if args.folder is not None:
        print(json.dumps(measured(args.model, args.folder, args.repeats)))
        return
    if args.throttled and (reason := why_not()):
        sys.exit(f"no home can be made here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = args.model
        if path is None:
            path = folder / "model.gguf"
            shape = replace(SHAPES["qwen2.5-0.5b"], n_layer=args.layers, n_vocab=VOCABULARY)
            write(path, shape, "Q4_0", args.seed)
        found = (throttled if args.throttled else measured)(path, folder, args.repeats)
    found |= {"layers": args.layers, "repeats": args.repeats, "load_average": os.getloadavg()[0]}
    write_result(args.name, "bench.mesh.contention", found, args.seed)
    print(table(found))


if __name__ == "__main__":
    main()
