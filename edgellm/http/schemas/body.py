"""The JSON of requests: limits that are checked before it is parsed, and threads in which it is read.

A body of a few megabytes has room for millions of values, which take seconds to parse and to check, while no other
request is answered. Few values take little time, whatever is in them.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from edgellm.http.schemas.errors import ApiError, invalid_request, is_json

MAX_VALUES = 2**18  # values such as token ids of texts to embed
MAX_NODES = 2**15  # lists, objects and members of objects, which cost far more than numbers
MAX_DEPTH = 128  # lists and objects within each other
_MARKS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[][{}:,]', re.DOTALL)  # texts, closed or not, and what is between values
_READERS = ThreadPoolExecutor(2, thread_name_prefix="edgellm-bodies")  # more threads would starve the event loop
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_LONE = re.compile(r"\\(?:\\|u(?i:d[89ab][0-9a-f]{2})\\u(?i:d[c-f][0-9a-f]{2})|(u(?i:d[89a-f][0-9a-f]{2})))")
"""An escaped backslash, a whole surrogate pair, or, as its group, half of one: JavaScript cuts texts in the middle."""


async def in_reader(call: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
    """Return the result of `call`, run beside the event loop, as its time may depend on a body's size."""
    return await asyncio.get_running_loop().run_in_executor(_READERS, call, *args)


def check_json(data: bytes) -> None:
    """Raise ApiError where JSON has too many values (413), or is too deep (400). What is no JSON may pass."""
    values = nodes = depth = 0
    for mark in _MARKS.finditer(data):
        match data[mark.start()]:
            case 0x5B | 0x7B:  # [ and {
                nodes, depth = nodes + 1, depth + 1
            case 0x5D | 0x7D:  # ] and }
                depth -= 1
            case 0x3A:  # :
                nodes += 1
            case 0x2C:  # ,
                values += 1
        if depth > MAX_DEPTH:
            raise invalid_request(f"The JSON has more than {MAX_DEPTH} lists and objects within each other.")
        if nodes > MAX_NODES:
            raise _too_large(f"more than {MAX_NODES} lists, objects and members of objects")
        if values > MAX_VALUES:
            raise _too_large(f"more than {MAX_VALUES} values")


def json_text(given: _T) -> _T:
    """Return `given`; check a text of JSON, which is parsed later, as `check_json` does."""
    if isinstance(given, str):
        check_json(given.encode("utf-8", "surrogatepass"))
    return given


def _too_large(what: str) -> ApiError:
    return ApiError(413, f"The JSON has {what}. Shorten it.", code="request_too_large")


class BodyRoute(APIRoute):
    """A route whose body is parsed and checked in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle

        def read(data: bytes) -> Any:
            """Return a body as the route's handler takes it."""
            check_json(data)
            try:
                text = data.decode("utf-8-sig")  # json could guess another encoding than was counted
                found = json.loads(_LONE.sub(lambda match: r"\ufffd" if match[1] else match[0], text))
            except json.JSONDecodeError as error:
                raise invalid_request(f"The body is not JSON: {error.msg} at character {error.pos}.") from error
            except (ValueError, RecursionError) as error:
                raise invalid_request("The body cannot be read as JSON. Send a JSON object in UTF-8.") from error
            value, errors = field.validate(found, {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors)
            return value

        async def read_first(request: Request) -> Response:
            if not is_json(request) or not (data := await request.body()):
                return await handle(request)
            return await handle(_ReadRequest(request, data, await in_reader(read, data)))

        return read_first


class _ReadRequest(Request):
    """A request whose body was read."""

    def __init__(self, request: Request, data: bytes, value: Any) -> None:
        headers = [(name, value) for name, value in request.scope["headers"] if name.lower() != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        super().__init__({**request.scope, "headers": headers}, request.receive)
        self._data, self._value = data, value

    async def body(self) -> bytes:
        return self._data

    async def json(self) -> Any:
        return self._value
