"""Anthropic's Messages API, by its own client: imported by the tests alone, as that takes two seconds."""

from __future__ import annotations

import json
from typing import Any

from edgellm.http.server import HttpServer
from tests.http.conftest import QUESTION, Ask

ASKED: Any = {"model": "edgellm-verifier", "messages": [{"role": "user", "content": QUESTION}]}


def test_events_have_their_names_and_say_how_much_was_verified(ask: Ask) -> None:
    body = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 3, "stream": True}).body.decode()
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in body.strip().split("\n\n")]
    data = [json.loads(event["data"]) for event in events]
    assert [event["event"] for event in events] == [one["type"] for one in data]
    assert [one["type"] for one in data if one["type"] != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert data[-2]["edgellm"]["summary"]["share_verified"] == 1.0


def test_system_prompts_stop_sequences_and_blocks(server: HttpServer, ask: Ask) -> None:
    import anthropic

    blocks: Any = [
        {"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in QUESTION.partition("\n\n")
    ]
    system: Any = [{"type": "text", "text": "You are at home."}]
    with anthropic.Anthropic(base_url=server.url, api_key="none is needed", max_retries=0) as client:
        stopped = client.messages.create(
            model="edgellm-verifier", max_tokens=40, messages=[{"role": "user", "content": blocks}],
            stop_sequences=[" is"],
        )  # fmt: skip
        counted = [
            client.messages.count_tokens(**ASKED, system=one).input_tokens for one in ("", "You are at home.", system)
        ]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert counted[0] < counted[1] == counted[2]
    raw = ask("POST", "/v1/messages", {**ASKED, "max_tokens": 1, "service_tier": "auto", "system": system})
    assert raw.headers["x-edgellm-ignored"] == "service_tier"
    assert raw.headers["x-edgellm-verified"] == "1.0000"
    usage = raw.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted[1]
