"""What coding agents do here: programs as they are installed, in a home folder and a network of their own.

In that network is a server of edgellm, at port 8080. Its model is a script (`tool_caller.py`): it calls the agent's
shell as often as a run wants, and then says what the last call has brought. Aider, which calls nothing, is asked as
often for a changed file. *Read* are the tokens of a prompt with which no text before begins, and *new* those that it
has more than the last prompt and its reply. `works`: the agent has ended well, all calls were answered, no request was
refused.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

from bench.clients.tool_caller import ToolCaller, call
from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Model
from edgellm.http.app import make_app
from edgellm.http.middleware import HttpConfig
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.storage.model_files import resolve
from testkit import ROOT, environment

NAME = "smollm2:135m"  # under which the script is served
LIMIT = 300.0  # seconds for one run
NOTES, ANSWER = "notes.txt", "The film night is on Friday at 20:00."
QUESTION = f"What does {NOTES} say?"
RUNS = (0, 1, 20)  # calls
PROVIDER = "openai-compatible"  # Cline's name for servers like this one


class Agent(NamedTuple):
    """A program, how it is installed, what a user writes into a file or the environment, and the command."""

    program: str
    install: str
    file: str
    text: str
    command: str
    shell: str = ""


AGENTS: Mapping[str, Agent] = {
    "Codex": Agent(
        "codex", "npm install -g @openai/codex", "~/.codex/config.toml",
        'model_provider = "edgellm"\n\n[model_providers.edgellm]\nname = "edgellm"\n'
        'base_url = "http://127.0.0.1:8080/v1"\n',
        f'codex exec --skip-git-repo-check "{QUESTION}"', "functions__exec",
    ),
    "Claude Code": Agent(
        "claude", "npm install -g @anthropic-ai/claude-code", "~/.bashrc",
        "export ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_AUTH_TOKEN=-\n",
        f'claude -p "{QUESTION}" --allowedTools Bash', "Bash",
    ),
    "OpenCode": Agent(
        "opencode", "npm install -g opencode-ai", "opencode.json",
        json.dumps({"model": f"edgellm/{NAME}", "provider": {"edgellm": {
            "npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "http://127.0.0.1:8080/v1"},
            "models": {NAME: {}},
        }}}, indent=2) + "\n",
        f'opencode run "{QUESTION}"', "bash",
    ),
    "Cline": Agent(
        "cline", "npm install -g cline", "~/.cline/data/settings/providers.json",
        json.dumps({"version": 1, "lastUsedProvider": PROVIDER, "providers": {PROVIDER: {"settings": {
            "provider": PROVIDER, "apiKey": "-", "model": NAME, "baseUrl": "http://127.0.0.1:8080/v1",
        }, "updatedAt": "2026-01-01T00:00:00.000Z"}}}, indent=2) + "\n",
        f'cline -P {PROVIDER} "{QUESTION}" 2>/dev/null', "run_commands",
    ),
    "aider": Agent(
        "aider", "pip install aider-chat", "~/.bashrc",
        "export OPENAI_API_BASE=http://127.0.0.1:8080/v1 OPENAI_API_KEY=-\n",
        f"aider --model openai/{NAME} --no-git --no-check-update --no-show-model-warnings --yes-always {NOTES}"
        " --message 'Let it be Saturday.'",
    ),
}  # fmt: skip


def talk(name: str, calls: int, folder: Path) -> dict[str, Any]:
    """Let an agent ask for `calls` calls in this process's network; return what was seen and counted."""
    agent, turns, refused = AGENTS[name], list[int](), list[str]()
    (folder / NOTES).write_text(ANSWER + "\n", encoding="utf-8")
    (file := folder / agent.file.replace("~", "home")).parent.mkdir(parents=True, exist_ok=True)
    file.write_text(agent.text, encoding="utf-8")
    command = agent.command
    if not agent.shell and calls > 1:
        (folder / "asked").write_text("".join(f"/code Let it be {n}.\n" for n in range(calls + 1)), encoding="utf-8")
        command = command.partition("--message")[0] + "--load asked"

    def says(tools: Mapping[str, Any], results: list[str]) -> str:
        if agent.shell and agent.shell not in tools:  # a title, perhaps
            return ANSWER
        turns.append(len(caller.prompts))
        if not agent.shell:
            return f"{NOTES}\n```\n{ANSWER.replace('Friday', f'Saturday {len(turns)}')}\n```\n"
        if len(results) >= calls:
            return ANSWER if not calls or ANSWER in results[-1] else "What was read is missing."
        known = tools[agent.shell]["parameters"]["properties"]
        given = {"command": f"cat {NOTES}", "description": "Read the notes",
                 "commands": [f"cat {NOTES} # {len(results)}"],  # Cline ends where a call is repeated
                 "input": f'text((await tools.exec_command({{cmd: "cat {NOTES}"}})).output)'}  # fmt: skip
        return call(agent.shell, {key: one for key, one in given.items() if key in known})

    def watched(app: Any) -> Any:
        async def serve(scope: Any, receive: Any, send: Any) -> None:
            async def watch(event: Any) -> None:
                refused.extend([f"{scope['path']}: {event.get('status')}"] * (event.get("status", 200) >= 400))
                await send(event)

            await app(scope, receive, watch)

        return serve

    with (
        patch("edgellm.http.server.make_app", lambda *given: watched(make_app(*given))),
        Model.load(resolve("edgellm-verifier")) as model,
        LLM(model, verifier=(caller := ToolCaller(model, says)), history=False) as pair,
        HttpServer(Address.parse("127.0.0.1:8080"), HttpConfig(replies=1)) as server,
    ):
        server.open(ServedModel(pair, NAME))
        done = subprocess.run(
            ["bash", "-c", f"[ ! -e ~/.bashrc ] || . ~/.bashrc; {command}"], cwd=folder, text=True, timeout=LIMIT,
            check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={"PATH": os.environ["PATH"], "HOME": f"{folder}/home"},
        )  # fmt: skip
    seen = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).replace(str(folder), "~/project")
    lines = [line.rstrip() for line in seen.splitlines()]
    return {"seen": lines, "status": done.returncode, "refused": refused, "turns": [caller.prompts[at] for at in turns]}


