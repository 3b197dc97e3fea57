"""Reports after each reply of a mesh: what every device did, beside what was planned."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from edgellm.cli.views.console import emit, err, say
from edgellm.cli.views.timeline_view import show
from edgellm.llm.mesh.timeline import Replies, beside

if TYPE_CHECKING:
    from edgellm.llm.mesh.mesh_llm import Opened
    from edgellm.spec.types import Summary


class Reports:
    """The reports of one mesh; see `Replies`."""

    def __init__(self, opened: Opened, *, as_json: bool) -> None:
        self._replies, self._as_json = Replies(opened), as_json

    def asked(self) -> None:
        """Note that a reply begins."""
        self._replies.asked()

    def heard(self, summary: Summary) -> None:
        """Print what was done for the reply, which is over."""
        found = self._replies.heard(summary)
        if found is None:
            return
        did, plan = found
        if self._as_json:
            emit(json.dumps({"mesh": beside(did.way, plan, did.disproved)}))
        else:
            show(err(), did, plan)
            for sentence in did.disproved:
                say(sentence, style="yellow")
