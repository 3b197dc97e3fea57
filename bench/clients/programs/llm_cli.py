"""llm, the command line of Simon Willison, with a model in its extra-openai-models.yaml."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from common import ANSWER, CALLER, CALLER_URL, DAY, MODEL, QUESTION, URL, WEATHER, check, run

folder = Path(tempfile.mkdtemp())
entry = "- model_id: {0}\n  model_name: {0}\n  api_base: {1}/v1\n  supports_schema: true\n  supports_tools: true\n"
(folder / "extra-openai-models.yaml").write_text(entry.format(MODEL, URL) + entry.format(CALLER, CALLER_URL))
(folder / "tools.py").write_text("def get_weather(city: str) -> str:\n    return 'rain'\n")


def llm(*words):
    environment = {**os.environ, "LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "-"}
    done = subprocess.run(["llm", *words], capture_output=True, text=True, check=False, env=environment)
    check(done.returncode == 0, done.stderr[-200:])
    return done.stdout


def prompt():
    """prompt, streamed"""
    check(ANSWER in llm("-m", MODEL, QUESTION))


def continued():
    """second turn (-c)"""
    check(llm("-m", MODEL, "-c", "And where?").strip())


def schema():
    """schema (--schema)"""
    check(json.loads(llm("-m", MODEL, "--schema", json.dumps(DAY), QUESTION))["day"] in ("Monday", "Friday"))


def tools():
    """tools (--functions)"""
    check("It rains." in llm("-m", CALLER, "--functions", str(folder / "tools.py"), WEATHER))


run(prompt, continued, schema, tools)
