"""`edgellm doctor`: check this device and its network, and say how to fix problems."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from edgellm.cli.options.models import DEFAULT, DEFAULT_DRAFT, AsJson, Interfaces, model_names
from edgellm.cli.views.console import emit, one_line, out, say

if TYPE_CHECKING:
    from edgellm.diagnostics.local import Finding

_STATES = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("problem", "bold red")}


def doctor(
    draft: Annotated[
        str,
        typer.Option(
            "-m", "--draft", metavar="MODEL", envvar="EDGELLM_DRAFT", autocompletion=model_names,
            show_default=DEFAULT_DRAFT,
            help="Draft model whose vocabulary verifiers should have.",
        ),
    ] = DEFAULT,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT|URL", help="Address to check too; can be given several times."),
    ] = None,
    interface: Interfaces = None,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    from edgellm.diagnostics.run import examine

    found = examine(draft=draft, peers=peer or (), interfaces=interface or ())
    if as_json:
        findings = list(found)
        emit(json.dumps([{"topic": one.topic, "state": one.state, "what": one.what, "next_step": one.next_step}
                         for one in findings], indent=2))  # fmt: skip
    else:
        say("checking; this takes some seconds ...", style="dim")
        findings = list(_print_findings(found))
        count = sum(one.state == "problem" for one in findings)
        say(f"{count} problem{'' if count == 1 else 's'}." if count else "No problems found.", style="bold")
    return int(any(one.state == "problem" for one in findings))


def _print_findings(found: Iterable[Finding]) -> Iterable[Finding]:
    """Print each finding as it comes, and yield it."""
    for one in found:
        word, style = _STATES[one.state]
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, min_width=8)
        table.add_column(no_wrap=True, min_width=11, style="dim")
        table.add_column(overflow="fold")
        table.add_row(Text(word, style=style), one.topic, one_line(one.what))
        if one.next_step:
            table.add_row("", "", Text(f"→ {one_line(one.next_step)}", style="cyan"))
        out().print(table)
        yield one
