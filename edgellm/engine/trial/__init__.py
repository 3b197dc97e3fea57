"""Model files that may end the process that loads them: known files are refused, unknown files tried in a child."""
