"""Keys and values of a context: which ids its sequences hold, what can be rolled back, and what is sent elsewhere."""
