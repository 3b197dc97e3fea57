"""The command line: the only package that prints."""

from edgellm.cli.entrypoint import main

__all__ = ["main"]
