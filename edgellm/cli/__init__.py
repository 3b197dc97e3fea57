"""The command line: the only package that prints."""

from edgellm.cli.app import main

__all__ = ["main"]
