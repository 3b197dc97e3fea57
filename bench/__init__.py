"""Benchmarks: `python -m bench list` says what there is, `bench/README.md` explains it."""
