"""Cut models of every architecture apart, and compare a chain of their parts with the whole model.

    python -m bench.mesh.cuttable [NAME ...]

The models are small ones with random weights in float32, with windows of 32 positions
(`testkit.gguf.architectures`). Each
is cut in two before every layer where it may be, and into as many parts as possible. A prompt of 50 tokens, single
tokens, and a verification with a rollback go through the chain and through the whole model.

Rows of the table: the architecture, and the shape of it if there are several; the number of layers, and those with
which parts may begin, counted from 1; the largest difference of a logit as a share of the largest logit; or why the
layers cannot be cut. llama.cpp looks GELU up in a table of 16-bit numbers, where a row may fall on either side of a
step: models with GELU may differ by 1e-3 where something is rounded, others by 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness.report import write
from edgellm.engine import check_gguf
from edgellm.engine.gguf.cuttable import check_cuttable, cut_points
from edgellm.errors import ModelUnsupported
from edgellm.layer_range import ranges
from testkit.gguf.architectures import ARCHITECTURES, SHAPES_TO_CUT
from testkit.gguf.architectures import write as write_model
from testkit.shard_chain import WholeModel

SHAPES = ARCHITECTURES | SHAPES_TO_CUT
_MOST = 12  # parts of one chain, and cuts in two


def measured(name: str, folder: Path) -> dict[str, Any]:
    """Return what comes of cutting a model of one shape."""
    path = folder / "whole.gguf"
    write_model(name, path)
    found: dict[str, Any] = {"architecture": SHAPES[name].name or name, "shape": name}
    try:
        header = check_gguf(path)
        layers, points = check_cuttable(header), cut_points(header)
    except ModelUnsupported as error:
        return found | {"refused": error.what}
    some = [point for point in points if len(points) <= _MOST or point % (layers // _MOST) in (0, 1)]
    chains: set[tuple[int, ...]] = {tuple(some), *((0, point) for point in some[1:])}
    whole = WholeModel(path)
    difference = max(whole.largest_difference(folder, starts) for starts in sorted(chains))
    return found | {"layers": layers, "begins": ranges(points), "chains": len(chains), "difference": difference}


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as text."""
    rows = [f"{'shape':28} {'layers':>6}  {'parts begin with':16} {'difference':>10}"]
    for row in found["shapes"]:
        if "refused" in row:
            rows.append(f"{row['shape']:28} {row['refused'].partition('cut: ')[2]}")
        else:
            rows.append(f"{row['shape']:28} {row['layers']:6}  {row['begins']:16} {row['difference']:10.1e}")
    return "\n".join([*rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all without it")
    parser.add_argument("--name", default="cuttable", help="of the result file")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - SHAPES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    shapes = []
    for name in arguments.names or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            shapes.append(measured(name, Path(folder)))
    sys.stdout.write(table({"shapes": shapes}))
    write(arguments.name, "bench.mesh.cuttable", {"shapes": shapes})


if __name__ == "__main__":
    main()
