"""The commands of `edgellm mesh`."""
