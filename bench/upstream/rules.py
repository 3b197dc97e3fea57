"""Penalties, logit_bias and JSON schemas with a stock server as the verifier: is the text that of the model here?

    python -m bench.upstream.rules --url URL --server "vLLM 0.32.0" --verifier GGUF [--tier TIER]
    python -m bench.upstream.rules --replay vllm-score
        [--replies 25] [--max-tokens 48] [--threads 1] [--row NAME]

The server at `--url` must have the model of `--verifier`; its row in the result says `live`. With `--replay` a server
of `testkit/upstream` has the requests and answers of that kind over the same model, and the row says `replayed`.

Held-out cases, each by every rule, greedy and at temperature 0.8 with top-k 8. A reply through the server is compared,
token by token, with the one that the verifier, in f32, writes in this process by the same rule and seed. At a
difference the two tokens' logits after the penalties are compared, with their draws in a sampled reply: if they are
nearly equal, it is a numerical tie, else a bug, and the exit code is 1, as it is where a reply was not verified
throughout. Of the requests, those are counted that asked for one token with a bias or among some (`steered`). In a
sampled reply by penalties the server draws such a token by itself: a reply that differs then is counted as `there`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, suppress
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.report import command, read, write
from bench.robustness.lossless import TIE
from bench.upstream.lossless import PATIENT, conversations
from edgellm.engine import Context, ContextSpec, Model, to_f32
from edgellm.llm import LLM
from edgellm.spec.sampling import arrival_times, penalised
from edgellm.spec.types import Ids, Penalties
from edgellm.storage import resolve
from edgellm.upstream.opening import UpstreamOptions
from edgellm.upstream.rows import Tier
from models.home.corpus import HELD_OUT_SEED
from testkit.upstream.engine import Engine
from testkit.upstream.process import KINDS, POSITIONS
from testkit.upstream.relay import Exchange, Relay
from testkit.upstream.server import UpstreamServer

MODULE = "bench.upstream.rules"
SCHEMA = json.dumps({
    "type": "object", "properties": {"where": {"type": "string", "maxLength": 12}, "sure": {"type": "boolean"}},
    "required": ["where", "sure"], "additionalProperties": False,
})  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.7},
    "rewards": {"frequency_penalty": -0.7, "logit_bias": {300: -8.0, 17: 3.0}},
    "schema": {"json_schema": SCHEMA},
    "schema and penalties": {"json_schema": SCHEMA, "frequency_penalty": 1.0},
}
DRAWN: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8, "top_k": 8, "top_p": 0.95}}


def compared(pair: LLM, alone: LLM, model: Model, relay: Relay, count: int, most: int) -> dict[str, Any]:
    """Return how many of `count` replies by each rule are those of `alone`, and what the server was asked."""
    rows: dict[str, Any] = {}
    for name, rule in RULES.items():
        for how, draws in DRAWN.items():
            relay.exchanges.clear()
            found: Counter[str] = Counter(dict.fromkeys(("equal", "there", "tie", "bug", "unverified", "tokens"), 0))
            for number, messages in enumerate(conversations(count, 0)):
                options = {**rule, **draws, "seed": number, "max_tokens": most}
                wanted = [token.id for token in alone.reply(messages, **options)]
                before = len(relay.exchanges)
                reply = pair.reply(messages, budget=1.0, **options)
                ours = [token.id for token in reply]
                found["tokens"] += len(ours)
                found["unverified"] += reply.summary.share_verified != 1.0
                if ours == wanted:
                    found["equal"] += 1
                    continue
                if any(_draws(one) for one in list(relay.exchanges)[before:]):
                    found["there"] += 1
                    continue
                apart = _apart(model, pair.prompt_ids(messages), ours, wanted, options)
                found["tie" if apart < TIE else "bug"] += 1
                sys.stdout.write(f"{name}, {how}, reply {number}: {apart:.2e} apart\n")
            asked = [one for one in relay.exchanges if one.path != "/v1/models"]
            rows[f"{name}, {how}"] = {**found, "requests": len(asked), "steered": sum(map(_steered, asked))}
    return rows


def _apart(model: Model, prompt: Ids, ours: list[int], theirs: list[int], options: dict[str, Any]) -> float:
    """Return by how much the rule prefers one of the first two tokens that differ."""
    at = next(i for i in range(1 + max(len(ours), len(theirs))) if ours[i : i + 1] != theirs[i : i + 1])
    if at >= min(len(ours), len(theirs)):
        return float("inf")
    text = np.concatenate((prompt, np.array(ours[:at], dtype=np.int32)))
    penalties = Penalties(
        frequency=options.get("frequency_penalty", 0.0), presence=options.get("presence_penalty", 0.0),
        bias=tuple(sorted(options.get("logit_bias", {}).items())), start=len(prompt),
    )  # fmt: skip
    with Context(model, ContextSpec(n_ctx=len(text) + 1, threads=1)) as context:
        row = penalised(context.decode(text)[0].copy(), text, penalties)
    both = np.array([ours[at], theirs[at]], dtype=np.int32)
    gap = float(row[both[0]] - row[both[1]])
    if "temperature" in options:
        first, second = arrival_times(options["seed"], len(text), both).tolist()
        gap = gap / options["temperature"] - log(first / second)
    return abs(gap)


def _steered(one: Exchange) -> bool:
    params = one.body.get("sampling_params") or one.body
    return bool(params.get("logit_bias") or params.get("allowed_token_ids"))


def _draws(one: Exchange) -> bool:
    params = one.body.get("sampling_params") or one.body
    return _steered(one) and params["temperature"] > 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs")
    parser.add_argument("--server", default="", help="its name and version, for the row")
    parser.add_argument("--replay", choices=KINDS, help="a server of our tests instead")
    parser.add_argument("--tier", type=Tier, choices=list(Tier))
    parser.add_argument("--draft", default="edgellm-draft")
    parser.add_argument("--verifier", default="edgellm-verifier")
    parser.add_argument("--replies", type=int, default=25, help="by each rule")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", help="name of the row")
    parser.add_argument("--name", default="rules", help="of the result file")
    args = parser.parse_args()
    if bool(args.url) == bool(args.replay):
        parser.error("give either --url or --replay")
    with ExitStack() as closing:
        path = Path(closing.enter_context(tempfile.TemporaryDirectory())) / "verifier-f32.gguf"
        to_f32(resolve(args.verifier), path)
        model = closing.enter_context(Model.load(path))
        url = args.url
        if args.replay:
            engine = Engine(model, POSITIONS)
            closing.callback(engine.close)
            url = closing.enter_context(UpstreamServer(KINDS[args.replay](engine))).url
        relay = closing.enter_context(Relay(url))
        upstream = UpstreamOptions(tier=args.tier, timing=PATIENT)
        pair = LLM.open(args.draft, relay.url, threads=args.threads, upstream=upstream, history=False)
        alone = LLM.open(None, path, threads=args.threads, history=False)
        closing.enter_context(pair)
        closing.enter_context(alone)
        rows = compared(pair, alone, model, relay, args.replies, args.max_tokens)
    row = {
        "how": "replayed" if args.replay else "live", "server": args.server or args.replay, "command": command(MODULE),
        "rules": rows,
    }  # fmt: skip
    known: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        known = read(MODULE, args.name)["rows"]
    figures = {"replies": args.replies, "rows": known | {args.row or args.replay or args.server: row}}
    sys.stdout.write(table(figures))
    sys.stdout.write(f"written: {write(args.name, MODULE, figures, HELD_OUT_SEED)}\n")
    if any(one["bug"] or one["unverified"] for one in rows.values()):
        sys.exit(1)


def table(found: dict[str, Any]) -> str:
    """Return the result as lines."""
    columns = ("equal", "there", "ties", "bugs", "tokens", "requests", "steered")
    lines = [f"{'server':<14}{'how':<10}{'rule':<30}" + "".join(f"{column:>10}" for column in columns)]
    for name, row in found["rows"].items():
        for rule, one in row["rules"].items():
            counts = (one["there"], one["tie"], one["bug"], one["tokens"], one["requests"], one["steered"])
            equal = f"{one['equal']}/{one['equal'] + sum(counts[:3])}"
            cells = "".join(f"{cell:>10}" for cell in (equal, *counts))
            lines.append(f"{name:<14}{row['how']:<10}{rule:<30}{cells}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
