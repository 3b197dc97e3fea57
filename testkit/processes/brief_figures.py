"""Run a module whose process measures the speed of layers in no time: not well, but really.

python -m testkit.processes.brief_figures edgellm mesh plan edgellm-verifier
"""

import runpy
import sys
from unittest.mock import patch

from edgellm.engine.gguf import synthetic_layers


def main() -> None:
    del sys.argv[0]
    with patch.multiple(synthetic_layers, ROWS=(1, 8), _SPELL=0.0, _ROUNDS=1):
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
