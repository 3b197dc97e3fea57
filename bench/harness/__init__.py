"""Shared by all benchmarks: results on disk, statistics, figures and the suites."""

import os

os.environ.setdefault(
    "EDGELLM_PAIR", "home"
)  # the pair of all results, of whose held-out questions the answers are known
