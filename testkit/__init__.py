"""Shared by tests and benchmarks: models, networks, processes and hostile input."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
