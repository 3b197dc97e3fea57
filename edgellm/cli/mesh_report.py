"""Behind each reply of a mesh: what every device did, beside what was planned."""

from __future__ import annotations

import json
from time import perf_counter
from typing import TYPE_CHECKING

from edgellm.cli.measured import measured_json, show
from edgellm.cli.screen import emit, err

if TYPE_CHECKING:
    from edgellm.api.mesh import Opened
    from edgellm.spec.records import Summary


class Reports:
    """Of one mesh. The first reply counts from when the devices began to load, later ones from when they were asked."""

    def __init__(self, opened: Opened, *, as_json: bool) -> None:
        self._opened, self._as_json = opened, as_json
        self._since: float | None = opened.began
        self._asked = perf_counter()

    def asked(self) -> None:
        """A reply begins."""
        self._asked = perf_counter()

    def heard(self, summary: Summary) -> None:
        """The reply is over: prints what was done for it."""
        from edgellm.api.mesh_times import measured

        cold, since = self._since is not None, self._since or self._asked
        self._since = None
        if summary.ttft_ms is None:
            return
        rest = (summary.tokens - 1) / summary.tokens_per_second if summary.tokens_per_second else 0.0
        ttft = self._asked - since + summary.ttft_ms / 1e3
        found = measured(self._opened, since, ttft, summary.tokens, ttft + rest)
        plan = self._opened.foreseen(summary.prompt_tokens, summary.tokens, cold=cold)
        if self._as_json:
            emit(json.dumps({"mesh": measured_json(found, plan)}))
        else:
            show(err(), found, plan)
