"""A stock server as the verifier: is the text its own, and what does a verdict cost it?

The server at URL must have the bundled verifier in f32; its row in the result says `live`. Without a URL a server of
`testkit/upstream` has the requests and answers of the kind REPLAY over the same model, and the row says `replayed`.

Greedy, held-out cases of every family in turn. Each reply is compared, token by token, with what the server writes
alone when it is asked for the whole reply in one plain request; by text where it names no ids. At a difference the
verifier's logits after the common text are computed: if the two tokens are nearly equal there, it is a numerical tie,
else a bug, and the run fails, as it does where a reply was not verified throughout. Verdicts are rounds of the loop,
and the one that only reads the prompt; a server's passes are counted by itself (vLLM, llama-server with `--metrics`),
otherwise requests are. What was asked for verdicts is counted by path, prompts and status. Of the tokens that a request
repeats from the one before it, a server says how many it had kept.
"""

import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.settings import Earlier
from bench.upstream.alone import asked_prompts, reused, steps, writes_alone
from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.llm import LLM
from edgellm.spec.types import Ids
from edgellm.storage.model_files import resolve
from edgellm.upstream.dialects.served import Upstream
from edgellm.upstream.opening import open_upstream
from edgellm.upstream.rows import Tier
from edgellm.upstream.verifier import UpstreamOptions
from models.case import Case
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit.gguf.changed import to_f32
from testkit.upstream.engine import Engine
from testkit.upstream.kinds import KINDS, POSITIONS
from testkit.upstream.relay import Exchange, Relay
from testkit.upstream.server import UpstreamServer

PATIENT = UpstreamOptions(least=600.0)  # a busy machine must not be taken for a lost server
TIE = 1e-3
"""Logits closer than this may swap ranks with the shape of the batch. In f32 they vary by some 1e-5."""
COUNTS = ("equal", "tie", "bug", "tokens", "verdicts", "requests")


