"""Layers that predict further tokens (MTP, next-n), which some models end with: drafts from the verifier itself."""
