"""Embeddings: one vector for a text."""
