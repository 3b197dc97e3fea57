"""Cost models and planners: pure functions over numbers. Knows nothing but numpy."""
