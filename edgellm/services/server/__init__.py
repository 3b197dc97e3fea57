"""Servers: the verifier, the worker of a mesh."""
