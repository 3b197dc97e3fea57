"""Do what the first use of a model does once: try whether it can be loaded, and cut the pieces that a worker needs. A
program that `bench.csgo.cold_start` starts.

python -m bench.csgo.cut_pieces MODEL FIRST-LAST ...        # layers, counted from 0
"""

import sys
from pathlib import Path

from edgellm.engine import Model, ModelFile
from edgellm.engine.model import TEXT_ONLY
from edgellm.layer_range import LayerRange
from edgellm.mesh.layer_sources import WholeModel


def main() -> None:
    file = ModelFile.open(Path(sys.argv[1]))
    with Model.load(file, TEXT_ONLY):
        whole = WholeModel(file)
    for part in sys.argv[2:]:
        first, last = map(int, part.split("-"))
        for piece in whole.layers.files(LayerRange(first, last + 1)):
            with piece.using():
                pass


if __name__ == "__main__":
    main()
