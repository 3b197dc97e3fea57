"""JSON schemas that a reply must follow: prepared for llguidance, and applied as masks over the vocabulary."""
