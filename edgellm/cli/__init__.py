"""The command line: the only package that prints."""

import sys

try:
    from edgellm.cli.app import main
except KeyboardInterrupt:
    sys.exit(130)

__all__ = ["main"]
