"""Cut the pieces of a model before a worker needs them; a program that `bench.csgo.cold_start` starts.

python -m bench.csgo.cut_pieces MODEL FIRST-LAST ...        # layers, counted from 0
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgellm.engine import ModelFile
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import WholeModel


def main() -> None:
    whole = WholeModel(ModelFile.open(Path(sys.argv[1])))
    for part in sys.argv[2:]:
        first, last = map(int, part.split("-"))
        for file in whole.files(LayerRange(first, last + 1)):
            with file.using():
                pass


if __name__ == "__main__":
    main()
