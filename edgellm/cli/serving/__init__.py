"""The parts of `edgellm serve`: its roles, its HTTP server, and its announcements."""
