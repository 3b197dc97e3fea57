"""Anthropic's client for Python."""

import anthropic
from common import ANSWER, CALLER, CALLER_URL, CITY, DAY, MODEL, QUESTION, RAIN, URL, WEATHER, check, run

client = anthropic.Anthropic(base_url=URL, api_key="-", max_retries=0)
caller = anthropic.Anthropic(base_url=CALLER_URL, api_key="-", max_retries=0)
ASKED = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": QUESTION}]}
TOOL = {"name": "get_weather", "input_schema": CITY}


def message():
    """message"""
    check(ANSWER in client.messages.create(**ASKED, system="You are at home.").content[0].text)


def stream():
    """stream"""
    with client.messages.stream(**ASKED) as events:
        check(ANSWER in "".join(events.text_stream))


def count():
    """count_tokens"""
    check(client.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens > 5)


def tools():
    """tools, with the result sent back"""
    turns = [{"role": "user", "content": WEATHER}]
    asked = {"model": CALLER, "max_tokens": 200, "tools": [TOOL]}
    first = caller.messages.create(**asked, messages=turns)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    check("city" in call.input, call)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    check(caller.messages.create(**asked, messages=turns).content[0].text == RAIN)


def tools_stream():
    """tools in a stream"""
    asked = {"model": CALLER, "max_tokens": 200, "tools": [TOOL], "messages": [{"role": "user", "content": WEATHER}]}
    with caller.messages.stream(**asked) as events:
        check(events.get_final_message().stop_reason == "tool_use")


def schema():
    """structured output (output_config)"""
    form = {"format": {"type": "json_schema", "schema": DAY}}
    check("day" in client.messages.create(**ASKED, output_config=form).content[0].text)


run(message, stream, count, tools, tools_stream, schema)
