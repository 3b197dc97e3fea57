"""Measure what drafting costs where no draft is ever right: replies beside plain decoding, by turns.

The verifier has random weights whose greedy text repeats nothing, so there is nothing to copy; the draft model has
other random weights, and knows nothing. The pair is opened with edgellm's own settings. Beside it the verifier alone,
without retrieval, is plain decoding. Both write the same replies to prompts of random words in one process, by turns,
and the order alternates, for SECONDS, and for twelve replies of each at least. The first replies of the pair, which
measure it, count. Halfway both are opened again in the other order, as even of two equal verifiers the one opened first
may be slower.

Doors: `here` is `LLM.reply`, as the command line and the HTTP server call it; `link` is a verifier that another process
serves on loopback, whose cache would answer the same prompt sooner the second time: there each side has a word of its
own before it. *busy* is the number of processes that compute beside. What is measured in the background between two
replies may take its time: nobody waits for it, and nothing beside it.

Columns: `whole`, plain decoding's time as a share of ours, the geometric mean over replies with its 95 % interval;
drafted tokens for each written one; and how many replies are equal: quantised weights round a pass over several rows
differently, and random text has many ties.
`by token`: as `whole`, of further replies that both write at the same time, a token each by turns, for half of
SECONDS at door `here`, and 24 at least: what disturbs the machine for longer than a token disturbs both. They too
are opened for it in both orders, and their first replies count.
The aim is an interval above 0.985.
"""

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp, log, sqrt
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Model
from edgellm.llm import LLM
from edgellm.spec.stats import Summary
from testkit.gguf import random_model
from testkit.processes.busy import busy
from testkit.processes.verifier import VerifierProcess

AIM = 0.985
LEAST = 12  # replies of each side, at least
LEAST_TOGETHER = 24  # replies of each side that are written a token each by turns, at least
SHARPNESS = 3.0
WORDS = 40
SHAPES = {
    "tiny": (random_model.SHAPES["tiny-verifier"], random_model.SHAPES["tiny-draft"], "Q8_0"),
    "0.5b": (random_model.SHAPES["qwen2.5-0.5b"], replace(random_model.SHAPES["qwen2.5-0.5b"], n_layer=4), "Q4_0"),
}
"""The verifier's shape, the draft model's, and the type of the weights."""


@dataclass(slots=True)
class Written:
    """The replies of one side: their texts, seconds and tokens, and what their summaries say."""

    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0

    def add(self, text: str, seconds: float, tokens: int, summary: Summary) -> None:
        self.texts.append(text)
        self.seconds.append(seconds)
        self.tokens.append(tokens)
        self.drafted += summary.drafted


Side = Callable[[str, int], tuple[str, float, int, Summary]]
"""Answers a prompt with so many tokens: the text, the seconds it took, its tokens, and its summary."""


def asked_here(llm: LLM, *, plain: bool) -> Side:
    """Return a side that is asked in this process."""

    def ask(prompt: str, tokens: int) -> tuple[str, float, int, Summary]:
        began = perf_counter()
        reply = llm.reply(prompt, max_tokens=tokens, retrieval="off" if plain else "auto")
        written = sum(1 for _ in reply)
        return reply.summary.text, perf_counter() - began, written, reply.summary

    return ask


def by_token(pair: LLM, alone: LLM, prompt: str, tokens: int) -> tuple[float, float]:
    """Return the seconds of the pair and of plain decoding for a reply of each, written token by token by turns."""
    replies = (
        iter(pair.reply(prompt, max_tokens=tokens)),
        iter(alone.reply(prompt, max_tokens=tokens, retrieval="off")),
    )
    seconds, open_ones, turn = [0.0, 0.0], {0, 1}, 0
    while open_ones:
        for side in sorted(open_ones, reverse=turn % 2 == 1):
            began = perf_counter()
            if next(replies[side], None) is None:
                open_ones.remove(side)
            seconds[side] += perf_counter() - began
        turn += 1
    return seconds[0], seconds[1]


@contextmanager
def both(draft: Path, verifier: Path | str, threads: int, *, pair_first: bool) -> Iterator[tuple[LLM, LLM]]:
    """Yield the pair and the verifier alone, opened in this order or the other."""
    common: dict[str, Any] = {"n_ctx": 1024, "threads": threads, "history": False}
    with ExitStack() as stack:
        opened = {}
        for pair in (pair_first, not pair_first):
            llm = (
                LLM.open(draft, verifier, **common) if pair else LLM.open(None, verifier, tokenizer=draft, **common)
            )  # fmt: skip
            opened[pair] = stack.enter_context(llm)
        yield opened[True], opened[False]


