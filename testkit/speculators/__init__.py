"""Small speculators for the models of `testkit.gguf.architectures`."""
