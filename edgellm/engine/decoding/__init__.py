"""Contexts of llama.cpp: the KV cache, batches, logits, what the graph shows."""