def measured(
    draft: Path, verifier: Path, prompts: Iterator[str], door: str, threads: int, tokens: int, enough: float
) -> dict[str, Any]:
    """Return the ratios of plain decoding's seconds to ours of all replies, and the rest of a row."""
    ours, plain, together = Written(), Written(), list[tuple[float, float]]()
    with ExitStack() as stack:
        at: Path | str = verifier
        if door == "link":
            process = stack.enter_context(closing(VerifierProcess(verifier, threads=threads)))
            process.wait()
            at = f"127.0.0.1:{process.port}"
        for part in (0.5, 1.0):
            with both(draft, at, threads, pair_first=part < 1.0) as (pair, alone):
                sides = asked_here(pair, plain=False), asked_here(alone, plain=True)
                while len(ours.texts) < part * LEAST or sum(ours.seconds) + sum(plain.seconds) < part * enough:
                    prompt, order = next(prompts), 1 if len(ours.texts) % 2 else -1
                    for side, written, word in ((sides[0], ours, "One"), (sides[1], plain, "Two"))[::order]:
                        written.add(*side(f"{word} {prompt}" if door == "link" else prompt, tokens))
                        pair.wait_until_measured()
                        alone.wait_until_measured()
            if door == "here":  # opened once more, as the first reply counts
                with both(draft, at, threads, pair_first=part < 1.0) as (pair, alone):
                    while len(together) < part * LEAST_TOGETHER or sum(map(sum, together)) < part * 0.5 * enough:
                        together.append(by_token(pair, alone, next(prompts), tokens))
    found = row(ours, plain, compared=door != "link")
    return found | {"by_token": ratio([one[1] for one in together], [one[0] for one in together])}


def row(ours: Written, plain: Written, *, compared: bool) -> dict[str, Any]:
    """Return the figures of a row from the replies of both sides, whose texts are `compared` if the prompts are the
    same: across a link they are not, since both are written by one verifier, which keeps what it has read."""
    return {
        "whole": ratio(plain.seconds, ours.seconds),
        "drafted": ours.drafted / sum(ours.tokens),
        "equal": f"{sum(map(str.__eq__, ours.texts, plain.texts))} of {len(ours.texts)}" if compared else None,
        "tokens": sum(ours.tokens),
        "plain_ms": 1e3 * sum(plain.seconds) / sum(plain.tokens),
    }


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> list[float] | None:
    """Return the geometric mean of the replies' ratios with its 95 % interval, [mean, low, high]; None without any."""
    logs = [log(there / here) for here, there in zip(ours, theirs, strict=True)]
    if not logs:
        return None
    middle = statistics.fmean(logs)
    half = 1.96 * statistics.stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else 0.0
    return [exp(middle), exp(middle - half), exp(middle + half)]


def random_pair(shape: str, folder: Path) -> tuple[Path, Path]:
    """Write a draft model and a verifier of a shape, with random weights, and return their files."""
    verifier, draft = folder / f"{shape}.gguf", folder / f"{shape}-draft.gguf"
    of_verifier, of_draft, kind = SHAPES[shape]
    random_model.write(verifier, of_verifier, kind, 0, sharpness=SHARPNESS)
    random_model.write(draft, of_draft, kind, 1, sharpness=SHARPNESS)
    return draft, verifier


def random_words(path: Path, seed: int = 0) -> Iterator[str]:
    """Yield prompts of random tokens of a model's vocabulary, without end."""
    rng = random.Random(seed)
    with Model.load(path) as model:
        pieces = [model.piece(token).decode("utf-8", "ignore") for token in range(300, min(model.n_vocab, 40_000))]
    while True:
        yield "".join(rng.choices(pieces, k=WORDS)).strip()


def table(found: Mapping[str, Any]) -> str:
    """Return a Markdown table with a row for each cell."""
    columns = (
        "shape", "door", "threads", "busy", "whole (95 %)", "by token (95 %)", "drafted", "equal",
    )  # fmt: skip
    lines = [_line(columns), "|---" * len(columns) + "|"]
    lines += [
        _line((
            one["shape"], one["door"], one["threads"], one["busy"], _interval(one["whole"]),
            _interval(one.get("by_token")), f"{one['drafted']:.2f}", one["equal"],
        ))
        for one in found["rows"]
    ]  # fmt: skip
    lines.append("")
    for name, key in (("replies by turns", "whole"), ("tokens by turns", "by_token")):
        known = [one[key][1] >= AIM for one in found["rows"] if one.get(key)]
        if known:
            lines.append(f"{name}: {sum(known)} of {len(known)} intervals lie above {AIM}")
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |"


def _interval(found: Sequence[float] | None) -> str:
    return "" if found is None else "{:.3f} ({:.3f} to {:.3f})".format(*found)


def measure(
    shapes: Sequence[Literal["tiny", "0.5b"]] = ("tiny", "0.5b"),
    doors: Sequence[Literal["here", "link"]] = ("here", "link"),
    threads: Sequence[int] = (1, 2),
    others: Annotated[Sequence[int], "busy processes"] = (0, 2),
    seconds: Annotated[float, "of a cell's replies"] = 60.0,
    tokens: Annotated[int, "of a reply"] = 128,
) -> Iterator[Figures]:
    """Yield the cells so far, after each."""
    rows: list[Figures] = []
    for shape in shapes:
        with tempfile.TemporaryDirectory() as folder:
            draft, verifier = random_pair(shape, Path(folder))
            for door, count, beside in track(list(product(doors, threads, others)), f"cells of {shape}"):
                with busy(beside):
                    found = measured(draft, verifier, random_words(verifier), door, count, tokens, seconds)
                rows.append({"shape": shape, "door": door, "threads": count, "busy": beside, **found})
                yield {"rows": rows}
