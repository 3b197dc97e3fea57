"""Keys and values of a context: the ids of its sequences, rollbacks, and caches sent elsewhere."""
