"""CSGO: the planner of cold starts, and cold starts themselves."""
