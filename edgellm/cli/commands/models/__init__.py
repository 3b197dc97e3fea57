"""The commands about models: those on this machine, and those that it can get."""
