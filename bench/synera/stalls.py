"""Measure a device's waiting time for its verifier, and the share that parallel inference hides (Synera, 4.4).

The bundled pair answers held-out questions of all families greedily, at the pace of a device (see
`testkit.processes.paced_pair`). Every question is answered by each method in turn, each with a pair of its own, because
a budget is kept for each pair.

Columns:

- `TBT ms`: time between tokens, over whole replies without their first round: the time from the first round to the last
  over the tokens in it. A round gives up to a chunk of tokens at once. If only the first token were left out, longer
  chunks would seem faster than their pace; with replies of sixteen tokens the draft model alone would by a tenth.
- `of alone`: this time as a multiple of that of the draft model alone on the same questions.
- `to end`: the same up to the end of the reply, with the token that ends the turn. This is the cost of a further token
  in a reply of any length; `of alone` also has the effect of the last word in each reply.
- `score`, `share`: quality in percent, and the share of chunks that was verified.
- `passes`: the verifier's passes for each token.
- `hits`, `hidden`: the share of predictions that hit, and of the waiting time that drafting hid.
- `B/tok`: bytes sent for each token.

A decode of a token in several branches takes as long as in one, as on graphics cards. On a processor the number of
branches follows from their measured time.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.llm import LLM
from edgellm.spec.stats import Summary
from edgellm.spec.types import Token
from edgellm.storage.model_files import HOME, resolve
from testkit.network.relay import Network
from testkit.processes.paced_pair import PASS, TOKEN, paced_pair, paced_verifier
from testkit.questions import MOST, Question, questions

NETWORK = Network(10.0, 0.02)
"""Mbit/s, and the seconds of a round trip."""


@dataclass(frozen=True, slots=True)
class TimedReply:
    """A reply with the `perf_counter` times of its tokens, and of its end."""

    tokens: list[Token]
    times: list[float]
    over: float
    summary: Summary


def timed(pair: LLM, question: Question, seed: int, options: Mapping[str, Any]) -> TimedReply:
    """Answer a question under `options`, by default without retrieval, and return the reply."""
    reply = pair.reply(question.messages, max_tokens=MOST, seed=seed, **{"retrieval": "off", **options})
    came = [(token, perf_counter()) for token in reply]
    over = perf_counter()
    return TimedReply([token for token, _ in came], [at for _, at in came], over, reply.summary)


@dataclass
class Method:
    """A method of answering, and its measurements."""

    options: dict[str, Any]
    drafted: bool = True
    seconds: float = 0.0  # from the first round to the last
    tokens: int = 0  # after the first round
    lasted: float = 0.0  # from the first round to the end of the reply
    counted: int = 0  # after the first round, with the token that ends the turn
    between: list[float] = field(default_factory=list)
    written: int = 0
    passes: float = 0.0
    from_verifier: float = 0.0  # tokens that the verifier accepted or wrote
    tried: int = 0
    hit: int = 0
    hidden: float = 0.0
    asking: float = 0.0
    up: int = 0
    down: int = 0
    scores: list[float] = field(default_factory=list)
    share: float | None = None

    def answer(self, pair: LLM, question: Question, seed: int) -> None:
        reply = timed(pair, question, seed, self.options)
        if later := sum(token.round > 0 for token in reply.tokens):
            ended = reply.summary.finish_reason == "stop"
            self.count(reply.times[0], reply.times[-1], reply.over, later, ended=ended)
        self.add(question, reply.summary)

    def count(self, began: float, last: float, over: float, tokens: int, *, ended: bool) -> None:
        """Count `tokens` that came after the time `began`, at times up to `last`, of a reply that was over at `over`;
        `ended`: by the token that ends the turn."""
        self.seconds += last - began
        self.tokens += tokens
        self.between.append((last - began) / tokens)
        self.lasted += over - began
        self.counted += tokens + ended

    def add(self, question: Question, summary: Summary) -> None:
        """Add the score of a reply, and what it cost."""
        self.written += summary.tokens
        self.passes += (summary.verifier_passes_per_token or 0.0) * summary.tokens
        self.from_verifier += (summary.share_verified or 0.0) * summary.tokens
        self.tried += summary.guesses_tried
        self.hit += summary.guesses_hit
        self.up += summary.bytes_up
        self.down += summary.bytes_down
        self.scores.append(question.score(summary.text))
        self.share = summary.share_offloaded
        if summary.stall_hidden is not None and summary.chunks_verified:
            self.hidden += summary.stall_hidden * summary.chunks_verified
            self.asking += summary.chunks_verified

    def figures(self, alone: "Method") -> dict[str, Any]:
        between, to_end = self.seconds / self.tokens, self.lasted / self.counted
        return {
            "time_between_tokens_ms": 1e3 * between,
            "of_the_draft_model_alone": between / (alone.seconds / alone.tokens),
            "to_the_end_ms": 1e3 * to_end,
            "to_the_end_of_the_draft_model_alone": to_end / (alone.lasted / alone.counted),
            "spread_over_replies_ms": spread([1e3 * value for value in self.between]),
            "score": sum(self.scores) / len(self.scores),
            "share": self.share,
            "passes_per_token": self.passes / self.written,
            "hit_rate": self.hit / self.tried if self.tried else None,
            "stall_hidden": self.hidden / self.asking if self.asking else None,
            "bytes_per_token": (self.up + self.down) / self.written,
        }


def methods(budget: float) -> dict[str, Method]:
    """Return all methods that are compared."""
    return {
        "draft model alone": Method({"gate": "never", "gamma": 1}),
        "synera": Method({"gate": "synera", "budget": budget}),
        "synera, waiting": Method({"gate": "synera", "budget": budget, "parallel": False}),
        "auto": Method({"budget": budget}),
        "auto, waiting": Method({"budget": budget, "parallel": False}),
        "auto, chunks of one": Method({"budget": budget, "gamma": 1}),
        "auto, chunks of four": Method({"budget": budget, "gamma": 4}),
        "random": Method({"gate": "random", "budget": budget}),
        "everything verified": Method({"gate": "always"}),
        "everything, waiting": Method({"gate": "always", "parallel": False}),
        "verifier alone": Method({}, drafted=False),
    }


def open_pair(draft: str, port: int) -> AbstractContextManager[LLM]:
    """Return a pair at the pace of a device whose verifier listens at a port of this machine."""
    return paced_pair(draft, f"127.0.0.1:{port}", TOKEN)


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each method of answering."""
    widths = {"TBT ms": 8, "of alone": 10, "to end": 8, "score": 7, "share": 7, "passes": 8, "hits": 6, "hidden": 8}
    lines = [" " * 22 + "".join(head.rjust(width) for head, width in widths.items()) + f"{'B/tok':>8}"]
    for name, row in results["ways"].items():
        share, hits, hidden = (
            "" if row[key] is None else f"{row[key]:.2f}" for key in ("share", "hit_rate", "stall_hidden")
        )
        lines.append(
            f"{name:22}{row['time_between_tokens_ms']:8.1f}{row['of_the_draft_model_alone']:10.3f}"
            f"{row['to_the_end_of_the_draft_model_alone']:8.3f}{row['score']:7.1f}"
            f"{share:>7}{row['passes_per_token']:8.3f}{hits:>6}{hidden:>8}{row['bytes_per_token']:8.0f}"
        )
    return "\n".join(lines) + "\n"


def measure(cases: Annotated[int, "a family"] = 3, budget: float = 0.2) -> Figures:
    """Answer all questions by every method, and return the figures."""
    compared = methods(budget)
    with ExitStack() as closing:
        relay = closing.enter_context(paced_verifier(resolve(HOME.verifier), PASS, NETWORK))
        drafts = [HOME.draft if method.drafted else "none" for method in compared.values()]
        pairs = [closing.enter_context(open_pair(draft, relay.port)) for draft in drafts]
        for seed, question in enumerate(track(questions(cases), "questions")):
            for method, one in zip(compared.values(), pairs, strict=True):
                method.answer(one, question, seed)
    base = compared["draft model alone"]
    return {"ways": {name: method.figures(base) for name, method in compared.items()}}
