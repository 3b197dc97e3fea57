"""The base of requests: checks of fields, and fields that several APIs share.

A parameter that is null counts as left out. Unknown ones are accepted and named in the response, as clients send more
than any server knows; a strict server refuses them. Parameters that would change the text and are not supported are
accepted only with a value that changes nothing. A limit such as -1 means no limit.
"""

import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, JsonValue, model_validator
from pydantic_core import CoreSchema

from edgellm.http.schemas.errors import invalid_request
from edgellm.spec.params import MAX_BIAS, MAX_STOP_LENGTH, MAX_STOPS, MIN_REPEAT

MAX_TOKENS = 2**20

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "functions": (), "function_call": ("none", "auto"), "modalities": (["text"],), "echo": (),
    "suffix": (), "response_format": ({"type": "text"},), "format": ("text",), "output_format": (), "json_schema": (),
    "guided_json": (), "structured_outputs": (), "structural_tag": (), "grammar": (), "grammar_string": (),
    "guided_grammar": (), "ebnf": (), "regex": (), "regex_pattern": (), "guided_regex": (), "guided_choice": (),
    "template": (), "context": (), "background": (), "conversation": (),
}  # fmt: skip
"""Parameters of other APIs and servers that would change the text, unsupported where they have no field, each with its
values, besides empty ones, that change nothing."""


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _most_tokens(value: Any) -> Any:
    value = _whole(value)
    return MAX_TOKENS if type(value) is int and (value < 0 or value > MAX_TOKENS) else value


def _if_number(change: Callable[[float], float]) -> BeforeValidator:
    """Return a validator that changes numbers."""
    return BeforeValidator(lambda value: change(value) if type(value) in (int, float) else value)


def _nearest(least: float, most: float) -> BeforeValidator:
    """Return a validator that takes the nearest number of a range."""
    return _if_number(lambda value: min(max(value, least), most))


def _without_empty(value: Any) -> Any:
    """Return texts without empty ones, None for none."""
    if isinstance(value, list):
        return [one for one in value if one != ""] or None
    return None if value == "" else value


Schema = dict[str, JsonValue]
Whole = Annotated[int, BeforeValidator(_whole)]
"""A whole number, which some clients write as 4.0."""
MostTokens = Annotated[int, BeforeValidator(_most_tokens), Field(ge=1)]
"""The longest reply in tokens: -1, or more than any context, means as many as fit."""
Penalty = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Repeat = Annotated[
    float, _nearest(MIN_REPEAT, MAX_BIAS), _if_number(lambda value: 1.0 if value <= 0 else value),
    Field(ge=MIN_REPEAT, le=MAX_BIAS),
]  # fmt: skip
Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stops = Annotated[Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None, BeforeValidator(_without_empty)]
KeepAlive = float | Annotated[str, Field(max_length=40)] | None
"""Time that the model stays in memory after a request: 5m, 300, -1 for ever, 0 not at all."""


Types: TypeAlias = Mapping[str, Collection[str]]
"""Fields that hold data of several types, each with the types that are read."""


def _tell_first_fault(schema: Any) -> None:
    """Check lists up to the first fault: reporting a million takes minutes."""
    parts = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    for part in parts:
        _tell_first_fault(part)
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True


class RequestModel(BaseModel):
    """Data from a client. Unknown fields are kept apart, null counts as left out, and a list tells its first fault."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    _types: ClassVar[Types] = {}  # data of other types is left out, and named as unknown fields are
    _accepted: ClassVar[Collection[str]] = ()  # fields that are neither used nor named as unknown

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _tell_first_fault(schema)
        return schema

    def unknown(self, path: str = "") -> Iterator[str]:
        """Yield the paths of unknown fields, here and within."""
        yield from (path + name for name in self.model_extra or () if name not in self._accepted)
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
            several = isinstance(given, list)
            kinds = [part.get("type") if isinstance(part, dict) else None for part in (given if several else [given])]
            other = [isinstance(kind, str) and kind not in known for kind in kinds]
            if any(other):
                data = {name: value for name, value in data.items() if name != field}
                places = [f"{field}.{number}" if several else field for number in range(len(kinds))]
                data |= {f"{places[n]}.{kinds[n]}": True for n in range(len(kinds)) if other[n]}
                if several:
                    data[field] = [part for part, is_other in zip(given, other, strict=True) if not is_other]
        return data


class SamplingFields(RequestModel):
    """The parameters of sampling in every API. Null: as the model wants; /status says how."""

    temperature: float | None = Field(None, ge=0.0, description="0 is greedy: always the likeliest token.")
    top_p: Annotated[float, _nearest(sys.float_info.min, 1.0), Field(gt=0.0, le=1.0)] | None = Field(
        None, description="Sample from the likeliest tokens with this total share; 0: the likeliest."
    )
    top_k: Annotated[int, _nearest(0, MAX_TOKENS), BeforeValidator(_whole), Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="Sample from this many of the likeliest tokens; 0 and below: all."
    )
    min_p: Annotated[float, _nearest(0.0, 1.0), Field(ge=0.0, le=1.0)] | None = Field(
        None, description="Least probability, as a share of the likeliest token's."
    )
    repeat_penalty: Repeat | None = Field(
        None, description="Above 1: repeat the last 64 tokens less, as in llama.cpp; 0 and 1: off."
    )
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(
        None, description="Repeats a sampled reply; null and -1: a new one for each."
    )
    stop: Stops = Field(None, description="The reply ends before the first of these texts.")

    def sampling(self) -> dict[str, Any]:
        """Return the parameters of sampling."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


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
        for name in data.keys() & NEUTRAL.keys() - cls.model_fields.keys():
            value, neutral = data[name], (*NEUTRAL[name], *(float(one) for one in NEUTRAL[name] if type(one) is int))
            if value and not any(type(value) is type(one) and value == one for one in neutral):
                shown = reprlib.repr(value)
                raise invalid_request(f"{name} is {shown}, which is not supported here. Leave {name} out.", name)
        return {name: value for name, value in data.items() if name not in NEUTRAL or name in cls.model_fields}
