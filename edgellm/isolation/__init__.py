"""Child processes with limits, for untrusted input that could harm the process that handles it."""
