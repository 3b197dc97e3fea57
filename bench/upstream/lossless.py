"""A stock server as the verifier: is the text its own, and what does a verdict cost it?

    python -m bench.upstream.lossless --url URL --server "llama-server b7000" --verifier GGUF [--tier TIER]
    python -m bench.upstream.lossless --replay vllm-score
        [--replies 50] [--begin 0] [--max-tokens 64] [--earlier 0] [--sampled 0] [--top-k 8] [--temperature 4]
        [--at-once 1] [--draft PATH] [--row NAME] [--record FILE]

The server at `--url` must have the model of `--verifier`; its row in the result says `live`. With `--replay` a server
of `testkit/upstream` has the requests and answers of that kind over the same model, and the row says `replayed`.

Greedy, held-out cases of every family in turn. Each reply is compared, token by token, with what the server writes
alone when it is asked for the whole reply in one plain request; by text where it names no ids. At a difference the
verifier's logits after the common text are computed: if the two tokens are nearly equal there, it is a numerical tie,
else a bug, and the exit code is 1, as it is where a reply was not verified throughout. Verdicts are rounds of the loop,
and the one that only reads the prompt; a server's passes are counted by itself (vLLM, llama-server with `--metrics`),
otherwise requests are. What was asked for verdicts is counted by path, prompts and status. Of the tokens that a request
repeats from the one before it, a server says how many it had kept. With `--begin N`, the replies are those behind the
first N, which the row has already, and are added to it. With `--at-once N`, as many are written beside each other, and
the server's passes are shared.

With `--sampled N`, N replies of two tokens at temperature 4 and top-k 8, to the prompt whose replies are least certain,
are counted against the exact distribution of the verifier, by chi-square; with `--replies 0` only these are written,
and the row's other figures stay as they were. With a `--top-k` of more tokens than the server names, it draws itself,
and a draft stands while it draws the same; that chi-square stands beside the other one. With `--record`, a request to
each path and its answer are kept, for `tests/upstream/test_recorded.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import command, read, write
from bench.robustness.lossless import TIE, difference, prompts
from bench.upstream.alone import asked_prompts, reused, steps, writes_alone
from edgellm.engine import Context, ContextSpec, Message, Model, to_f32
from edgellm.llm import LLM
from edgellm.spec.sampling import distribution
from edgellm.spec.types import Ids, Sampling, Summary
from edgellm.storage import resolve
from edgellm.upstream.opening import UpstreamOptions, open_upstream
from edgellm.upstream.rows import Tier, Upstream
from edgellm.upstream.verifier import UpstreamTiming
from models.home.corpus import HELD_OUT_SEED
from testkit.upstream.engine import Engine
from testkit.upstream.process import KINDS, POSITIONS
from testkit.upstream.relay import Exchange, Relay
from testkit.upstream.server import UpstreamServer

MODULE = "bench.upstream.lossless"
PATIENT = UpstreamTiming(least=600.0)  # a busy machine must not be taken for a lost server
COUNTS = ("equal", "tie", "bug", "unverified", "tokens", "verdicts", "requests")
TOP_K = 8  # which every server names
TEMPERATURE = 4.0  # the bundled verifier is sure of its words


def conversations(n: int, earlier: int, begin: int = 0) -> list[list[Message]]:
    """Return `n` held-out conversations behind the first `begin` ones, each with that many earlier questions and
    answers, which are those of the cases after it."""
    cases = prompts(begin + n + earlier)
    before = [[Message(turn.role, turn.text) for turn in case.turns] for case in cases]
    return [
        [turn for other in range(1, earlier + 1) for turn in before[at + other]]
        + [Message(turn.role, turn.text) for turn in cases[at].prompt]
        for at in range(begin, begin + n)
    ]


def replies(
    pair: LLM, relay: Relay, url: str, model: Model, upstream: Upstream, texts: list[list[Message]], most: int,
    at_once: int,
) -> dict[str, Any]:  # fmt: skip
    """Return how replies to `texts`, `at_once` of them beside each other, compare with those of the server `upstream`
    alone, and what they cost it."""
    alone = writes_alone(upstream.dialect)
    counts: Counter[str] = Counter()
    again, asked_for, ties = Counter[str](), Counter[str](), []
    passes: int | None = 0
    began = perf_counter()

    def write(messages: list[Message]) -> tuple[Ids, list[int], Summary]:
        reply = pair.reply(messages, max_tokens=most, budget=1.0)
        ours = [token.id for token in reply]
        return pair.prompt_ids(messages), ours, reply.summary

    def write_alone(prompt: Ids) -> list[int] | str:
        text = b"".join(model.control_text(token) for token in prompt.tolist()).decode()
        return alone(url, upstream.name, prompt.tolist(), text, most)

    with ThreadPoolExecutor(at_once) as pool:
        for first in range(0, len(texts), at_once):
            relay.exchanges.clear()
            before = steps(relay.url)
            written = list(pool.map(write, texts[first : first + at_once]))
            after = steps(relay.url)
            passes = None if passes is None or before is None or after is None else passes + after - before
            exchanges = list(relay.exchanges)
            # afterwards, as the server would have the whole reply in its cache
            others = list(pool.map(write_alone, [prompt for prompt, _, _ in written]))
            for number, ((prompt, ids, summary), other) in enumerate(zip(written, others, strict=True), first):
                counts["tokens"] += len(ids)
                counts["unverified"] += summary.share_verified != 1.0
                counts["verdicts"] += summary.rounds + 1
                own = exchanges if at_once == 1 else of_text(exchanges, prompt)
                verdicts = [one for one in own if _is_verdict(one)]
                counts["requests"] += len(verdicts)
                asked_for.update(map(kind_of, verdicts))
                if (found := reused(own)) is not None:
                    again["asked"], again["kept"] = again["asked"] + found[0], again["kept"] + found[1]
                ours = without_end(model, ids)
                if isinstance(other, str):
                    equal = b"".join(map(model.piece, ours)).decode("utf-8", "replace") == other
                    theirs = model.tokenize(other).tolist()
                else:
                    theirs = without_end(model, other)
                    equal = ours == theirs
                counts["equal"] += equal
                if not equal:
                    kind, apart, at = difference(model, prompt, ours, theirs, TIE)
                    counts[kind] += 1
                    ties.append({"reply": number, "token": at, "logits_apart": apart, "kind": kind})
                    sys.stdout.write(f"reply {number}, token {at}: logits {apart:.2e} apart: {kind}\n")
    asked = counts["requests"] if passes is None else passes
    return {
        "dialect": upstream.dialect, "tier": str(upstream.tier),
        "compared": "texts" if upstream.by_text else "token ids",
        "replies": len(texts), "at_once": at_once, **{name: counts[name] for name in COUNTS},
        "asked_for_verdicts": dict(sorted(asked_for.items())),
        "passes_counted_by": "requests" if passes is None else "the server",
        "passes_per_verdict": asked / counts["verdicts"],
        "prefix_asked_again": again["asked"],
        "prefix_reused": again["kept"] / again["asked"] if again["asked"] else None,
        "differences": ties, "seconds": perf_counter() - began,
    }  # fmt: skip


def without_end(model: Model, ids: list[int]) -> list[int]:
    """Return a reply without the token that ends its turn."""
    return ids[:-1] if ids and model.is_eog(ids[-1]) else ids


def of_text(exchanges: list[Exchange], prompt: Ids) -> list[Exchange]:
    """Return those that have asked about texts which begin with `prompt`."""
    text = prompt.tolist()
    return [one for one in exchanges if (found := asked_prompts(one)) and found[0][: len(text)] == text]


def both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of two runs of `replies`, of which the second one went on behind the first."""
    runs = (one, other)
    verdicts, again = (sum(run[name] for run in runs) for name in ("verdicts", "prefix_asked_again"))
    passes = sum(round(run["passes_per_verdict"] * run["verdicts"]) for run in runs)
    kept = sum(round((run["prefix_reused"] or 0.0) * run["prefix_asked_again"]) for run in runs)
    asked_for = sum((Counter(run["asked_for_verdicts"]) for run in runs), Counter[str]())
    return one | other | {name: one[name] + other[name] for name in ("replies", "seconds", *COUNTS)} | {
        "asked_for_verdicts": dict(sorted(asked_for.items())), "passes_per_verdict": passes / verdicts,
        "prefix_asked_again": again, "prefix_reused": kept / again if again else None,
        "differences": one["differences"] + other["differences"],
        "command": f"{one['command']} && {other['command']}",
    }  # fmt: skip


