"""Ollama's client for Python."""

import json

import ollama
from common import ANSWER, CALLER, CALLER_URL, DAY, EMBEDDER, MODEL, QUESTION, RAIN, URL, WEATHER, check, run

client, caller = ollama.Client(host=URL), ollama.Client(host=CALLER_URL)
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def get_weather(city: str) -> str:
    """Return the weather.

    Args:
        city: The name of a city.
    """
    return f"rain in {city}"


def chat():
    """chat"""
    check(ANSWER in client.chat(**ASKED).message.content)


def stream():
    """chat, in a stream"""
    check(ANSWER in "".join(part.message.content for part in client.chat(**ASKED, stream=True)))


def generate():
    """generate"""
    check(ANSWER in client.generate(MODEL, QUESTION).response)


def schema():
    """structured output (format)"""
    check("day" in json.loads(client.chat(**ASKED, format=DAY, options={"num_predict": 300}).message.content))


def home_assistant():
    """Home Assistant's calls"""
    for think in (None, False, "low", "high"):
        more = {"think": think, "keep_alive": -1, "options": {"num_ctx": 8192, "num_predict": 300}}
        check("day" in json.loads(client.chat(**ASKED, tools=[get_weather], format=DAY, **more).message.content))
    turns = [{"role": "system", "content": "It is 12:00."}, {"role": "user", "content": WEATHER}]
    turns += [caller.chat(CALLER, turns, tools=[get_weather], keep_alive=-1).message]
    turns += [{"role": "tool", "content": json.dumps({"data": "rain", "error": None})}]
    check(caller.chat(CALLER, turns, tools=[get_weather]).message.content == RAIN)


def tools():
    """tools from Python functions, with the result sent back"""
    turns = [{"role": "user", "content": WEATHER}]
    first = caller.chat(CALLER, turns, tools=[get_weather]).message
    call = first.tool_calls[0].function
    turns += [first, {"role": "tool", "tool_name": call.name, "content": get_weather(**call.arguments)}]
    check(caller.chat(CALLER, turns, tools=[get_weather]).message.content == RAIN)


def embed():
    """embed"""
    check(len(client.embed(EMBEDDER, ["The mug is on the shelf.", "Where is my mug?"]).embeddings) == 2)


def models():
    """list, show and ps"""
    listed = client.list().models[0]
    check(client.show(listed.model).capabilities)
    check(client.ps().models[0].model == listed.model)


run(chat, stream, generate, schema, tools, home_assistant, embed, models)
