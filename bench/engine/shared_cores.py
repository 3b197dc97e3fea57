"""Measure processes that compute on one machine at the same time: do they share its cores, or slow each other down?

    python -m bench.engine.shared_cores [--model PATH] [--draft PATH] [--repeats 4] [--seconds 2.5]

llama.cpp's threads spin while they wait for each other, so with more threads than cores one spins while the thread that
it waits for cannot run. `edgellm/engine/cores.py` keeps a table of all computing threads of a user; each process uses
its fair share of the cores, and fewer threads beside other busy programs.

Tokens each second of processes that begin at the same time: some that decode token by token and do nothing else; a chat
whose verifier is another process, drafting on while it is verified; the same beside two that decode; and one
that decodes beside other busy programs. Columns: every process for itself, and with cores shared, in
turns (median and range), with OpenMP's settings of `edgellm/engine/native.py` in both; and the ratio. Default: the
bundled pair; both may be files of `testkit.gguf.random_model`.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.harness.report import write
from bench.harness.statistics import alternate, spread
from edgellm.engine import Context, ContextSpec, Model, cores
from edgellm.llm import LLM
from edgellm.services.server.servers import serve_verifier
from edgellm.storage import resolve
from testkit.questions import questions

CACHED, POSITIONS = 64, 1024
SCENES: dict[str, tuple[str, ...]] = {
    "one decodes": ("decode",),
    "two decode": ("decode",) * 2,
    "four decode": ("decode",) * 4,
    "one decodes, one busy program": ("decode", "busy"),
    "one decodes, four busy programs": ("decode", *("busy",) * 4),
    "chat and verifier": ("chat",),
    "chat, verifier, two decode": ("chat", "decode", "decode"),
}


def tokens_of_decodes(model: Path) -> Iterator[int]:
    """Yield 1 for every token decoded, the first when everything is warm."""
    ids = (np.arange(CACHED) % 400 + 300).astype(np.int32)
    with Model.load(model) as loaded, Context(loaded, ContextSpec(n_ctx=POSITIONS)) as context:
        context.decode(ids)
        while True:
            if context.length() == POSITIONS:
                context.rollback(CACHED)
            yield int(context.decode(ids[:1])[0].argmax() >= 0)


def tokens_of_chat(draft: Path, port: int) -> Iterator[int]:
    """Yield 1 for every token of replies that the verifier at `port` of this machine checks."""
    with LLM.open(draft, f"127.0.0.1:{port}") as pair:
        for question in questions(40) * 100:
            for event in pair.reply(question.messages, max_tokens=64):
                yield int(hasattr(event, "piece"))


def play(arguments: argparse.Namespace) -> None:
    """Run one of the processes: print "ready" when warm, and after the next line count tokens for some seconds."""
    if arguments.role == "verify":
        server = serve_verifier(arguments.model, port=arguments.port, sessions=2, context=POSITIONS)
        print("ready", flush=True)
        server.wait()
        return
    if arguments.role == "busy":
        print("ready", flush=True)
        while True:
            pass
    chats = arguments.role == "chat"
    tokens = tokens_of_chat(arguments.draft, arguments.port) if chats else tokens_of_decodes(arguments.model)
    for _ in zip(range(40 if chats else 5), tokens, strict=False):  # a chat first measures the cost of decodes
        pass
    print("ready", flush=True)
    sys.stdin.readline()
    began, done = perf_counter(), 0
    while (taken := perf_counter() - began) < arguments.seconds:
        done += next(tokens)
    print(done / taken, flush=True)
    os._exit(0)


@contextmanager
def playing(role: str, arguments: argparse.Namespace, apart: bool, port: int, home: Path) -> Iterator[Any]:
    """Start another process in a role, and wait until it is ready."""
    words = ["--role", role, "--port", str(port), "--seconds", str(arguments.seconds), *["--apart"] * apart]
    models = ["--model", str(arguments.model), "--draft", str(arguments.draft)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.engine.shared_cores", *words, *models],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "EDGELLM_HOME": str(home)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"{role} did not start")
        yield process
    finally:
        process.kill()
        process.communicate()


def rates(roles: Sequence[str], arguments: argparse.Namespace, apart: bool, home: Path) -> list[float]:
    """Return the tokens a second of each process; all run together."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        if "chat" in roles:
            stack.enter_context(playing("verify", arguments, apart, port, home))
        started = [stack.enter_context(playing(role, arguments, apart, port, home)) for role in roles]
        counting = [process for role, process in zip(roles, started, strict=True) if role != "busy"]
        for process in counting:
            print("go", file=process.stdin, flush=True)
        return [float(process.stdout.readline()) for process in counting]


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return for each scene the tokens a second of each process, shared and apart, with every repetition."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.scenes:
            roles = SCENES[name]
            shared: list[list[float]] = []
            apart: list[list[float]] = []

            def run(kept: list[list[float]], alone: bool, roles: tuple[str, ...] = roles) -> float:
                kept.append(rates(roles, arguments, alone, Path(folder, str(alone))))
                return sum(kept[-1])

            alternate(arguments.repeats, lambda: run(shared, False), lambda: run(apart, True))  # noqa: B023
            found[name] = {"roles": [role for role in roles if role != "busy"], "shared": shared, "apart": apart}
            print(f"{name}: shared {shared}, apart {apart}", file=sys.stderr, flush=True)
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return the spread of the tokens a second of a process in each scene, by role, shared and apart."""
    rows: dict[str, Any] = {}
    for name, scene in found.items():
        for role in dict.fromkeys(scene["roles"]):
            places = [at for at, each in enumerate(scene["roles"]) if each == role]
            label = name if len(set(scene["roles"])) == 1 else f"{name}: {role}"
            rows[label] = {way: spread([run[at] for run in scene[way] for at in places]) for way in ("apart", "shared")}
    return rows


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each row: tokens a second of a process, median and range, apart and shared."""
    lines = [f"{'tokens a second of each':<36}{'for themselves':>24}{'shared':>24}{'ratio':>8}"]
    for label, row in results["rows"].items():
        cells = [f"{row[way]['median']:.1f} ({row[way]['min']:.1f}-{row[way]['max']:.1f})" for way in row]
        ratio = row["shared"]["median"] / row["apart"]["median"]
        lines.append(f"{label:<36}{cells[0]:>24}{cells[1]:>24}{ratio:>8.2f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="edgellm-verifier")
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--name", default="shared_cores", help="of the result file")
    for hidden in ("--role", "--port"):
        parser.add_argument(hidden, type=int if hidden == "--port" else str, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.model, arguments.draft = resolve(str(arguments.model)), resolve(str(arguments.draft))
    if arguments.role:
        nowhere = Path(os.devnull, "nowhere")
        with patch.object(cores, "FOLDER", nowhere if arguments.apart else cores.FOLDER):
            play(arguments)
        return
    found = measured(arguments)
    rows = summary(found)
    print(table({"rows": rows}), end="")
    figures = {"model": arguments.model.name, "seconds": arguments.seconds, "rows": rows, "runs": found}
    print(f"written: {write(arguments.name, 'bench.engine.shared_cores', figures)}")


if __name__ == "__main__":
    main()
