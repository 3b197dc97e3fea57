"""Shared by all benchmarks: results on disk, statistics, figures and the suites."""
