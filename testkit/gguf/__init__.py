"""GGUF files for tests and benchmarks: random models of every architecture, split files, and reading in memory."""
