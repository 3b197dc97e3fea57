"""Profiles of pairs: making them from prompts, keeping them, finding them."""
