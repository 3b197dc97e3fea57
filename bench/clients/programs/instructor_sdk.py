"""instructor, over the OpenAI client."""

import instructor
import openai
from common import CALLER, CALLER_URL, MODEL, QUESTION, URL, WEATHER, Plan, check, run
from pydantic import BaseModel


class Anything(BaseModel):
    """Any object: the bundled pair does not read the schema in the prompt."""

    model_config = {"extra": "allow"}


def made(mode, url, model, text, kind=Plan):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0), mode=mode)
    asked = [{"role": "user", "content": text}]
    found = client.chat.completions.create(
        model=model, messages=asked, response_model=kind, max_retries=0, max_tokens=300
    )
    check(isinstance(found, kind), found)


def tools():
    """mode TOOLS"""
    made(instructor.Mode.TOOLS, CALLER_URL, CALLER, WEATHER)


def json_schema():
    """mode JSON_SCHEMA"""
    made(instructor.Mode.JSON_SCHEMA, URL, MODEL, QUESTION)


def json_object():
    """mode JSON (any object)"""
    made(instructor.Mode.JSON, URL, MODEL, QUESTION, Anything)


run(tools, json_schema, json_object)