def row(name: str, calls: int) -> dict[str, Any]:
    """Return what one run of an agent did."""
    agent, found = AGENTS[name], dict[str, Any](agent=name, version="", calls=calls)
    if shutil.which(agent.program) is None:
        return {**found, "outcome": "skipped", "detail": f"{agent.program} is not installed: {agent.install}"}
    version = subprocess.run([agent.program, "--version"], capture_output=True, text=True, check=False).stdout
    found["version"] = next(iter(re.findall(r"\d+\.\d+\.\d+", version)), "")
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        inside = shlex.join([sys.executable, "-m", "bench.clients.agents", name, str(calls), folder])
        done = subprocess.run(
            ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc",  # ends daemons
             "sh", "-c", f"ip link set lo up && {inside}"], cwd=ROOT, text=True, check=False, capture_output=True,
            timeout=2 * LIMIT, env=environment() | {"EDGELLM_HOME": folder},
        )  # fmt: skip
    if done.returncode:
        outcome = "skipped" if done.stderr.startswith("unshare") else "fails"
        return {**found, "outcome": outcome, "detail": done.stderr.strip()[-300:]}
    said = json.loads(done.stdout)
    fine = not said["status"] and not said["refused"] and len(said["turns"]) == calls + bool(agent.shell or calls != 1)
    new = [now[0] - last[0] - last[2] for last, now in pairwise(said["turns"])]
    return {**found, **said, "outcome": "works" if fine else "fails", "detail": ", ".join(said["refused"]), "new": new}


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each run, and what a user writes and sees for each agent."""
    lines = []
    for one in found["runs"]:
        agent, turns = AGENTS[one["agent"]], one.get("turns", [])
        tokens = f"prompt {turns[0][0]:,}" if turns else one["detail"]
        tokens += f", then read {sum(turn[1] for turn in turns[1:]):,}" * bool(turns[1:])
        tokens += f", new {sum(one.get('new', ())):,}" * bool(turns[1:] and agent.shell)
        lines.append(f"{one['agent']:12}{one['version']:9}{one['outcome']:8}{one['calls']:3} calls: {tokens}")
    for one in found["runs"]:
        if one["calls"] == 1 and "seen" in one:
            agent = AGENTS[one["agent"]]
            lines += ["", f"--- {one['agent']}: {agent.install}", f"--- {agent.file}", *agent.text.splitlines()]
            lines += ["", f"$ {agent.command}", *one["seen"]]
    return "\n".join(lines) + "\n"


def measure(agents: Annotated[Sequence[str], "programs, such as codex; none for all"] = ()) -> Figures:
    """Return what each agent did."""
    chosen = [name for name, agent in AGENTS.items() if not agents or agent.program in agents]
    return {"runs": [row(name, calls) for name in track(chosen, "agents") for calls in RUNS]}


def failures(found: Figures) -> list[str]:
    """Return the runs that fail."""
    return [
        f"{one['agent']}: {one['calls']} calls: {one['detail']}" for one in found["runs"] if one["outcome"] == "fails"
    ]


if __name__ == "__main__":
    print(json.dumps(talk(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
