"""Hostile input and hostile devices."""
