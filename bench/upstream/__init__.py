"""Stock servers as verifiers."""
