"""A model whose layers are on several devices."""
