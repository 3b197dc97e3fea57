"""The guide's page on stock servers, tried by its own words with servers of ours in place of the real ones."""

from __future__ import annotations

import pytest

from bench.cli.server_page import PAGE, SERVERS, blocks, missing, results, ways, why_not


def test_the_page_is_read_as_it_is_written() -> None:
    page = PAGE.read_text(encoding="utf-8")
    direct, gateway, several = blocks(page)
    assert [step.command.split()[1] for step in direct] == ["pull", "chat", "doctor"]
    assert all(step.machine == "laptop" for step in direct)
    for steps in (gateway, several):
        (serves,) = (step for step in steps if step.serves)
        assert serves.machine == "desk"
        assert serves.shown
    promised = ways(page)
    for start in SERVERS:
        assert any(row.startswith(start) for row in promised)
    assert set(promised.values()) == {"score or fan-out", "score", "continue", "fan-out"}


def test_lines_are_missing_that_are_not_printed_in_order() -> None:
    printed = "loading x\nvLLM at http://gpu-box:8000 verifies by score: it does\n18 tokens · all verified\n"
    assert not missing(("vLLM at … verifies by score: …", "… · all verified"), printed)
    assert missing(("… · all verified", "vLLM at … verifies by score: …"), printed) == [
        "it does not print: vLLM at … verifies by score: …"
    ]


@pytest.mark.parametrize(("only", "commands"), [("vllm-fan-out", 3), ("gateway", 11)])
def test_the_commands_do_what_the_page_says(only: str, commands: int) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with results(only) as tried:
        assert len(tried) == commands
        assert not [(one.command, one.problems, one.printed) for one in tried if one.problems]
