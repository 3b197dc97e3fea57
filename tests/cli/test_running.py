"""`edgellm ps` and `stop` on a server of this user."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.cli.conftest import Done
from tests.cli.test_serve_http import QUESTION, Start, ask, start

__all__ = ["start"]


def test_a_server_is_listed_its_model_removed_and_it_is_ended(start: Start, edge: Callable[..., Done]) -> None:
    server, url = start("--draft", "none")
    port = url.rpartition(":")[2].partition("/")[0]
    (listed,) = json.loads(edge("ps", "--json").out)
    assert (listed["process"], str(listed["port"])) == (server.process.pid, port)
    assert [model["name"] for model in listed["models"]] == ["edgellm-verifier"]
    shown = edge("ps").out
    assert port in shown
    assert "edgellm-verifier" in shown
    assert f"port {port}" in edge("stop", "edgellm-verifier").err
    assert "no model in memory" in edge("ps").out
    refused = edge("stop", "edgellm-verifier")
    assert refused.code == 1
    assert "is not in memory" in refused.err
    assert ask(f"{url}/chat/completions", messages=QUESTION, max_tokens=2)["model"] == "edgellm-verifier"
    assert "No server of yours is running at port 9." in edge("stop", "9").err
    assert "has ended" in edge("stop", port).err
    assert server.end()[0] == 0
    assert "No server of yours" in edge("ps").err
    assert json.loads(edge("ps", "--json").out) == []
    assert "so edgellm-verifier is not in memory" in edge("stop", "edgellm-verifier").err
