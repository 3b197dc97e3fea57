"""A stock server from the command line."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgellm.cli.app import app
from edgellm.cli.options import upstream_options
from edgellm.diagnostics import examine_server
from edgellm.errors import InvalidOption
from edgellm.llm import LLM
from edgellm.spec.stream import Reply
from edgellm.upstream.rows import Tier
from testkit.upstream.dialects import LlamaServer, Vllm
from testkit.upstream.engine import Engine
from testkit.upstream.server import Fault, UpstreamServer


def test_a_chat_with_a_server(engine: Engine, f32_pair: tuple[Path, Path], tmp_path: Path, closing: ExitStack) -> None:
    server = closing.enter_context(UpstreamServer(Vllm(engine), key="open-sesame"))
    key = tmp_path / "key"
    key.write_text("open-sesame\n")
    words = ["chat", "Where is my mug?", "--draft", str(f32_pair[0]), "--verifier", server.url, "--max-tokens", "6"]
    done = CliRunner().invoke(
        app, [*words, "--verifier-key-file", str(key), "--verifier-tier", "continue", "--explain"]
    )
    assert done.exit_code == 0, done.output
    assert "verifies by continue" in done.stderr
    assert "open-sesame" not in done.output + done.stderr
    with LLM.open("none", f32_pair[1], threads=1) as alone:
        reply: Reply = alone.reply("Where is my mug?", max_tokens=6)
        assert "".join(token.piece.decode() for token in reply) in done.stdout


def test_a_tier_that_does_not_exist() -> None:
    assert upstream_options(None, None) is None
    found = upstream_options("fan-out", None)
    assert found is not None
    assert found.tier is Tier.FAN_OUT
    with pytest.raises(InvalidOption, match="'best'"):
        upstream_options("best", None)


def test_a_server_that_is_not_there_or_shows_no_template_is_told_of(
    engine: Engine, f32_pair: tuple[Path, Path], closing: ExitStack
) -> None:
    server = closing.enter_context(UpstreamServer(Vllm(engine)))
    words = ["chat", "Where is my mug?", "--draft", str(f32_pair[0]), "--max-tokens", "2", "--verifier"]
    first, second = (CliRunner().invoke(app, [*words, server.url]).stderr for _ in range(2))
    assert "vLLM does not show its chat template" in first
    assert "chat template" not in second
    gone = CliRunner().invoke(app, [*words, "http://127.0.0.1:9"])
    assert "Check the address, and that the server is running." in str(gone.exception)


def test_doctor_names_the_server_and_how_it_verifies(
    engine: Engine, f32_pair: tuple[Path, Path], closing: ExitStack
) -> None:
    server = closing.enter_context(UpstreamServer(LlamaServer(engine)))
    first, *_ = examine_server(server.url, str(f32_pair[0]))
    assert first.state == "ok"
    assert "llama-server" in first.what
    assert "verifies by continue" in first.what
    assert "mean the same there as here" in first.what
    server.fault = Fault.GARBAGE
    (found,) = examine_server(server.url, str(f32_pair[0]))
    assert found.state == "problem"
