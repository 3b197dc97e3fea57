"""The options of commands as records, and their flags."""
