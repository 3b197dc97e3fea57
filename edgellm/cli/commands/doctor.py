"""`edgellm doctor`: check this device and its network, and say how to fix problems."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from edgellm.cli.options import DEFAULT, DEFAULT_DRAFT, AsJson, Interfaces, model_names
from edgellm.cli.views.console import counted, emit_json, one_line, out, say

if TYPE_CHECKING:
    from edgellm.diagnostics import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    draft: Annotated[
        str,
        typer.Option(
            "-m", "--draft", metavar="MODEL", envvar="EDGELLM_DRAFT", autocompletion=model_names,
            show_default=DEFAULT_DRAFT, help="Draft model whose vocabulary verifiers should have.",
        ),
    ] = DEFAULT,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT|URL", help="Address to check too; can be given several times."),
    ] = None,
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
            _print(one)
    count = sum(one.state == "problem" for one in findings)
    if as_json:
        emit_json([asdict(one) for one in findings])
    else:
        say(f"{counted(count, 'problem')}." if count else "No problems found.", style="bold")
    return int(count > 0)


def _print(one: Finding) -> None:
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(no_wrap=True, min_width=8)
    made.add_column(no_wrap=True, min_width=11, style="dim")
    made.add_column(overflow="fold")
    made.add_row(Text(one.state, style=_STYLES[one.state]), one.topic, one_line(one.what))
    if one.next_step:
        made.add_row("", "", Text(f"→ {one_line(one.next_step)}", style="cyan"))
    out().print(made)
