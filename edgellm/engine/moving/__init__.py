"""Keys and values on their way from one context to another."""
