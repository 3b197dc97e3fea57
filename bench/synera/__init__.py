"""Synera: gates, parallel inference, compression and the verifier's scheduler."""
