"""LlamaIndex, by its OpenAILike."""

from common import ANSWER, CALLER, CALLER_URL, MODEL, QUESTION, URL, WEATHER, Plan, check, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(url=URL, name=MODEL, **more):
    return OpenAILike(model=name, api_base=f"{url}/v1", api_key="-", is_chat_model=True, max_retries=0, **more)


def chat():
    """chat and stream_chat"""
    asked = [ChatMessage(role="user", content=QUESTION)]
    check(ANSWER in model().chat(asked).message.content)
    check(ANSWER in "".join(part.delta or "" for part in model().stream_chat(asked)))


def complete():
    """complete, without the chat template"""
    plain = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="-", is_chat_model=False, max_tokens=8)
    check(plain.complete("The film night").text)


def tools():
    """predict_and_call"""
    weather = FunctionTool.from_defaults(lambda city: f"rain in {city}", name="get_weather", description="The weather")
    caller = model(CALLER_URL, CALLER, is_function_calling_model=True)
    check("rain" in str(caller.predict_and_call([weather], WEATHER)))


def structured():
    """structured output by a tool (as_structured_llm)"""
    caller = model(CALLER_URL, CALLER, is_function_calling_model=True)
    asked = [ChatMessage(role="user", content=WEATHER)]
    check(isinstance(caller.as_structured_llm(Plan).chat(asked).raw, Plan))


run(chat, complete, tools, structured)
