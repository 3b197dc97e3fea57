"""Calls whose values stand between tags as they are, so that they may hold these very tags.

Where the tags of a text are pairs, those within a pair are a part of its value. Otherwise a call or a value ends at the
last closing tag before the next one begins: behind an end, or, where that was forgotten, as a parameter that the
function has, on a line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from edgellm.llm.tools.json_calls import Parsed, made
from edgellm.llm.tools.loose import typed
from edgellm.llm.tools.schema import Schema, Tool

_XML = re.compile(
    r"(?P<open>(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>)|(?P<key><parameter=(?P<parameter>[^<>\n]+)>)"
    r"|(?P<end></parameter>)|(?P<close></function>(?:\s*</tool_call>)?|</tool_call>)"
)
_PAIRS = re.compile(
    r"(?P<open><tool_call>\s*(?P<name>[^\s<>][^<>\n]*))|(?P<key><arg_key>(?P<parameter>.*?)</arg_key>\s*<arg_value>)"
    r"|(?P<end></arg_value>)|(?P<close></tool_call>)"
)
_Tags = Sequence[re.Match[str]]
_Piece = tuple[_Tags, int | None]
"""The tags of a call or a value from its beginning on, and the number of the one that ends it; None: nothing does."""


def xml(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """Qwen3-Coder and Qwen3.5: `<function=NAME>` around `<parameter=NAME>` and its value on lines of its own."""
    return _read(_XML, text, tools, ended, broken=True)


def pairs(text: str, tools: Mapping[str, Tool], ended: bool) -> Parsed:
    """GLM: the name, then `<arg_key>` and `<arg_value>` in turn."""
    return _read(_PAIRS, text, tools, ended, broken=False)


def _read(tags: re.Pattern[str], text: str, tools: Mapping[str, Tool], ended: bool, *, broken: bool) -> Parsed:
    """Return the calls of a text. `broken`: a line break before a value, and one behind it, belong to its tags."""
    found = list(tags.finditer(text))
    calls, beside, at = [], "", 0
    pieces = _paired(found, "open", "close")
    if pieces is None:
        starts = [n for n, tag in enumerate(found) if tag.lastgroup == "open" and _is_free(found, n)]
        pieces = _by_last(found, starts, "close")
    for number, (inside, closing) in enumerate(pieces):
        is_last = number == len(pieces) - 1
        end = len(text) if is_last else pieces[number + 1][0][0].start()
        body = end if closing is None else inside[closing].start()
        name = inside[0]["name"].strip()
        schema = Schema.of(tools.get(name))
        values = dict(_values(inside[:closing], text[:body], schema))
        complete = (values or not schema.names()) and schema.required() <= values.keys()
        if closing is None and is_last and not (ended and complete):
            continue
        written = {
            key: typed(value.removeprefix("\n").removesuffix("\n") if broken else value, schema.property(key))
            for key, value in values.items()
        }
        if (call := made(name, written)) is not None:
            calls.append(call)
            beside += text[at : inside[0].start()]
            at = end if closing is None else inside[closing].end()
    return (calls, beside + text[at:]) if calls else ([], text)


def _values(tags: _Tags, text: str, schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a call, whose `tags` begin with its own and lie in `text`, and their values."""
    pieces = _paired(tags, "key", "end")
    if pieces is None or not _follow_each_other(tags[0], pieces, text):
        starts: list[int] = []
        for number, tag in enumerate(tags):
            if tag.lastgroup == "key" and _key(tag) not in [_key(tags[one]) for one in starts]:
                between = text[tags[number - 1].end() : tag.start()]
                forgotten = _key(tag) in schema.names() and between.strip() and re.search(r"\n[ \t]*$", between)
                begins = not between.strip() and (number == 1 or _is_free(tags, number))
                starts += [number] if begins or (tags[number - 1].lastgroup == "key" and forgotten) else []
        pieces = _by_last(tags, starts, "end")
    for number, (inside, closing) in enumerate(pieces):
        end = len(text) if number == len(pieces) - 1 else pieces[number + 1][0][0].start()
        begin = inside[0].end()
        if closing is not None and not text[inside[closing].end() : end].strip():
            yield _key(inside[0]), text[begin : inside[closing].start()]
        else:
            yield _key(inside[0]), text[begin:end].rstrip("\n")


def _paired(tags: _Tags, begin: str, end: str) -> list[_Piece] | None:
    """Return the outermost pairs of tags; None where one of these lacks its other half."""
    found: list[_Piece] = []
    depth = start = 0
    for number, tag in enumerate(tags):
        if tag.lastgroup == begin:
            start = start if depth else number
            depth += 1
        elif tag.lastgroup == end:
            depth -= 1
            if not depth:
                found.append((tags[start:], number - start))
            elif depth < 0:
                return None
    return None if depth else found


def _by_last(tags: _Tags, starts: Sequence[int], end: str) -> list[_Piece]:
    """Return the pieces that begin at `starts`, each up to its last tag of the kind `end`."""
    found: list[_Piece] = []
    for start, behind in pairwise([*starts, len(tags)]):
        inside = tags[start:behind]
        ends = [number for number, tag in enumerate(inside) if tag.lastgroup == end]
        found.append((inside, ends[-1] if ends else None))
    return found


def _is_free(tags: _Tags, number: int) -> bool:
    """Return whether a tag lies in no value, as the one before it ends something."""
    return number == 0 or tags[number - 1].lastgroup in ("end", "close")


def _follow_each_other(opening: re.Match[str], pieces: Sequence[_Piece], text: str) -> bool:
    """Return whether parameters, each of another name, have nothing between them and behind them."""
    at, names = opening.end(), set()
    for inside, closing in pieces:
        if text[at : inside[0].start()].strip() or _key(inside[0]) in names:
            return False
        names.add(_key(inside[0]))
        at = inside[closing or 0].end()
    return not text[at:].strip()


def _key(tag: re.Match[str]) -> str:
    return tag["parameter"].strip()
