"""One bar for the download of several models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.cli.views.console import err, is_terminal, one_line, size

if TYPE_CHECKING:
    from edgellm.storage import DownloadPlan, PulledModel, Transfer


def download(plans: Sequence[DownloadPlan]) -> list[PulledModel]:
    """Download the models of some plans, one after the other, and show one bar over all of them on a terminal; return
    where they are. Raise what `storage.fetch` raises."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from edgellm import storage

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f}%"),
        DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True),
    )  # fmt: skip
    pulled: list[PulledModel] = []
    with Progress(*columns, console=err(), disable=not is_terminal(sys.stderr)) as progress:
        task = progress.add_task("", total=sum(plan.size for plan in plans))
        before = 0
        for plan in plans:
            progress.update(task, description=one_line(plan.file.rsplit("/", 1)[-1]))
            resumed = False

            def show(transfer: Transfer, before: int = before) -> None:
                nonlocal resumed
                if transfer.resumed and not resumed:
                    resumed = True
                    progress.console.print(f"resuming at {size(transfer.resumed)}")
                progress.update(task, completed=before + transfer.done)

            pulled.append(storage.fetch(plan, show))
            before += plan.size
            progress.update(task, completed=before)
    return pulled
