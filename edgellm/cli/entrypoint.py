"""The entry point: from the arguments to an exit code; the one place where errors are printed.

Exit codes: 0 all went well, 1 an expected failure, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import logging
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import typer
from typer.main import get_command

from edgellm import __version__
from edgellm.cli.views.console import discard, fail, prepare_streams, say
from edgellm.errors import EdgeError
from edgellm.places import state_dir


def main() -> None:
    """Run the `edgellm` command."""
    logging.disable(logging.WARNING)  # silences libraries: edgellm prints itself what a user should know
    prepare_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Never raises, never shows a traceback."""
    try:
        code = command()(list(arguments), prog_name="edgellm", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except EdgeError as error:
        fail(str(error))
        return error.exit_code
    except typer.TyperException as error:
        return _wrong_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        say("")
        return 130
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return _unexpected(error)
        discard(sys.stdout)
        fail("The disk is full, so the output cannot be written. Free some space, then run the command again.")
        return 1
    except Exception as error:  # noqa: BLE001  # the last resort
        return _unexpected(error)


@cache
def command() -> Callable[..., object]:
    """Return the tree of all commands, which takes most of the time of a help page to put together."""
    from edgellm.cli.app import app

    return get_command(app)


def _wrong_usage(error: typer.TyperException) -> int:
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if message := error.format_message():  # the message is empty after a help page
        command = context.command_path if context is not None else "edgellm"
        source = context.get_parameter_source(parameter.name) if context is not None and parameter is not None else None
        if source is not None and source.name == "ENVIRONMENT":
            from edgellm.cli.settings import variable_of

            message = f"{message.rstrip('.')}, from {variable_of(parameter)}"
        message = message.replace("Value error, ", "").strip()
        fail(f"{message}{'' if message.endswith(('.', '?')) else '.'} See: {command} --help")
    return error.exit_code


def _unexpected(error: Exception) -> int:
    what = f"Something unexpected happened: {type(error).__name__}: {error}."
    from edgellm.storage.state import write_state

    try:
        path = state_dir() / "logs" / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.log"
        about = f"edgellm {__version__}, Python {platform.python_version()}, {platform.platform()}\n\n"
        write_state(path, about + "\n".join(_traceback(error)))
        fail(f"{what} Please report it with the details in {path}.")
    except OSError:
        fail(f"{what} No log could be written. Set EDGELLM_HOME to a folder that can be written, and try again.")
    return 1


def _traceback(error: BaseException) -> Iterator[str]:
    """Yield where an error and its causes were raised, with their types. Their messages may quote a prompt."""
    if before := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        yield from _traceback(before)
    yield "Traceback (most recent call last):\n" + "".join(traceback.format_tb(error.__traceback__))
    yield f"{type(error).__name__} (its message is not kept)\n"
