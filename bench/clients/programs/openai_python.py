"""The OpenAI client for Python."""

import json

import openai
from common import ANSWER, CALLER, CALLER_URL, EMBEDDER, MODEL, QUESTION, RAIN, TOOL, URL, WEATHER, Plan, check, run

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="-", max_retries=0)
caller = openai.OpenAI(base_url=f"{CALLER_URL}/v1", api_key="-", max_retries=0)
ASKED = [{"role": "user", "content": QUESTION}]
FLAT = {"type": "function", **TOOL["function"], "strict": False}


def chat():
    """chat"""
    done = client.chat.completions.create(model=MODEL, messages=ASKED)
    check(ANSWER in done.choices[0].message.content, done)


def stream():
    """stream"""
    asked = {"model": MODEL, "messages": ASKED, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    check(ANSWER in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    check(chunks[-1].usage.completion_tokens > 0)


def second_turn():
    """second turn with the message as it came"""
    first = client.chat.completions.create(model=MODEL, messages=ASKED).choices[0].message
    turns = [*ASKED, first, {"role": "user", "content": "And where?"}]
    check(client.chat.completions.create(model=MODEL, messages=turns).choices)


def parsed():
    """structured output (chat.completions.parse)"""
    done = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Plan, max_tokens=300)
    check(isinstance(done.choices[0].message.parsed, Plan), done)


def tools():
    """tools, with the result sent back"""
    turns = [{"role": "user", "content": WEATHER}]
    first = caller.chat.completions.create(model=CALLER, messages=turns, tools=[TOOL]).choices[0].message
    call = first.tool_calls[0]
    check("city" in json.loads(call.function.arguments), call)
    turns += [first, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    done = caller.chat.completions.create(model=CALLER, messages=turns, tools=[TOOL])
    check(done.choices[0].message.content == RAIN, done)


def responses():
    """Responses: continued by previous_response_id"""
    first = client.responses.create(model=MODEL, input=QUESTION)
    check(ANSWER in first.output_text, first)
    check(client.responses.create(model=MODEL, input="And where?", previous_response_id=first.id).output)


def responses_stream():
    """Responses: stream"""
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        check(ANSWER in events.get_final_response().output_text)


def responses_tools():
    """Responses: tools, with the result sent back"""
    first = caller.responses.create(model=CALLER, input=WEATHER, tools=[FLAT])
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    done = caller.responses.create(model=CALLER, input=[result], previous_response_id=first.id, tools=[FLAT])
    check(done.output_text == RAIN, done)


def responses_parsed():
    """Responses: structured output (responses.parse)"""
    done = client.responses.parse(model=MODEL, input=QUESTION, text_format=Plan, max_output_tokens=300)
    check(isinstance(done.output_parsed, Plan), done)


def embeddings():
    """embeddings"""
    found = client.embeddings.create(model=EMBEDDER, input=["The mug is on the shelf.", "Where is my mug?"])
    check(len(found.data) == 2 and len(found.data[0].embedding) > 10)


def models():
    """models.list"""
    check(next(iter(client.models.list())).id == MODEL)


run(chat, stream, second_turn, parsed, tools, responses, responses_stream, responses_tools, responses_parsed,
    embeddings, models)  # fmt: skip
