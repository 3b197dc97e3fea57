"""The code pair: Python's own standard library, and tasks on it."""
