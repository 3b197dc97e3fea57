"""The kinds of stock servers, a module each. `connect` there returns the server if it is of that kind, else None."""
