"""The bundled pair of tiny models, and the code that made them. Knows nothing of the package."""
