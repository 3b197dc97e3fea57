"""Lists the benchmarks, runs them and shows their results.

    python -m bench list [NAME ...]
    python -m bench run NAME ... [--quick]
    python -m bench show [NAME ...]
    python -m bench gpu                     (everything that a graphics card changes, from a bare machine)

A NAME is a suite (`synera`) or a benchmark (`synera/quality`; `quality` alone where no other suite has one of that
name). `run` writes `bench/results/SUITE/NAME.json` and, where matplotlib is installed, some pictures; `--quick`
takes few cases and writes `quick-NAME`.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["gpu"]:  # it sets up what the others need
        from bench.gpu.__main__ import main as measure_card

        measure_card(sys.argv[2:])
    else:
        from bench.harness.suite import main

        main()
