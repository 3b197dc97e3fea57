"""The command line: the only room that prints."""

from edgellm.cli.entry import main

__all__ = ["main"]
