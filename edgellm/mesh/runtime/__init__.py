"""The pipeline and its stages, while they run."""
