"""GGUF files: read, checked, cut, merged, written."""
