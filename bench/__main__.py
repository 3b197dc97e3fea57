"""Lists the benchmarks, runs them and shows their results.

    python -m bench list [NAME ...]
    python -m bench run NAME ... [--quick]
    python -m bench show [NAME ...]

A NAME is a suite (`synera`) or a benchmark (`synera/quality`). `run` writes `bench/results/SUITE/NAME.json` and, where
matplotlib is installed, some pictures; `--quick` takes few cases and writes `quick-NAME`.
"""

from bench.harness.suite import main

if __name__ == "__main__":
    main()
