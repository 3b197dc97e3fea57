"""Small speculators for the models of `testkit.architectures`."""
