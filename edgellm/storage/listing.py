"""The hub's list of a repository's files: read with a limit on bytes and time, because anybody may run a hub."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

from edgellm.errors import PullFailed

MOST_BYTES = 16 * 2**20
MOST_SECONDS = 60.0


def read_listing(url: str, headers: Mapping[str, str], timeout: float) -> tuple[str, list[str]]:
    """Return the commit and the names of all files, except names that a terminal would not show as they are.

    Raises:
        PullFailed: the answer is no such listing, is too long, or takes too long.
        HfHubHTTPError, or another error of the hub's library for an answer with an error status.
    """
    answer = _parsed(url, _body(url, headers, timeout))
    commit, siblings = answer.get("sha"), answer.get("siblings")
    names = [one.get("rfilename") for one in siblings if isinstance(one, dict)] if isinstance(siblings, list) else []
    return (
        commit if isinstance(commit, str) else "",
        [name for name in names if isinstance(name, str) and name.isprintable()],
    )


def raise_for_status(response: Any) -> None:
    """Raise the hub's library's error for an error status, without reading a body that may have no end."""
    if response.status_code >= 400:
        from huggingface_hub.utils import hf_raise_for_status

        told = {name: value for name, value in response.headers.items() if name.lower() == "x-error-code"}
        hf_raise_for_status(type(response)(response.status_code, headers=told, request=response.request))


def _body(url: str, headers: Mapping[str, str], timeout: float) -> bytes:
    from huggingface_hub.utils import get_session

    until = time.monotonic() + MOST_SECONDS
    body = bytearray()
    asked = {**headers, "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=asked, timeout=timeout) as response:
        raise_for_status(response)
        for block in response.iter_raw():
            body += block
            if len(body) > MOST_BYTES:
                raise _senseless(url, f"more than {MOST_BYTES >> 20} MiB")
            if time.monotonic() > until:
                raise PullFailed(f"{url} takes more than {MOST_SECONDS:.0f} s to answer.", "Try again later.")
        packed = response.headers.get("Content-Encoding", "identity") != "identity"
    return _unpacked(url, bytes(body)) if packed else bytes(body)


def _unpacked(url: str, body: bytes) -> bytes:
    try:
        unpacked = zlib.decompressobj(wbits=47).decompress(body, MOST_BYTES + 1)
    except zlib.error:
        raise _senseless(url, "no JSON") from None
    if len(unpacked) > MOST_BYTES:
        raise _senseless(url, f"more than {MOST_BYTES >> 20} MiB")
    return unpacked


def _parsed(url: str, body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise _senseless(url, "no JSON of a model")
    return answer


def _senseless(url: str, what: str) -> PullFailed:
    return PullFailed(f"What {url} answers makes no sense: it is {what}.", "Check HF_ENDPOINT.")
