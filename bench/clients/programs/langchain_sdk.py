"""langchain-openai."""

from common import ANSWER, CALLER, CALLER_URL, MODEL, QUESTION, RAIN, URL, WEATHER, Plan, check, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


def model(url=URL, name=MODEL, **more):
    return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="-", max_retries=0, max_tokens=300, **more)


def chat():
    """invoke and stream"""
    check(ANSWER in model().invoke(QUESTION).content)
    check(ANSWER in "".join(part.content for part in model().stream(QUESTION)))


def schema():
    """structured output (json_schema)"""
    check(isinstance(model().with_structured_output(Plan).invoke(QUESTION), Plan))


def called():
    """structured output (function_calling)"""
    caller = model(CALLER_URL, CALLER).with_structured_output(Plan, method="function_calling")
    check(isinstance(caller.invoke(WEATHER), Plan))


def tools():
    """tools, with the result sent back"""
    bound = model(CALLER_URL, CALLER).bind_tools([get_weather])
    turns = [HumanMessage(WEATHER)]
    first = bound.invoke(turns)
    call = first.tool_calls[0]
    turns += [first, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    check(bound.invoke(turns).content == RAIN)


def responses():
    """by the Responses API"""
    check(ANSWER in model(use_responses_api=True).invoke(QUESTION).text)


run(chat, schema, called, tools, responses)
