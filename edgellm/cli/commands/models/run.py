"""`edgellm run`: talk to one model, as the verifier of a draft model that fits it, or alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from edgellm.cli.commands.models.files import other_models
from edgellm.cli.options.models import known_models
from edgellm.cli.views.console import is_terminal, one_line, say, size
from edgellm.cli.views.progress import download
from edgellm.errors import EdgeError, InvalidOption, ModelNotFound

_LEFT_TO_US = ("draft", "verifier", "peer", "mesh", "profile")  # settings of `chat` that belong to another pair


def run(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Name from `edgellm ls` or `edgellm catalog`, user/repo[:quant], or path.",
                       autocompletion=known_models),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]", help="Question, and options of edgellm chat. Default: piped input, or a "
                       "conversation."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("-m", "--draft", metavar="MODEL", help="Small model that drafts; 'none': MODEL writes alone.",
                     show_default="one that is here and fits", autocompletion=known_models),
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Download MODEL without asking if it is not here.")] = False,
) -> int:  # fmt: skip
    if model.startswith("-"):
        raise InvalidOption(f"{model} is before the model.", "Name the model first: edgellm run MODEL PROMPT")
    path = here_or_pulled(model, yes=yes)
    if draft is None:
        draft, reason = fitting_draft(model, path)
        say(reason, style="dim")
    root = context.find_root()
    given = ["--draft", draft, "--verifier", model, *(words or [])]
    command = root.command.get_command(root, "chat")  # type: ignore[attr-defined]
    settings = (root.default_map or {}).get("chat") or {}
    kept = {name: value for name, value in settings.items() if name not in _LEFT_TO_US}
    with command.make_context("chat", given, parent=root, default_map=kept) as chat:
        code: int = command.invoke(chat)
    return code


def here_or_pulled(name: str, *, yes: bool) -> Path:
    """Return the file of a model; one that is not here is downloaded if the user says so.

    Raises:
        ModelNotFound: there is no such model, or it is not here and nobody has said that it may be downloaded.
        What `plan` and `fetch` raise.
    """
    from edgellm import storage

    try:
        return storage.resolve(name)
    except ModelNotFound as error:
        if " " in name:
            raise ModelNotFound(f"{name!r} is not a model.", "To ask the pair that is set up: edgellm chat") from None
        if storage.looks_like_path(name):
            raise
        try:
            if storage.catalog().find(name) is None:
                storage.hub_name(name)
        except EdgeError:
            raise error from None
        if not yes and not is_terminal(sys.stdin):
            raise ModelNotFound(error.what, f"{error.next_step}; or add --yes to download it now.") from None
    plan = storage.plan(name)
    if plan.path is not None:
        return plan.path
    if plan.warning:
        say(f"{plan.warning}.", style="yellow")
    about = f"{one_line(plan.file)} ({size(plan.size)}; {plan.reason})"
    if not yes and not typer.confirm(f"{name} is not here. Download {about}?", default=True, err=True):
        raise typer.Exit(1)
    if yes:
        say(f"downloading {about}")
    return download([plan])[0].path


def fitting_draft(name: str, path: Path) -> tuple[str, str]:
    """Return the draft model, or EAGLE-3 head, for a verifier among those here, or "none", and the reason."""
    from edgellm.engine import ModelFile
    from edgellm.llm.abilities import draft_for, heads_for
    from edgellm.storage import catalog
    from edgellm.storage.pair_choice import ModelRoom

    file, others = ModelFile.open(path), other_models(path)
    if heads := heads_for(file, others):
        return heads[0], f"{heads[0]} drafts for {name}: it is an EAGLE-3 head for it. Alone: --draft none"
    found = draft_for(file, others)
    if found is None:
        known = catalog().find(name)
        wanted = None if known is None else known[0].draft
        more = f" {wanted} would draft for it: edgellm pull {wanted}" if wanted else ""
        return "none", f"{name} writes alone: no smaller model with its tokenizer is here.{more}"
    place = ModelRoom.look().place(file.header.file_size)
    if place is None or place.left.place(others[found].header.file_size) is None:
        return "none", f"{name} writes alone: {found} would draft for it, and there is no memory for both."
    share = others[found].header.file_size / file.header.file_size
    return found, f"{found} drafts for {name}: it has its tokenizer and {share:.0%} of its size. Alone: --draft none"
