"""Synera: gates, parallel inference and the verifier's scheduler."""
