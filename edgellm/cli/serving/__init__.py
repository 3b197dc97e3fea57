"""What `edgellm serve` runs: its roles, its HTTP server, and what it announces."""
