"""The application, put together from its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from edgellm import __version__
from edgellm.cli.commands.bench import bench
from edgellm.cli.commands.chat import chat
from edgellm.cli.commands.config import config
from edgellm.cli.commands.conversations import conversations
from edgellm.cli.commands.doctor import doctor
from edgellm.cli.commands.history import history
from edgellm.cli.commands.mesh.plan import mesh
from edgellm.cli.commands.models import ls, pull, rm, show
from edgellm.cli.commands.pair import pair
from edgellm.cli.commands.peers import peers
from edgellm.cli.commands.profile import profile
from edgellm.cli.commands.serve import serve
from edgellm.cli.help_examples import taught
from edgellm.cli.settings import bind_variables, read_file

app = typer.Typer(
    name="edgellm",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"edgellm {__version__}")
        raise typer.Exit


@app.callback()
def _edgellm(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The machines of a home as one language model: a small model drafts, a bigger one verifies.

    Start with: [cyan not dim]edgellm chat "Where is my mug?"[/]
    Models are paths, names from `edgellm ls`, or user/repo:quant from the Hugging Face hub.
    """
    bind_variables(context)
    if context.invoked_subcommand != "config":  # that shows where the file is, and must work while it has an error
        context.default_map = read_file(context)


_PROFILE = "The prompts should be such as you ask; some dozens do. The profile is found by itself from then on."
_EVIDENCE = "Results go to bench/results/ as JSON, and as pictures where matplotlib is installed."
_PRIVATE = (
    "It is kept on this machine only, readable by you alone, never sent, and removed after a year, or when you say. "
    "So is everything derived from it; docs/privacy.md lists all of it."
)
_CODE = (
    "The code is good for two minutes and one guess, and never travels. A device that verifies for you reads your "
    "prompts; what each side may do is shown on both, and changed with `edgellm peers`."
)
_KEPT = (
    "The last 300 are kept on this machine, readable by you alone, while the history is on. "
    "`edgellm history clear` removes them, too."
)
_PROBLEMS = "Nothing is changed. Exit code 1 means that there is a problem; notes alone are none."
_AT_ONCE = "What is taken away ends at once, also in the middle of a reply."
_STOPPED = "It finishes what it has begun when it is stopped; a worker stops at once."
_ALONE = "Nothing leaves this machine: the bundled pair of models comes with edgellm."

for _name, _command, _summary, _more in (
    ("chat", chat, "Talk to the pair: a small model drafts the reply, a bigger one verifies it.", _ALONE),
    ("profile", profile, "Measure a pair on your prompts, so that a budget is spent where it matters.", _PROFILE),
    ("serve", serve, "Serve a pair or a verifier, over HTTP too, or layers for models on several devices.", _STOPPED),
    ("pair", pair, "Make two devices trust each other, by a code that one shows and the other is told.", _CODE),
    ("peers", peers, "See the paired devices, and change what they may do here.", _AT_ONCE),
    ("doctor", doctor, "Find out what is wrong with this device and its links, and what to do.", _PROBLEMS),
    ("pull", pull, "Fetch a model from the Hugging Face hub.", "A pull that was cut goes on where it stopped."),
    ("ls", ls, "List the models that are on this machine.", ""),
    ("show", show, "Show what is known of a model.", ""),
    ("rm", rm, "Remove a pulled model.", "Your own files and the bundled pair are never removed."),
    ("conversations", conversations, "See what was talked about, and remove it.", _KEPT),
    ("history", history, "See, forget or switch off the past conversations that replies are drafted from.", _PRIVATE),
    ("bench", bench, "Measure what the papers measured, on this machine.", _EVIDENCE),
):
    app.command(_name, help=taught(_name, _summary, _more))(_command)

app.add_typer(mesh, name="mesh")
app.add_typer(config, name="config")
app.command("run", hidden=True, help=taught("chat", "The same as chat.", _ALONE))(chat)
