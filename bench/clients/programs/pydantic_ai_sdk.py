"""pydantic-ai."""

from common import ANSWER, CALLER, CALLER_URL, MODEL, QUESTION, RAIN, URL, WEATHER, Plan, check, run
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


def model(url=URL, name=MODEL, kind=OpenAIChatModel):
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="-"))


async def chat():
    """run, and run_stream"""
    agent = Agent(model())
    check(ANSWER in (await agent.run(QUESTION)).output)
    async with agent.run_stream(QUESTION) as streamed:
        check(ANSWER in await streamed.get_output())


async def native():
    """output_type by JSON schema (NativeOutput)"""
    agent = Agent(model(), output_type=NativeOutput(Plan), model_settings={"max_tokens": 300})
    check(isinstance((await agent.run(QUESTION)).output, Plan))


async def called():
    """output_type by a tool"""
    check(isinstance((await Agent(model(CALLER_URL, CALLER), output_type=Plan).run(WEATHER)).output, Plan))


async def tools():
    """tools"""
    agent = Agent(model(CALLER_URL, CALLER))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        return f"rain in {city}"

    check((await agent.run(WEATHER)).output == RAIN)


async def responses():
    """by the Responses API"""
    check(ANSWER in (await Agent(model(kind=OpenAIResponsesModel)).run(QUESTION)).output)


run(chat, native, called, tools, responses)
