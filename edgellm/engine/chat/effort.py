"""How much a model shall think: what clients ask of every model, as a chat template knows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgellm.engine.chat.prompt import ChatTemplate

EFFORT = "reasoning_effort"
_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_USUAL = ("low", "medium", "high")  # templates that write the level out do not name those that they know
_OFF = ("none", "minimal")
_SWITCHES = ("enable_thinking", "thinking")


def fitting(
    arguments: Mapping[str, object], template: ChatTemplate, thinks: bool
) -> tuple[dict[str, object], bool | None, list[str]]:
    """Return which of the `arguments` a template reads, with the nearest level of effort that it takes; whether the
    model, which `thinks` at all, shall think by the others, None where they do not say; and the names of those that
    have no effect, or another one than they ask for."""
    known = template.arguments()
    kept, think, left_out = dict[str, object](), None, list[str]()
    for name, value in arguments.items():
        if name == EFFORT and value in _LEVELS:
            level = _nearest(str(value), template) if EFFORT in known else None
            if level is not None:
                kept[name] = level
            elif value in _OFF:
                think = False
            elif thinks:
                think = True
            if level != value and not (value in _OFF and think is False):
                left_out.append(name)
        elif name in known and template.takes({name: value}):
            kept[name] = value
        elif name in _SWITCHES and isinstance(value, bool) and (thinks or not value):
            think = value
        else:
            left_out.append(name)
    return kept, think, left_out


def _nearest(asked: str, template: ChatTemplate) -> str | None:
    """Return the level next to the one `asked` for, the lower of two, that the template takes; None where no thought is
    asked for, and it has no such level, or takes none."""
    named = [level for level in _LEVELS if level in _USUAL or template.names(level)]
    if asked == "none" and asked not in named:
        return None
    place = _LEVELS.index(asked)
    nearest: Iterable[str] = sorted(named, key=lambda level: abs(_LEVELS.index(level) - place))
    return next((level for level in nearest if template.takes({EFFORT: level})), None)
