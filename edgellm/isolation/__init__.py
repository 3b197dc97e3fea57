"""Child processes of ours, with limits, for input from strangers that could harm the process that works on it."""
