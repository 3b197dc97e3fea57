"""litellm, by three of its providers."""

import litellm
from common import ANSWER, CALLER, CALLER_URL, MODEL, QUESTION, RAIN, TOOL, URL, WEATHER, check, run

ASKED = [{"role": "user", "content": QUESTION}]
OPENAI = {"api_base": f"{URL}/v1", "api_key": "-", "num_retries": 0}


def two_turns():
    """two turns with its own message"""
    first = litellm.completion(model=f"openai/{MODEL}", messages=ASKED, **OPENAI).choices[0].message
    check(ANSWER in first.content, first)
    turns = [*ASKED, first, {"role": "user", "content": "And where?"}]
    check(litellm.completion(model=f"openai/{MODEL}", messages=turns, **OPENAI).choices[0].message.content is not None)


def stream():
    """stream"""
    parts = litellm.completion(model=f"openai/{MODEL}", messages=ASKED, stream=True, **OPENAI)
    check(ANSWER in "".join(part.choices[0].delta.content or "" for part in parts))


def tools():
    """tools, with the result sent back"""
    asked = {"model": f"openai/{CALLER}", "api_base": f"{CALLER_URL}/v1", "api_key": "-", "tools": [TOOL]}
    turns = [{"role": "user", "content": WEATHER}]
    first = litellm.completion(messages=turns, **asked).choices[0].message
    turns += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}]
    check(litellm.completion(messages=turns, **asked).choices[0].message.content == RAIN)


def anthropic():
    """as its provider anthropic"""
    done = litellm.completion(model=f"anthropic/{MODEL}", messages=ASKED, api_base=URL, api_key="-", max_tokens=200)
    check(ANSWER in done.choices[0].message.content, done)


def ollama():
    """as its provider ollama_chat"""
    done = litellm.completion(model=f"ollama_chat/{MODEL}", messages=ASKED, api_base=URL)
    check(ANSWER in done.choices[0].message.content, done)


run(two_turns, stream, tools, anthropic, ollama)
