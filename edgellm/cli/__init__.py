"""The command line: the only room that prints."""

from edgellm.cli.entrypoint import main

__all__ = ["main"]
