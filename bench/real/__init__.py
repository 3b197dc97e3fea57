"""Real weights and real text."""
