"""HTTP to stock servers."""
