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
from edgellm.cli.commands.models.catalog import catalog
from edgellm.cli.commands.models.files import ls, pull, rm, show
from edgellm.cli.commands.models.run import run
from edgellm.cli.commands.models.setup import setup
from edgellm.cli.commands.pair import pair
from edgellm.cli.commands.peers import peers
from edgellm.cli.commands.profile import profile
from edgellm.cli.commands.running import ps, stop
from edgellm.cli.commands.serve import serve
from edgellm.cli.commands.service import service
from edgellm.cli.help_pages import add_command, command_group
from edgellm.cli.settings import bind_variables, read_file

app = command_group(
    "edgellm",
    "The machines of a home as one language model: a small model drafts, a bigger one verifies.\n\n"
    "A model is a path, a name from `edgellm ls` or `edgellm catalog`, or user/repo:quant on the Hugging Face hub.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edgellm {__version__}")
        from edgellm.engine.native import description

        typer.echo(f"llama.cpp: {description()}")
        raise typer.Exit


@app.callback()
def _edgellm(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    bind_variables(context)
    if context.invoked_subcommand != "config":  # which must work while the file has an error
        context.default_map = read_file(context)


_PROFILE = "Use prompts like those you ask; a few dozen are enough. From then on the profile is used by default."
_BENCH = (
    "Writes results to bench/results/ as JSON, and as plots if matplotlib is installed. Options for hardware reach the "
    "parts that use them, which --list shows, and their results are called hardware-PART; of csgo, gpu, clients, cli "
    "and upstream no part uses any: they decide themselves what they compute on."
)
_HISTORY = (
    "The history stays on this machine, readable by you alone, and is never sent. Entries are removed after a year, or "
    "when you clear it. The same holds for everything derived from it; see docs/guide/privacy.md."
)
_PAIR = (
    "The code is valid for two minutes and one guess, and is never sent over the network. A device that verifies for "
    "you reads your prompts. Both devices show what each may do on the other; change it with `edgellm peers`."
)
_CONVERSATIONS = (
    "The last 300 are kept on this machine, readable by you alone, while the history is on. "
    "`edgellm history clear` removes them too."
)
_CATALOG = (
    "Its names are understood wherever a model is named; NAME-QUANT is another quantisation. What it says of the hub "
    "comes from public lists; `edgellm pull` asks the hub."
)
_DOCTOR = "Changes nothing. Exit code 1 if a problem was found; notes do not count."
_PEERS = "Revoked rights end at once, even in the middle of a reply."
_SERVE = "On Ctrl-C it finishes requests in flight; a worker stops at once."
_STOP = "Only servers of your own are found. One that ends finishes requests in flight first, as on Ctrl-C."
_SETUP = (
    "It looks at memory, graphics cards and paired devices, says what it proposes and why, and asks before it "
    "downloads. The pair is written into the settings of chat, serve and profile; `edgellm config show` prints them."
)
_RUN = (
    "A draft model is one that is here, has the same tokenizer and at most half the size; which one, and why, is said. "
    "All options of `edgellm chat` may follow MODEL."
)
_CHAT = "With the default pair nothing that you type leaves this machine; SmolLM2 is fetched once (93 MB)."

for _name, _command, _summary, _more in (
    ("chat", chat, "Chat with a pair of models: a small one drafts the reply, a bigger one verifies it.", _CHAT),
    ("setup", setup, "Choose, download and set up a pair of models that fits this machine.", _SETUP),
    ("run", run, "Talk to one model: as the verifier of a draft model that fits it, or alone.", _RUN),
    ("profile", profile, "Measure a pair of models on your prompts, to verify what matters within a budget.", _PROFILE),
    ("serve", serve, "Serve a pair of models or a verifier, or compute layers for other devices.", _SERVE),
    ("ps", ps, "List your running servers and the models in their memory.", ""),
    ("stop", stop, "Remove a model from memory, or end a server.", _STOP),
    ("pair", pair, "Pair two devices with a code: one shows it, you type it on the other.", _PAIR),
    ("peers", peers, "List paired devices, and change what they may do here.", _PEERS),
    ("doctor", doctor, "Check this device and its network, and say how to fix problems.", _DOCTOR),
    ("catalog", catalog, "List models that make good pairs, and whether they fit here.", _CATALOG),
    ("pull", pull, "Download a model of the catalogue or the Hugging Face hub.", "An interrupted download resumes."),
    ("ls", ls, "List the models on this machine.", ""),
    ("show", show, "Show details of a model.", ""),
    ("rm", rm, "Remove a downloaded model.", "Your own files and the bundled models are never removed."),
    ("conversations", conversations, "List, show and remove past conversations.", _CONVERSATIONS),
    ("history", history, "Show, clear or switch off the history that replies are drafted from.", _HISTORY),
    ("bench", bench, "Run the papers' measurements on this machine.", _BENCH),
):
    add_command(app, _name, _command, _summary, _more, passes_on=_command is run)

app.add_typer(mesh, name="mesh")
app.add_typer(service, name="service")
app.add_typer(config, name="config")
for _name in ("list", "models"):
    add_command(app, _name, ls, "Same as ls.", hidden=True)
