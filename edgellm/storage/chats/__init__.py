"""Past conversations and typed lines, as long as they are kept."""
