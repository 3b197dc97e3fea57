"""Opening a pair: its engine, and verifiers in other processes."""
