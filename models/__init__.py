"""The pairs of tiny models that the repository makes, and the code that makes them. Knows nothing of the package."""
