"""The figures of a reply: a short summary, a full table, or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import MEANINGS, STYLES, err, size

if TYPE_CHECKING:
    from edgellm.spec.types import Summary, Token


def token_json(token: Token, text: str) -> str:
    """Return a token as a JSON object. `text`: the characters that it completes; joined, they are the reply."""
    return json.dumps(
        {
            "id": token.id,
            "text": text,
            "source": token.source,
            "confidence": _short(token.confidence),
            "importance": _short(token.importance),
            "exit_layer": token.exit_layer,
            "round": token.round,
        }
    )


def summary_json(summary: Summary) -> str:
    figures = {name: _short(value) for name, value in dataclasses.asdict(summary).items()}
    del figures["first_at"]  # by a clock of this process only
    return json.dumps({"summary": figures})


def print_summary(summary: Summary, sources: Counter[str]) -> None:
    """Print the legend with the counts of this reply, and its figures, on stderr."""
    console = err()
    if sources:
        legend = [Text(f"■ {source} {sources[source]}", style=STYLES[source]) for source in STYLES if sources[source]]
        console.print(Text("  ").join(legend))
    console.print(Text(" · ".join(_headline(summary)), style="dim"))


def _headline(summary: Summary) -> list[str]:
    parts = [f"{summary.tokens} {'token' if summary.tokens == 1 else 'tokens'}"]
    if summary.tokens_per_second is not None:
        parts.append(f"{summary.tokens_per_second:.1f} tokens/s")
    if summary.ttft_ms is not None:
        parts.append(f"first after {summary.ttft_ms:.0f} ms")
    if summary.share_verified is not None:
        parts.append(f"{summary.share_verified:.0%} verified")
    if summary.acceptance_rate is not None:
        parts.append(f"{summary.acceptance_rate:.0%} of drafts accepted")
    if summary.mean_acceptance_length is not None:
        parts.append(f"{summary.mean_acceptance_length:.2f} tokens per check")
    if summary.retrieved:
        parts.append(f"{summary.retrieved} copied")
    if summary.verifier_passes_per_token:
        parts.append(f"{summary.verifier_passes_per_token:.2f} verifier passes per token")
    if summary.share_offloaded is not None and summary.share_offloaded < 1.0:
        parts.append(f"{summary.share_offloaded:.0%} offloaded so far")
    if summary.guesses_tried:
        parts.append(f"{summary.guesses_hit} of {summary.guesses_tried} verdicts predicted")
    return [*parts, *_bytes_and_end(summary)]


def _bytes_and_end(summary: Summary) -> list[str]:
    parts = []
    if summary.bytes_up or summary.bytes_down:
        parts.append(f"{size(summary.bytes_up)} up, {size(summary.bytes_down)} down")
    elif summary.share_verified is not None:
        parts.append("0 B up, 0 B down")
    if summary.finish_reason != "stop":
        parts.append({"length": "stopped at the length limit", "cancelled": "stopped by you"}[summary.finish_reason])
    return parts


def print_stats(summary: Summary) -> None:
    """Print every figure and its meaning on stderr."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(justify="right")
    table.add_column()
    table.add_column(style="dim")
    for value, name, meaning in _rows(summary):
        table.add_row(value, name, meaning)
    err().print(table)


def _rows(summary: Summary) -> list[tuple[str, str, str]]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        (str(summary.prompt_tokens), "prompt tokens", "the whole conversation, as the model gets it"),
        (str(summary.tokens), "tokens", "in this reply"),
        (number(summary.ttft_ms, ".1f"), "ms to the first", "from the request to the first token"),
        (number(summary.tokens_per_second, ".1f"), "tokens/s", "after the first round"),
        (number(summary.share_verified, ".1%"), "verified", "tokens accepted or written by the verifier"),
        (
            number(summary.acceptance_rate, ".1%"),
            "of drafts accepted",
            "of the drafted tokens that the verifier judged",
        ),
        (number(summary.mean_acceptance_length, ".2f"), "tokens per check", "with the verifier's own token"),
        (number(summary.verifier_passes_per_token, ".2f"), "verifier passes per token", "1 without drafts"),
        (
            f"{summary.chunks_accepted_whole} of {summary.chunks_verified}",
            "chunks whole",
            "accepted to their last token",
        ),
        (str(summary.drafted), "drafted", f"in {summary.rounds} rounds"),
        (str(summary.retrieved), "copied", _copied(summary)),
        (str(summary.heeded), "from the context", "drafted in place of tokens that the draft model was unsure of"),
        (str(summary.exits), "early exits", "drafted without the draft model's last layers"),
        (number(summary.share_offloaded, ".1%"), "offloaded", "of all chunks so far, to hold against the budget"),
        (f"{summary.guesses_hit} of {summary.guesses_tried}", "verdicts predicted", "while they were pending"),
        (number(summary.stall_hidden, ".0%"), "of waiting hidden", "spent on drafts that were used"),
        (number(summary.bytes_per_chunk, ".0f"), "bytes per chunk", "sent and received, with the prompt's share"),
        (size(summary.bytes_up), "up", "sent to the verifier"),
        (size(summary.bytes_down), "down", "received from it"),
        (str(summary.seed), "seed", "repeats a sampled reply with --seed"),
        (summary.finish_reason, "ended by", "stop: the model; length: the limit; cancelled: you"),
    ]


def _copied(summary: Summary) -> str:
    found = ", ".join(f"{name} {count}" for name, count in summary.retrieved_from)
    return f"accepted, from these sources: {found}" if found else "drafts from earlier text that were accepted"


def print_legend() -> None:
    """Print the meaning of each colour on stderr."""
    console = err()
    for source, meaning in MEANINGS.items():
        console.print(Text.assemble(("■ ", STYLES[source]), (f"{source:<10}", STYLES[source]), meaning))


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
