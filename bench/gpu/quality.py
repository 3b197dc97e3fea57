"""Whether pairs write on this device what they write on the processor: every chunk verified, and at a budget."""

from __future__ import annotations

from typing import Any

from bench.gpu.machine import Machine
from edgellm.engine import Message
from edgellm.engine.hardware import Hardware
from edgellm.llm import LLM
from models.pairs import PAIRS

BUDGETS = (1.0, 0.2)
MOST = 64


def measured(machine: Machine) -> dict[str, Any]:
    """Return for each pair and budget the exact replies on this device and on the processor, and how many are equal. A
    budget below 1 needs a profile of the pair."""
    rows = []
    for name, pair in PAIRS.items():
        if not pair.file("verifier").exists():
            continue
        cases = [case for family in pair.families for case in pair.held_out(family, machine.amount.cases // 4 + 1)]
        for budget in BUDGETS if pair.profile.exists() else BUDGETS[:1]:
            texts = [_replies(pair.file("draft"), pair.file("verifier"), cases, budget, one) for one in _both(machine)]
            rows.append({
                "pair": name, "budget": budget, "cases": len(cases),
                "exact": [sum(text == case.answer for text, case in zip(some, cases, strict=True)) for some in texts],
                "equal": sum(one == other for one, other in zip(*texts, strict=True)),
            })  # fmt: skip
    return {"rows": rows}


def _both(machine: Machine) -> tuple[Hardware, Hardware]:
    return machine.hardware(1_024), Hardware(gpu_layers=0, n_ctx=1_024, threads=machine.threads)


def _replies(draft: Any, verifier: Any, cases: list[Any], budget: float, hardware: Hardware) -> list[str]:
    with LLM.open(draft, verifier, hardware=hardware, history=False) as pair:
        found = []
        for case in cases:
            messages = [Message(turn.role, turn.text) for turn in case.prompt]
            reply = pair.reply(messages, max_tokens=MOST, budget=budget, retrieval="off")
            for _ in reply:
                pass
            found.append(reply.summary.text)
    return found


def table(found: dict[str, Any]) -> str:
    """Return a line for each pair and budget."""
    lines = [f"{'pair':<6}{'budget':>8}{'cases':>7}{'exact here':>12}{'processor':>11}{'equal texts':>13}"]
    for row in found["rows"]:
        here, there = row["exact"]
        equal = f"{row['equal']} of {row['cases']}"
        lines.append(f"{row['pair']:<6}{row['budget']:>8}{row['cases']:>7}{here:>12}{there:>11}{equal:>13}")
    return "\n".join(lines) + "\n"
