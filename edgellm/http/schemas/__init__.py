"""What requests and responses hold, and how errors are told."""
