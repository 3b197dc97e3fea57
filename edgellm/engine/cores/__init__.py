"""Threads and cores: loading OpenMP, and fewer threads while other threads or programs compute."""
