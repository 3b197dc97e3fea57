"""Profiles of pairs: made from prompts, kept, found again."""
