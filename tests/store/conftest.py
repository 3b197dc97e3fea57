"""A hub on loopback and a cache of its own for each test."""

from tests.store.hub import cache, hub

__all__ = ["cache", "hub"]
