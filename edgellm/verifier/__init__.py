"""The verifier: one engine that judges drafts, in this process, for other devices, and at the end of a mesh."""
