"""The first minutes, with tiny models behind the real names."""

from __future__ import annotations

from pathlib import Path

from bench.cli.empty_home import measured, table


def test_a_newcomer_gets_both_first_replies(tmp_path: Path) -> None:
    found = measured(tmp_path, "qwen2.5:1.5b", "qwen2.5:0.5b", ("tiny-draft", "tiny-verifier"), 1)
    steps = found["steps"]
    assert "Friday at 20:00" in steps["bundled pair: first reply"]["answer"]
    shown = steps["real pair: setup"]["shown"]
    assert "qwen2.5:1.5b" in shown
    assert "use this pair from now on? [Y/n]" in shown
    assert steps["real pair: setup"]["keys"] == len(steps["real pair: setup"]["command"]) + 1 + 3
    assert "16 tokens" in steps["real pair: first reply"]["shown"]
    assert all(0 < row["first"] <= row["seconds"] for row in steps.values())
    assert found["bytes"] > 4_000_000
    assert str(tmp_path) not in table(found)
