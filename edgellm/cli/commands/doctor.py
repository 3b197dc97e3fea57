"""`edgellm doctor`: check this device and its network, and say how to fix problems."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from edgellm.cli.options import DEFAULT, DEFAULT_DRAFT, AsJson, Interfaces, model_names
from edgellm.cli.views.console import counted, emit_json, grid, one_line, out, say

if TYPE_CHECKING:
    from edgellm.diagnostics import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    draft: str = typer.Option(
        DEFAULT, metavar="MODEL", envvar="EDGELLM_DRAFT", autocompletion=model_names, show_default=DEFAULT_DRAFT,
        help="Draft model whose vocabulary verifiers should have.",
    ),
    peer: list[str] | None = typer.Option(
        None, metavar="HOST:PORT|URL", help="Address to check too; can be given several times."
    ),
    interface: Interfaces = None,
    as_json: AsJson = False,
) -> int:  # fmt: skip
    from edgellm.diagnostics import examine

    findings: list[Finding] = []
    if not as_json:
        say("checking; this takes some seconds ...", style="dim")
    for one in examine(draft=draft, peers=peer or (), interfaces=interface or ()):
        findings.append(one)
        if not as_json:
            made = grid({"min_width": 8}, {"min_width": 11, "style": "dim"}, {"overflow": "fold"})
            made.add_row(Text(one.state, style=_STYLES[one.state]), one.topic, one_line(one.what))
            if one.next_step:
                made.add_row("", "", Text(f"→ {one_line(one.next_step)}", style="cyan"))
            out().print(made)
    count = sum(one.state == "problem" for one in findings)
    if as_json:
        emit_json([asdict(one) for one in findings])
    else:
        say(f"{counted(count, 'problem')}." if count else "No problems found.", style="bold")
    return int(count > 0)
