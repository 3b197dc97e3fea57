"""Drafting from a verifier's own states: by its layer that predicts further tokens (MTP), or an EAGLE-3 head."""
