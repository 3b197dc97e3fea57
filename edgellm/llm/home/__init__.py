"""A model on the measured devices of a home: which engine runs it, and which device holds which of its layers."""