def _is_verdict(one: Exchange) -> bool:
    return isinstance(one.body, dict) and bool({"prompt", "token_ids", "input_ids"} & set(one.body)) and (
        "tokenize" not in one.path
    )  # fmt: skip


def kind_of(one: Exchange) -> str:
    """Return a name of a request for a verdict: its path, its prompts if there are several, and the status."""
    several = asked_prompts(one)
    return f"{one.path} {'several prompts' if len(several) > 1 else 'one prompt'}: {one.status}"


def sampled(pair: LLM, model: Model, n: int, sampling: Sampling, at_once: int, *, by_text: bool) -> dict[str, Any]:
    """Return the chi-square of `n` sampled replies of two tokens, `at_once` of them beside each other, against the
    verifier's own distribution.

    `by_text`: a server's text is tokenised again here, perhaps into other tokens than it has drawn. So the first two
    bytes of replies are compared, which two tokens decide at the latest.
    """

    def known_by(text: tuple[int, ...]) -> object:
        return first_bytes(model, text) if by_text else text

    known = conversations(24, 0)
    # the least certain one is the same for each rule
    rule = replace(sampling, top_k=min(sampling.top_k, TOP_K))
    chances = [max(expected(model, pair.prompt_ids(messages), rule).values()) for messages in known]
    messages = known[chances.index(min(chances))]
    texts = expected(model, pair.prompt_ids(messages), sampling)
    cells: dict[object, float] = defaultdict(float)
    for text, chance in texts.items():
        cells[known_by(text)] += chance

    def write(seed: int) -> tuple[object, bool]:
        reply = pair.reply(
            messages, max_tokens=2, budget=1.0, temperature=sampling.temperature, top_k=sampling.top_k,
            top_p=sampling.top_p, seed=seed,
        )  # fmt: skip
        ids = without_end(model, [token.id for token in reply])
        return known_by(tuple(ids)), not ids or reply.summary.share_verified == 1.0

    with ThreadPoolExecutor(at_once) as pool:
        written = list(pool.map(write, range(n)))
    seen = Counter(text for text, _ in written)
    unverified = sum(not verified for _, verified in written)
    kept = [(seen[text], n * chance) for text, chance in cells.items() if n * chance >= 5.0]
    rest = (n - sum(count for count, _ in kept), n - sum(mean for _, mean in kept))
    kept += [rest] if rest[1] >= 5.0 else []
    chi_square = sum((count - mean) ** 2 / mean for count, mean in kept)
    degrees = max(1, len(kept) - 1)
    spread = 2.0 / (9.0 * degrees)  # Wilson and Hilferty's approximation
    normal = ((chi_square / degrees) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    impossible = sum(count for text, count in seen.items() if text not in cells)
    return {
        "sampled_replies": n, "cells": len(kept), "chi_square": chi_square,
        "p_value": 0.5 * math.erfc(normal / math.sqrt(2.0)), "impossible": impossible, "unverified_samples": unverified,
    }  # fmt: skip


def first_bytes(model: Model, text: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first two bytes of a text, or fewer where the turn ends."""
    return tuple(byte for token in text for byte in model.piece(token))[:2]


def expected(model: Model, prompt: Ids, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Return the chance of each text of two tokens, or of fewer where the turn ends."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    with Context(model, ContextSpec(n_ctx=len(prompt) + 2, threads=1)) as context:
        first = distribution(context.decode(prompt)[0].copy(), sampling)
        for token, chance in zip(first.ids.tolist(), first.probs.tolist(), strict=True):
            if model.is_eog(token):
                found[()] += chance
                continue
            text = np.append(prompt, np.int32(token))
            kept = context.sync(text)
            second = distribution(context.decode(text[kept:])[-1].copy(), sampling)
            for other, share in zip(second.ids.tolist(), second.probs.tolist(), strict=True):
                found[(token,) if model.is_eog(other) else (token, other)] += chance * share
    return found


def without_folders(found: Any) -> Any:
    """Return a JSON whose paths of files are their names."""
    if isinstance(found, dict):
        return {key: without_folders(value) for key, value in found.items()}
    if isinstance(found, list):
        return [without_folders(value) for value in found]
    is_file = isinstance(found, str) and found.startswith("/") and Path(found).exists()
    return Path(found).name if is_file else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--server", default="", help="its name and version, for the row")
    parser.add_argument("--replay", choices=KINDS, help="a kind of server to replay instead")
    parser.add_argument("--tier", choices=[str(tier) for tier in Tier])
    parser.add_argument("--replies", type=int, default=50)
    parser.add_argument("--begin", type=int, default=0, help="go on behind as many replies, which the row has already")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--earlier", type=int, default=0, help="questions and answers before each question")
    parser.add_argument("--sampled", type=int, default=0, help="0, or hundreds")
    parser.add_argument("--top-k", type=int, default=TOP_K, help="of the sampled ones")
    parser.add_argument("--at-once", type=int, default=1, help="replies that are written beside each other")
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, help="of the sampled ones: vLLM takes 2 at most"
    )
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier", help="the file that the server has")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--row", help="name of the row, by default that of the kind or the server")
    parser.add_argument("--name", default="lossless", help="of the result file")
    arguments = parser.parse_args()
    if (arguments.url is None) == (arguments.replay is None):
        parser.error("give either --url or --replay")
    row = arguments.row or arguments.replay or arguments.server or arguments.url
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        to_f32(resolve(arguments.verifier), folder / "verifier.gguf")
        model = stack.enter_context(Model.load(folder / "verifier.gguf"))
        tier, url = arguments.tier and Tier(arguments.tier), arguments.url
        if arguments.replay is not None:
            engine = Engine(model, positions=POSITIONS)
            stack.callback(engine.close)
            url = stack.enter_context(UpstreamServer(KINDS[arguments.replay](engine))).url
        relay = stack.enter_context(Relay(url))
        options = UpstreamOptions(tier=tier, timing=PATIENT)
        pair = stack.enter_context(
            LLM.open(arguments.draft, relay.url, threads=1, upstream=options, history=False, replies=arguments.at_once)
        )
        found: dict[str, Any] = {"how": "replayed" if arguments.replay else "live", "server": arguments.server or row}
        began: list[Exchange] = []
        opened = open_upstream(relay.url, model, options)
        opened.verifier.close()
        if arguments.replies:
            began += relay.exchanges
            found |= replies(
                pair, relay, url, model, opened.verifier.upstream,
                conversations(arguments.replies, arguments.earlier, arguments.begin), arguments.max_tokens,
                arguments.at_once,
            )  # fmt: skip
            found["earlier_questions"] = arguments.earlier
        if arguments.record is not None:
            one_each = {one.path: one for one in reversed(began + relay.exchanges) if one.status == 200 and one.answer}
            kept = [{"path": one.path, "body": one.body, "answer": one.answer} for one in one_each.values()]
            arguments.record.write_text(json.dumps(without_folders(kept)) + "\n", encoding="utf-8")
        if arguments.sampled:
            sampling = Sampling(arguments.temperature, arguments.top_k, 1.0)
            by_text = opened.verifier.upstream.by_text
            samples = sampled(pair, model, arguments.sampled, sampling, arguments.at_once, by_text=by_text)
            samples["command_of_the_sampled"] = command(MODULE)
            found |= (
                samples
                if arguments.top_k == TOP_K
                else {"drawn_there": {"top_k": arguments.top_k, "temperature": arguments.temperature, **samples}}
            )
    try:
        rows = read(MODULE, arguments.name)["rows"]
    except FileNotFoundError:
        rows = {}
    if arguments.replies:
        found["command"] = command(MODULE)
        found = both(rows[row], found) if arguments.begin else found
    else:
        found = rows[row] | {name: value for name, value in found.items() if name not in ("how", "server")}
    figures = {"tie_below": TIE, "rows": rows | {row: found}}
    sys.stdout.write(table(figures))
    sys.stdout.write(f"written: {write(arguments.name, MODULE, figures, HELD_OUT_SEED)}\n")
    judged = (found, found.get("drawn_there", {}))
    strange = any(
        one.get("impossible") or one.get("unverified_samples") or one.get("p_value", 1.0) < 0.001 for one in judged
    )
    sys.exit(1 if found["bug"] or found["unverified"] or strange else 0)


def table(found: dict[str, Any]) -> str:
    """Return a line for each server."""
    widths = {"equal": 12, "ties": 6, "bugs": 6, "tokens": 8, "passes": 8, "reused": 8, "p": 8, "there": 7}
    lines = [f"{'server':24}{'how':10}{'tier':10}" + "".join(f"{head:>{width}}" for head, width in widths.items())]
    for name, row in found["rows"].items():
        kept = "" if row["prefix_reused"] is None else f"{row['prefix_reused']:.0%}"
        chance, there = (
            f"{one['p_value']:.3f}" if "p_value" in one else "" for one in (row, row.get("drawn_there", {}))
        )
        lines.append(
            f"{name[:23]:24}{row['how']:10}{row['tier']:10}{row['equal']:>5} of {row['replies']:<3}{row['tie']:>6}"
            f"{row['bug']:>6}{row['tokens']:>8,}{row['passes_per_verdict']:>8.2f}{kept:>8}{chance:>8}{there:>7}"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    main()
