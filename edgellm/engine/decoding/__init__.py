"""Contexts of llama.cpp: the KV cache, batches, logits, and hooks into the graph."""
