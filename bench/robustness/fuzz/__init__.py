"""Mutated input for everything that reads what others have written."""
