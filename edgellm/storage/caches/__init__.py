"""Caches of what llama.cpp has received or computed, within a limit: weights, and prompts that were read."""
