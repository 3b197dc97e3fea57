"""Model files that may end the process that loads them: known ones are refused, unknown ones tried in a child."""
