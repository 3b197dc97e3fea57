"""Past conversations and what was typed, as long as they are kept."""
