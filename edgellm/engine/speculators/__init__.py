"""What drafts from a verifier's own states: its layer that predicts further tokens (MTP), or an EAGLE-3 head."""
