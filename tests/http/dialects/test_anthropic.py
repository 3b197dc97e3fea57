"""Anthropic's Messages API, by its own client: imported by the tests alone, as that takes two seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from tests.http.conftest import QUESTION, Ask, serving

if TYPE_CHECKING:
    import anthropic

KEY = "k" * 43
ASKED: Any = {"model": "edgellm-verifier", "messages": [{"role": "user", "content": QUESTION}]}

Connect: TypeAlias = Callable[..., "anthropic.Anthropic"]


@pytest.fixture(scope="module")
def connect() -> Iterator[Connect]:
    """Clients of a server, which are closed in the end."""
    import anthropic

    with ExitStack() as closing:

        def made(server: HttpServer, key: str = "none is needed") -> anthropic.Anthropic:
            return closing.enter_context(anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0))

        yield made


def test_events_have_their_names_and_say_how_much_was_verified(ask: Ask) -> None:
    body = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 3, "stream": True}).body.decode()
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in body.strip().split("\n\n")]
    data = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [one["type"] for one in data]
    assert [one["type"] for one in data if one["type"] != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert data[-2]["edgellm"]["summary"]["share_verified"] == 1.0


def test_system_prompts_stop_sequences_and_blocks(connect: Connect, server: HttpServer, ask: Ask) -> None:
    client, parts = connect(server), QUESTION.partition("\n\n")
    blocks: Any = [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in parts]
    stopped = client.messages.create(
        model="edgellm-verifier", max_tokens=40, messages=[{"role": "user", "content": blocks}],
        stop_sequences=[" is"],
    )  # fmt: skip
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    system: Any = [{"type": "text", "text": "You are at home."}]
    counted = [
        client.messages.count_tokens(**ASKED, system=one).input_tokens for one in ("", "You are at home.", system)
    ]
    assert counted[0] < counted[1] == counted[2]
    raw = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 1, "service_tier": "auto", "system": system})
    assert raw.headers["x-edgellm-ignored"] == "service_tier"
    assert raw.headers["x-edgellm-verified"] == "1.0000"
    usage = raw.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted[1]


def test_errors_are_the_clients_own_exceptions(connect: Connect, server: HttpServer, own: LLM) -> None:
    import anthropic

    client = connect(server)
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(**{**ASKED, "model": "claude"}, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
        client.messages.create(**ASKED, max_tokens=0)
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="read only text"):
        client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    with serving(own, "edgellm-verifier", key=KEY) as locked:
        with pytest.raises(anthropic.AuthenticationError, match="The API key is missing or wrong"):
            connect(locked, "wrong").messages.create(**ASKED, max_tokens=1)
        assert connect(locked, KEY).messages.create(**ASKED, max_tokens=1).usage.output_tokens == 1
