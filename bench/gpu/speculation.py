"""Speculation of ours and of llama-server's, each beside its own plain decoding, on the pairs that are made here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np

from bench.gpu.llama_server import LlamaServer
from bench.gpu.machine import Machine
from edgellm.engine import Ids, Message, Model
from edgellm.llm import LLM
from models.pairs import PAIRS, Pair

MOST = 96
PLAIN, SERVER = "plain", "llama-server"
_CONTEXT = 1_024
Write: TypeAlias = Callable[[Ids], list[int]]


@dataclass(slots=True)
class Side:
    """A way to write replies: its seconds, one for each, and their tokens."""

    write: Write
    seconds: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def answer(self, prompt: Ids) -> None:
        began = perf_counter()
        self.texts.append(self.write(prompt))
        self.seconds.append(perf_counter() - began)

    def forget(self) -> None:
        self.seconds.clear()
        self.texts.clear()


def _ours(llm: LLM, retrieval: str) -> Write:
    def write(prompt: Ids) -> list[int]:
        reply = llm.complete(prompt.tolist(), max_tokens=MOST, retrieval=retrieval)
        return [token.id for token in reply]

    return write


def _theirs(server: LlamaServer, is_eog: Callable[[int], bool]) -> Write:
    def write(prompt: Ids) -> list[int]:
        ids = server.complete(prompt.tolist(), MOST).ids
        return ids[:-1] if ids and is_eog(ids[-1]) else ids

    return write


@contextmanager
def sides(machine: Machine, pair: Pair, text: Model) -> Iterator[dict[str, Side]]:
    """Yield all ways to write, opened: ours and llama-server's. `text` is the verifier's vocabulary."""
    draft, verifier = pair.file("draft"), pair.file("verifier")
    layers = "999" if machine.on_card else "0"
    servers = {
        SERVER: (),
        f"{SERVER}, ngram-simple": ("--spec-type", "ngram-simple"),
        f"{SERVER}, ngram-mod": ("--spec-type", "ngram-mod"),
        f"{SERVER}, draft model": ("-md", str(draft), "-ngld", layers, "--spec-type", "draft-simple"),
    }
    hardware = machine.hardware(_CONTEXT)
    with ExitStack() as closing:
        alone = closing.enter_context(LLM.open(None, verifier, hardware=hardware, history=False))
        both = closing.enter_context(LLM.open(draft, verifier, hardware=hardware, history=False))
        found = {
            PLAIN: Side(_ours(alone, "off")),
            "retrieval": Side(_ours(alone, "auto")),
            "pair": Side(_ours(both, "off")),
            "pair and retrieval": Side(_ours(both, "auto")),
        }
        for number, (name, words) in enumerate(servers.items()):
            log = machine.folder / f"speculation-{pair.folder.name}-{number}.log"
            options = [*machine.server_words(_CONTEXT), *words]
            server = closing.enter_context(LlamaServer(machine.server, verifier, options, log))
            found[name] = Side(_theirs(server, text.is_eog))
        for llm in (alone, both):
            llm.wait_until_measured()
        yield found


def measured(machine: Machine) -> dict[str, Any]:
    """Return for each made pair and family the tokens a second of every way."""
    rows = []
    for name, pair in PAIRS.items():
        if not pair.file("verifier").exists():
            continue
        with Model.load(pair.file("verifier"), text_only=True) as text, sides(machine, pair, text) as found:
            for family in pair.families:
                cases = list(pair.held_out(family, machine.amount.cases + 1))
                prompts = [text.chat_prompt([Message(turn.role, turn.text) for turn in case.prompt]) for case in cases]
                prompts = [prompt for prompt in prompts if len(prompt) + MOST < _CONTEXT]
                for number, prompt in enumerate(prompts):
                    for side in list(found.values()) if number % 2 else reversed(found.values()):
                        side.answer(prompt)
                    if not number:  # it warms up
                        for side in found.values():
                            side.forget()
                rows.append({"pair": name, "family": family, **_figures(found)})
                for side in found.values():
                    side.forget()
    return {"rows": rows}


def _figures(found: dict[str, Side]) -> dict[str, Any]:
    tokens = sum(map(len, found[PLAIN].texts))
    return {
        "tokens": tokens,
        "tokens_per_second": {name: sum(map(len, one.texts)) / sum(one.seconds) for name, one in found.items()},
        "equal": {
            name: float(np.mean([a == b for a, b in zip(one.texts, found[PLAIN].texts, strict=True)]))
            for name, one in found.items()
        },
    }


def table(found: dict[str, Any]) -> str:
    """Return a line for each way: tokens a second over all families of a pair, and of its side's plain decoding."""
    lines = [f"{'pair':<6}{'way':<28}{'tokens/s':>10}{'of plain':>10}{'same text':>11}"]
    for pair in dict.fromkeys(row["pair"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["pair"] == pair]
        for way in rows[0]["tokens_per_second"]:
            plain = SERVER if way.startswith(SERVER) else PLAIN
            rate, base = (len(rows) / sum(1 / row["tokens_per_second"][name] for row in rows) for name in (way, plain))
            equal = sum(row["equal"][way] for row in rows) / len(rows)
            lines.append(f"{pair:<6}{way:<28}{rate:>10.1f}{rate / base:>10.2f}{equal:>11.0%}")
    return "\n".join(lines) + "\n"
