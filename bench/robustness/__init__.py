"""Bad input, attacks, faults, long runs, and the text that must stay the same."""
