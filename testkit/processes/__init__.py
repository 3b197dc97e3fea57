"""Processes that tests and benchmarks start: verifiers, workers and devices."""
