"""The benchmarks: `python -m bench list`, `run` and `show`."""

from bench.harness.runner import main

if __name__ == "__main__":
    main()