def prompts(n: int) -> list[Case]:
    """Return `n` held-out cases, the families in turn."""
    streams = [held_out(family, -(-n // len(FAMILIES))) for family in FAMILIES]
    return list(islice((case for group in zip(*streams, strict=True) for case in group), n))


def gap(model: Model, prompt: Ids, common: list[int], one: int | None, other: int | None) -> float:
    """Return the difference of the verifier's logits of two tokens after prompt and common text; None ends the turn."""
    text = np.concatenate((prompt, np.array(common, dtype=np.int32)))
    context = Context(model, ContextSpec(n_ctx=model.n_ctx_train))
    try:
        row = context.decode(text)[0]
        ends = [token for token in range(model.n_vocab) if model.is_eog(token)]
        end = max(ends, key=lambda token: row[token])
        return float(abs(row[end if one is None else one] - row[end if other is None else other]))
    finally:
        context.close()


def difference(model: Model, prompt: Ids, ours: list[int], theirs: list[int]) -> tuple[str, float, int]:
    """Return of two replies that differ: `tie` or `bug`, the difference of the logits, and the place of the token."""
    at = next(i for i in range(1 + max(len(ours), len(theirs))) if ours[i : i + 1] != theirs[i : i + 1])
    one, other = next(iter(ours[at : at + 1]), None), next(iter(theirs[at : at + 1]), None)
    apart = gap(model, prompt, ours[:at], one, other)
    return "tie" if apart < TIE else "bug", apart, at


def conversations(count: int) -> list[list[Message]]:
    """Return so many held-out conversations."""
    return [[Message(turn.role, turn.text) for turn in case.prompt] for case in prompts(count)]


def replies(
    pair: LLM, relay: Relay, url: str, model: Model, upstream: Upstream, texts: list[list[Message]], most: int
) -> Figures:
    """Return how replies to `texts` compare with those of the server `upstream` alone, and what they cost it."""
    alone = writes_alone(upstream.dialect)
    counts: Counter[str] = Counter()
    again, asked_for, ties = Counter[str](), Counter[str](), []
    passes: int | None = 0
    began = perf_counter()
    for number, messages in enumerate(track(texts, "replies")):
        relay.exchanges.clear()
        before = steps(relay.url)
        reply = pair.reply(messages, max_tokens=most, budget=1.0)
        ours = without_end(model, [token.id for token in reply])
        after = steps(relay.url)
        passes = None if passes is None or before is None or after is None else passes + after - before
        counts["tokens"] += len(ours)
        counts["bug"] += reply.summary.share_verified != 1.0
        counts["verdicts"] += reply.summary.rounds + 1
        verdicts = [one for one in relay.exchanges if _is_verdict(one)]
        counts["requests"] += len(verdicts)
        asked_for.update(map(kind_of, verdicts))
        if (found := reused(relay.exchanges)) is not None:
            again["asked"], again["kept"] = again["asked"] + found[0], again["kept"] + found[1]
        prompt = pair.prompt_writer.ids(messages)
        text = b"".join(model.control_text(token) for token in prompt.tolist()).decode()
        other = alone(url, upstream.name, prompt.tolist(), text, most)  # later, as the server keeps the whole reply
        if isinstance(other, str):
            equal = b"".join(map(model.piece, ours)).decode("utf-8", "replace") == other
            theirs = model.tokenize(other).tolist()
        else:
            theirs = without_end(model, other)
            equal = ours == theirs
        counts["equal"] += equal
        if not equal:
            kind, apart, at = difference(model, prompt, ours, theirs)
            counts[kind] += 1
            ties.append({"reply": number, "token": at, "logits_apart": apart, "kind": kind})
    asked = counts["requests"] if passes is None else passes
    return {
        "dialect": upstream.dialect, "tier": str(upstream.tier),
        "compared": "texts" if upstream.by_text else "token ids",
        "replies": len(texts), **{name: counts[name] for name in COUNTS},
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


def _is_verdict(one: Exchange) -> bool:
    return isinstance(one.body, dict) and bool({"prompt", "token_ids", "input_ids"} & set(one.body)) and (
        "tokenize" not in one.path
    )  # fmt: skip


def kind_of(one: Exchange) -> str:
    """Return a name of a request for a verdict: its path, its prompts if there are several, and the status."""
    several = asked_prompts(one)
    return f"{one.path} {'several prompts' if len(several) > 1 else 'one prompt'}: {one.status}"


def measure(
    earlier: Earlier,
    url: Annotated[str, "of a server that runs, with the bundled verifier in f32"] = "",
    server: Annotated[str, "its name and version, for the row"] = "",
    replay: Annotated[str, "a kind of server to replay instead"] = "vllm-score",
    tier: Annotated[str, "score, fan-out or continue; by default the server's best"] = "",
    count: Annotated[int, "of replies"] = 50,
    max_tokens: int = 64,
) -> Figures:
    """Return all rows, with a new one of this server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        to_f32(resolve("edgellm-verifier"), folder / "verifier.gguf")
        model = stack.enter_context(Model.load(folder / "verifier.gguf"))
        name, how, at = (server or url, "live", url) if url else (replay, "replayed", "")
        if not url:
            engine = Engine(model, positions=POSITIONS)
            stack.callback(engine.close)
            at = stack.enter_context(UpstreamServer(KINDS[replay](engine))).url
        relay = stack.enter_context(Relay(at))
        options = replace(PATIENT, tier=Tier(tier) if tier else None)
        pair = stack.enter_context(LLM.open("edgellm-draft", relay.url, threads=1, upstream=options, history=False))
        opened = open_upstream(relay.url, model, options)
        opened.close()
        found = replies(pair, relay, at, model, opened.upstream, conversations(count), max_tokens)
    rows = earlier.get("rows", {}) | {name: {"how": how, "server": name, **found}}
    return {"tie_below": TIE, "rows": rows}


def failures(found: Figures) -> list[str]:
    """Return the servers whose text differs by more than a tie, or was not verified throughout."""
    return [name for name, row in found["rows"].items() if row["bug"]]


def table(found: dict[str, Any]) -> str:
    """Return a line for each server."""
    widths = {"equal": 12, "ties": 6, "bugs": 6, "tokens": 8, "passes": 8, "reused": 8}
    lines = [f"{'server':24}{'how':10}{'tier':10}" + "".join(f"{head:>{width}}" for head, width in widths.items())]
    for name, row in found["rows"].items():
        kept = "" if row["prefix_reused"] is None else f"{row['prefix_reused']:.0%}"
        lines.append(
            f"{name[:23]:24}{row['how']:10}{row['tier']:10}{row['equal']:>5} of {row['replies']:<3}{row['tie']:>6}"
            f"{row['bug']:>6}{row['tokens']:>8,}{row['passes_per_verdict']:>8.2f}{kept:>8}"
        )
    return "\n".join(line.rstrip() for line in lines) + "\n"
