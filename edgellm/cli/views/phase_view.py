"""A reply in phases: what is where from which token on, why, and what staying would take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgellm.cli.views.console import one_line
from edgellm.coldstart.phases.model import Move, PhaseProblem
from edgellm.coldstart.phases.search import LONGEST, PhasePlan
from edgellm.coldstart.plan import format_seconds
from edgellm.coldstart.problem import Cut, per_token
from edgellm.layer_range import LayerRange


def phase_lines(found: PhasePlan, problem: PhaseProblem, names: Sequence[str]) -> list[str]:
    """Return the phases of a reply in lines, then the reason for moving or for staying. `names` of the devices."""
    reply, token = found.reply, format_seconds(per_token(problem.task, found.reply.start))
    first = f"first token after {format_seconds(reply.ttft)}, then {token} each"
    lines = [
        f"phases of a reply of {problem.tokens_out} tokens:",
        f"  from token 1, {_named(reply.start, names)}: {first}",
        *(f"  {_move_line(move, problem, names)}" for move in reply.made),
    ]
    lines.append(f"  last token after {format_seconds(reply.seconds)}. {reason(found, problem, names)}")
    return lines


def _move_line(move: Move, problem: PhaseProblem, names: Sequence[str]) -> str:
    token = format_seconds(per_token(problem.task, move.cut))
    loads = ", ".join(f"{one_line(names[device])} {format_seconds(took)}" for device, took in move.loads.items())
    behind = f"loaded behind the reply ({loads}) by {format_seconds(move.loaded)}" if loads else "nothing to load"
    cache = "its cache is sent" if move.cache == "sent" else "the text is read again there"
    return (
        f"from token {move.token + 1}, {_named(move.cut, names)}: after {format_seconds(move.seconds)}, {token} each;"
        f" {behind}, and {cache} by {format_seconds(move.ready)}; the move costs {format_seconds(move.pause)}"
    )


def reason(found: PhasePlan, problem: PhaseProblem, names: Sequence[str]) -> str:
    """Return why the reply moves, or why it stays where it begins."""
    stay, whole = found.unmoved, format_seconds(found.unmoved.seconds)
    if found.moves:
        pays = "" if found.pays_from is None else f" Moving pays from {found.pays_from} tokens on."
        return f"Without a move {whole} at best ({found.saved:.0%} less now), on {_named(stay.start, names)}.{pays}"
    if found.moving is None:
        narrow = per_token(problem.task, found.narrow.start)
        if per_token(problem.task, stay.start) <= narrow * (1.0 + 1e-9):
            return "It stays: no other placement writes sooner."
        return "It stays: the devices have no room for a second placement beside the first."
    to = _named(found.moving.moves[-1].cut, names)
    if not found.moving.made:
        return f"It stays: the reply is over before {to} could take over.{_later(found)}"
    took = format_seconds(found.moving.seconds)
    way = f"from {_named(found.moving.start, names)} to {to}"
    if found.moving.seconds < stay.seconds:
        return f"It stays: a move {way} would save too little to be sure of it ({took} instead of {whole})."
    return f"It stays: with a move {way}, the last token would come after {took}.{_later(found)}"


def _later(found: PhasePlan) -> str:
    if found.pays_from is None:
        return f" Up to {LONGEST} tokens moving does not pay."
    return f" Moving pays from {found.pays_from} tokens on."


def _ranges(cut: Cut, names: Sequence[str]) -> Iterator[tuple[str, LayerRange]]:
    first = 0
    for device, count in cut:
        yield names[device], LayerRange(first, first + count)
        first += count


def _named(cut: Cut, names: Sequence[str]) -> str:
    if len(cut) == 1:
        return f"{one_line(names[cut[0][0]])} alone"
    return ", ".join(f"{one_line(name)} {layers}" for name, layers in _ranges(cut, names))
