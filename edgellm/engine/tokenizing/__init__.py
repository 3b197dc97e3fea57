"""Text to token ids, so that no text ends the process, keeps it busy for long, or cannot be given up."""
