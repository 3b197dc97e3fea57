"""The benchmarks: `python -m bench list`, `run` and `show`."""

import os

from bench.harness.runner import main

if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # its reader, such as `head`, has read enough
        os._exit(0)
