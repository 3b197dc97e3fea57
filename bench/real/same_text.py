"""Write the same replies in every way in which a text may be batched, and compare them token by token.

The model alone, without copies, is what all other ways are compared with: asked again, with copies, with the draft
model, with copies and the draft model, with drafts in each round whether that pays or not, after a restart with saved
prompts, in the second turn of a conversation read whole and continued, and at a served verifier of eight clients at
once, over a link of loopback. Greedy, or at a temperature with a seed. `asked` has a question a line, as Spec-Bench has
them, with `turns`; without it four questions are asked, one of which is about a long text. A reply some of whose tokens
were not checked, because the verifier was too busy, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import Question, questions
from edgellm.engine import Message, Model
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.params import ReplyOptions
from edgellm.spec.types import UNVERIFIED, Token
from edgellm.storage import resolve
from testkit import ROOT

CLIENTS = 8
QUESTIONS = (
    "What is photosynthesis?",
    "Write a short story about a lighthouse.",
    "A train leaves at 9:40 and arrives at 12:15. How long does it take? Think step by step.",
)
SAVED = 2**31  # bytes of saved prompts at most
Prompt: TypeAlias = str | Sequence[Message]
Ask: TypeAlias = Callable[[LLM, Prompt], list[int]]


def written(pair: LLM, prompt: Prompt, options: ReplyOptions) -> list[int]:
    """Return the tokens of a reply; none where some were not checked, as a verifier across the link was too busy."""
    tokens = [event for event in pair.reply(prompt, options) if isinstance(event, Token)]
    return [] if any(token.source in UNVERIFIED for token in tokens) else [token.id for token in tokens]


def conversation(prompt: str, reply: bytes) -> list[Message]:
    """Return a conversation whose second turn is to be answered."""
    said = reply.decode(errors="replace")
    return [Message("user", prompt), Message("assistant", said), Message("user", "Why? Say it in other words.")]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the place of the first token in which two replies differ, or the length of the shorter one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def at_once(model: Model, draft: str, prompts: Sequence[str], options: ReplyOptions, n_ctx: int) -> list[list[int]]:
    """Return the replies of clients of one served verifier, `CLIENTS` at a time, each with a draft model of its own."""
    anywhere = Address("127.0.0.1", 0)
    with VerifierServer(model, anywhere, context=n_ctx, sessions=CLIENTS) as server:

        def client(part: Sequence[str]) -> list[list[int]]:
            with LLM.open(draft, str(server.address), history=False, n_ctx=n_ctx) as pair:
                return [written(pair, prompt, options) for prompt in part]

        with ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(client, [prompts[at::CLIENTS] for at in range(CLIENTS)]))
    return [found[at % CLIENTS][at // CLIENTS] for at in range(len(prompts))]


def ways(
    verifier: str, draft: str, asked: Sequence[Question], options: Mapping[str, Any], n_ctx: int, reproducible: bool
) -> Iterator[tuple[str, list[list[int]], list[list[int]]]]:
    """Yield for each way its name, the replies that are expected, and those that were written."""
    prompts = [question.text for question in asked]
    off, default = ReplyOptions(**options, retrieval="off"), ReplyOptions(**options)
    always = ReplyOptions(**options, gamma=6, gate="always", retrieval="off")

    hardware = Hardware(reproducible=reproducible)

    def each(pair: LLM, wanted: ReplyOptions, some: Sequence[Prompt], name: str) -> list[list[int]]:
        return [written(pair, prompt, wanted) for prompt in track(some, name)]

    def opened(draft: str = "none", **more: Any) -> LLM:
        return LLM.open(draft, verifier, n_ctx=n_ctx, hardware=hardware, **({"history": False} | more))

    with opened() as alone:
        plain = each(alone, off, prompts, "alone")
        yield "asked again", plain, each(alone, off, prompts, "again")
        yield "with copies", plain, each(alone, default, prompts, "copies")
        turns = [
            conversation(prompt, b"".join(map(alone.piece, ids))) for prompt, ids in zip(prompts, plain, strict=True)
        ]
        second = each(alone, off, turns, "second turn, read whole")
        continued = []
        for prompt, turn in zip(track(prompts, "second turn, continued"), turns, strict=True):
            written(alone, prompt, off)
            continued.append(written(alone, turn, off))
        yield "second turn, continued", second, continued
    with opened(draft) as pair:
        yield "copies and draft model", plain, each(pair, default, prompts, "pair")
        yield "drafts in each round", plain, each(pair, always, prompts, "always")
        yield "second turn, with drafts", second, each(pair, default, turns, "second turn, pair")
    restarted = []
    for prompt, turn in zip(track(prompts, "restarts"), turns, strict=True):
        with opened(history=True, prompt_cache=SAVED) as first:
            written(first, prompt, off)
        with opened(history=True, prompt_cache=SAVED) as again:
            restarted.append(written(again, turn, off))
    yield "second turn, after a restart", second, restarted
    with Model.load(resolve(verifier), LoadSpec(hardware)) as model:
        yield "eight clients, over a link", plain, at_once(model, draft, prompts, default, n_ctx)


def table(figures: Mapping[str, Any]) -> str:
    """Return for each way how many replies are equal, and where the others differ first."""
    lines = [f"{'':32}equal\n"]
    for row in figures["rows"]:
        where = ", ".join(f"{name} at {at}" for name, at in row["different"][:6])
        lines.append(f"{row['way']:32}{row['equal']} of {row['replies']}   {where}\n")
    return "".join(lines)


def measure(
    verifier: str = "smollm2:135m",
    draft: str = "smollm2:draft",
    asked: Annotated[Path | None, "JSON lines"] = None,
    count: Annotated[int, "questions, spread over the file"] = 12,
    tokens: Annotated[int, "of a reply at most"] = 96,
    temperature: float = 0.0,
    reproducible: Annotated[int, "1: with --reproducible"] = 1,
    n_ctx: Annotated[int, "positions"] = 4096,
) -> Iterator[Figures]:
    """Yield the figures after each way."""
    text = (ROOT / "docs/guide/mesh.md").read_text(encoding="utf-8")[:6_000]
    own = [Question("own", question) for question in (*QUESTIONS, f"Summarise this text.\n\n{text}")]
    found = own if asked is None else questions(asked)
    found = found[:: max(1, len(found) // count)][:count]
    options = {"max_tokens": tokens, "temperature": temperature, "seed": 7}
    rows: list[dict[str, Any]] = []
    for way, wanted, got in ways(verifier, draft, found, options, n_ctx, bool(reproducible)):
        different = [
            (f"{number} ({question.category})", first_difference(one, other))
            for number, (question, one, other) in enumerate(zip(found, wanted, got, strict=True))
            if other and one != other
        ]
        checked = sum(map(bool, got))
        rows.append({"way": way, "replies": checked, "equal": checked - len(different), "different": different})
        yield {"verifier": verifier, "tokens": tokens, "rows": rows}


def failures(figures: Mapping[str, Any]) -> list[str]:
    """Return the ways in which a reply was another."""
    return [f"{row['way']}: {row['equal']} of {row['replies']} equal" for row in figures["rows"] if row["different"]]
