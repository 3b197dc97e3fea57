"""Clients of a served verifier and of a mesh's workers."""
