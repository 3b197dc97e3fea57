"""What tests and benchmarks share: models, networks, processes and hostile input made for the purpose."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
