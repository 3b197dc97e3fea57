"""Attacks by other devices: verifiers, workers and paired devices that break the rules."""
