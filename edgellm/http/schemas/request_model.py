"""The base of requests: checks of fields, and fields that several APIs share.

A parameter that is null counts as left out. Unknown ones are accepted and named in the response, as clients send more
than any server knows; a strict server refuses them. Parameters that would change the text and are not supported are
accepted only with a value that changes nothing. A limit such as -1 means no limit.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from edgellm.http.schemas.errors import invalid_request
from edgellm.spec.params import MAX_PENALTY, MAX_STOP_LENGTH, MAX_STOPS, MIN_REPEAT

MAX_TOKENS = 2**20
MAX_TEXT = 2**22
_MAX_TEMPERATURE = 100.0  # all tokens are nearly alike
_LEAST_SHARE = 1e-9  # least `top_p`, which leaves one token

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "functions": (), "function_call": ("none", "auto"), "modalities": (["text"],), "echo": (),
    "suffix": (), "response_format": ({"type": "text"},), "format": ("text",), "output_format": (), "json_schema": (),
    "guided_json": (), "structured_outputs": (), "structural_tag": (), "grammar": (), "grammar_string": (),
    "guided_grammar": (), "ebnf": (), "regex": (), "regex_pattern": (), "guided_regex": (), "guided_choice": (),
}  # fmt: skip
"""Parameters of other APIs and servers that would change the text, unsupported where they have no field, each with its
values, besides empty ones, that change nothing."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _most_tokens(value: Any) -> Any:
    value = _whole(value)
    return MAX_TOKENS if type(value) is int and (value < 0 or value > MAX_TOKENS) else value


def _nearest(least: float, most: float) -> BeforeValidator:
    """Return a validator that takes the nearest number of a range."""
    return BeforeValidator(lambda value: min(max(value, least), most) if _is_number(value) else value)


def _off_at_zero(value: Any) -> Any:
    return 1.0 if _is_number(value) and value <= 0 else value


def _without_empty(value: Any) -> Any:
    """Return texts without empty ones, None for none."""
    if isinstance(value, list) and len(value) <= MAX_STOPS:
        return [one for one in value if one != ""] or None
    return None if value == "" else value


Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which some clients write as 4.0."""
MostTokens = Annotated[int, BeforeValidator(_most_tokens), Field(ge=1)]
"""The longest reply in tokens: -1, or more than any context, means as many as fit."""
Temperature = Annotated[float, Field(ge=0.0, le=_MAX_TEMPERATURE)]
TopP = Annotated[float, _nearest(_LEAST_SHARE, 1.0), Field(gt=0.0, le=1.0)]
TopK = Annotated[int, _nearest(0, MAX_TOKENS), BeforeValidator(_whole), Field(ge=0, le=MAX_TOKENS)]
MinP = Annotated[float, _nearest(0.0, 1.0), Field(ge=0.0, le=1.0)]
Repeat = Annotated[
    float, _nearest(MIN_REPEAT, MAX_PENALTY), BeforeValidator(_off_at_zero), Field(ge=MIN_REPEAT, le=MAX_PENALTY)
]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Seed = Annotated[Whole, Field(ge=-(2**63), le=2**64 - 1)]
StopText = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None, BeforeValidator(_without_empty)
]


MAX_ITEMS = 1_000  # tools of a request, or parts of a text: agents with several servers of tools send hundreds
Types: TypeAlias = Mapping[str, Collection[str]]
"""Fields that hold data of several types, each with the types that are read."""


def _tell_first_fault(schema: Any) -> None:
    """Check a list only up to its first fault, and an object with a limit only within that limit: reporting a million
    faults takes minutes."""
    if isinstance(schema, list):
        for part in schema:
            _tell_first_fault(part)
    if not isinstance(schema, dict):
        return
    for part in schema.values():
        _tell_first_fault(part)
    if schema.get("type") == "list":
        schema["fail_fast"] = True
    if schema.get("type") == "dict" and (most := schema.get("max_length")) is not None:
        limited = core_schema.no_info_before_validator_function(partial(_check_length, most), {**schema})
        schema.clear()
        schema.update(limited)


def _check_length(most: int, value: Any) -> Any:
    if isinstance(value, dict) and len(value) > most:
        raise PydanticCustomError("too_long", "at most {max_length}", {"max_length": most})
    return value


class RequestModel(BaseModel):
    """Data from a client. Unknown fields are kept apart, null counts as left out, and a list tells its first fault."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    _types: ClassVar[Types] = {}  # data of other types is left out, and named as unknown fields are

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _tell_first_fault(schema)
        return schema

    def unknown(self, path: str = "") -> Iterator[str]:
        """Yield the paths of unknown fields, here and within."""
        yield from (path + name for name in self.model_extra or ())
        for name in self.model_fields_set & set(type(self).model_fields):
            value = getattr(self, name)
            if isinstance(value, RequestModel):
                yield from value.unknown(f"{path}{name}.")
            for number, item in enumerate(value if isinstance(value, list) else ()):
                if isinstance(item, RequestModel):
                    yield from item.unknown(f"{path}{name}.{number}.")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        if isinstance(role := given.get("role"), str):  # some clients write roles in capitals
            given["role"] = role.lower()
        return cls._without_other_types(given)

    @classmethod
    def _without_other_types(cls, data: dict[str, Any]) -> dict[str, Any]:
        for field, known in cls._types.items():
            given: Any = data.get(field)
            if isinstance(given, list) and len(given) > MAX_ITEMS:
                continue  # the field's own limit refuses it
            parts = (
                [(f"{field}.{number}", part) for number, part in enumerate(given)]
                if isinstance(given, list)
                else [(field, given)]
            )
            if others := {f"{place}.{part['type']}": True for place, part in parts if _has_other_type(part, known)}:
                kept = {field: [part for _, part in parts if not _has_other_type(part, known)]}
                data = {name: value for name, value in data.items() if name != field} | others
                data |= kept if isinstance(given, list) else {}
        return data


def _has_other_type(data: object, known: Collection[str]) -> bool:
    kind = data.get("type") if isinstance(data, dict) else None
    return isinstance(kind, str) and kind not in known


class ReplyRequest(RequestModel):
    """The parameters that requests for a reply have in every API."""

    model: str | None = Field(None, max_length=500, description="The name from /v1/models; may be left out.")
    require_verified: bool = Field(
        False, description="End with an error instead of a token that the verifier has not checked. Our extension."
    )

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in [name for name in data if name in NEUTRAL and name not in cls.model_fields]:
            if data[name] and not any(type(data[name]) is type(one) and data[name] == one for one in _neutral(name)):
                shown = reprlib.repr(data[name])
                raise invalid_request(f"{name} is {shown}, which is not supported here. Leave {name} out.", name)
        return {name: value for name, value in data.items() if name not in NEUTRAL or name in cls.model_fields}


def _neutral(name: str) -> tuple[Any, ...]:
    """Return the neutral values of a parameter, numbers as int and as float."""
    known = NEUTRAL[name]
    return (*known, *(float(one) for one in known if type(one) is int))
