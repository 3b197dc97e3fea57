"""Stream replies of `edgellm serve` to one client and to several at once, beside llama-server's.

ASKED is Spec-Bench's file of questions, or a part of it; only first turns are asked, greedily. Three servers of the
same verifier run side by side, each in a process of its own: edgellm with the draft model (*default*) and without
(*alone*), and llama-server of the same llama.cpp with as many slots as clients. By turns, each of them answers one
client, and then all clients at once, each of which asks its own questions one after another. *first* is the median time
from a request to its first word, in milliseconds; *tokens/s* are all tokens of all clients over the time from the first
request to the last token; both are medians over the rounds, in brackets the extremes.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import of_each, questions
from bench.real.speed import N_CTX, llama_server, prebuilt
from edgellm.storage.model_files import resolve
from testkit.processes.http_server import serving


def asked_by(url: str, texts: Sequence[str], tokens: int) -> list[tuple[float, int]]:
    """Ask for replies one after another; return the seconds to the first word and the tokens of each."""
    found = []
    for text in texts:
        body = {
            "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "cache_prompt": False,
        }  # fmt: skip
        request = Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        began, first, last = time.perf_counter(), 0.0, b""
        with urlopen(request, timeout=600.0) as answer:
            for line in answer:
                if not first and b'"content":"' in line and b'"content":""' not in line:
                    first = time.perf_counter() - began
                last = line if b'"usage":{' in line else last
        found.append((first, json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]))
    return found


def loaded(url: str, texts: Sequence[Sequence[str]], tokens: int) -> dict[str, float]:
    """Return the figures of one client for each of `texts`, all at once."""
    with ThreadPoolExecutor(len(texts)) as clients:
        began = time.perf_counter()
        found = [one for some in clients.map(lambda own: asked_by(url, own, tokens), texts) for one in some]
        taken = time.perf_counter() - began
    total = sum(one[1] for one in found)
    return {"first": 1e3 * statistics.median(one[0] for one in found), "speed": total / taken, "tokens": total}


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    verifier: str = "smollm2:135m",
    draft: str = "smollm2:draft",
    clients: int = 8,
    per: Annotated[int, "questions of each client in a round"] = 3,
    rounds: int = 5,
    tokens: Annotated[int, "of a reply, at most"] = 64,
    threads: int = 2,
    server: Annotated[Path | None, "llama-server; without it that of the prebuilt llama.cpp"] = None,
) -> Iterator[Figures]:
    """Yield the figures after each round."""
    texts = [one.text for one in of_each(questions(asked), clients * per * rounds)]
    count, model = str(threads), resolve(verifier)
    rows: list[dict[str, dict[str, float]]] = []
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shared = ("--verifier", str(model), "--threads", count, "--replies", str(clients), "--ctx-size", str(N_CTX))
        slots = ("-np", str(clients), "-c", str(clients * N_CTX))
        urls = {
            "default": stack.enter_context(serving(home / "a", *shared, "--draft", str(resolve(draft))))[1],
            "alone": stack.enter_context(serving(home / "b", *shared, "--draft", "none"))[1],
            "llama-server": stack.enter_context(llama_server(server or prebuilt(), model, threads, slots)),
        }
        for url in urls.values():
            loaded(url, [[text] for text in texts[-clients:]], 8)
            time.sleep(3.0)  # edgellm measures its decodes once nobody asks
        for number in track(range(rounds), "rounds"):
            own = [texts[at :: clients * rounds][:per] for at in range(number * clients, (number + 1) * clients)]
            names = [*urls][number % len(urls) :] + [*urls][: number % len(urls)]
            rows.append({f"{n} {name}": loaded(urls[name], own[:n], tokens) for n in (1, clients) for name in names})
            yield {"clients": clients, "ways": [*urls], "rows": rows}


def table(figures: Mapping[str, Any]) -> str:
    """Return a row for each server and number of clients."""
    lines = [f"{'':24}{'first':>8}{'':16}{'tokens/s':>8}"]
    for n in (1, figures["clients"]):
        for way in figures["ways"]:
            line = f"{f'{n} ' + ('client' if n == 1 else 'clients') + ', ' + way:24}"
            for name in ("first", "speed"):
                values = [row[f"{n} {way}"][name] for row in figures["rows"]]
                line += f"{statistics.median(values):8.0f} {f'({min(values):.0f} to {max(values):.0f})':15}"
            lines.append(line.rstrip())
    return "\n".join(lines) + "\n"
