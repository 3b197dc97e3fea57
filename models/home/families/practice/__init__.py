"""Exercises for the curriculum, one module each; no held-out case is of these."""
