"""Mutated input for every decoder of foreign data."""
