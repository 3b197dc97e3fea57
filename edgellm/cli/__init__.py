"""The command line: the only room that prints."""

from edgellm.cli.main import main

__all__ = ["main"]
