"""Drafters: proposers of tokens that the verifier judges."""
