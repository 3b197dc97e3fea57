"""Attacks on edgellm, each repeated by one command: `python -m bench.robustness.attack NAME`."""
