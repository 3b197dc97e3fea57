"""Threads and cores: OpenMP as it is loaded, and fewer threads while others compute."""
