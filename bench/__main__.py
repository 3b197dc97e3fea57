"""The benchmarks: `python -m bench list`, `run` and `show`."""

import sys

from bench.harness.runner import main
from edgellm.cli.views.console import discard

if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # its reader, such as `head`, has read enough
        discard(sys.stdout)
