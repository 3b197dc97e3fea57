"""Write the same replies in every way in which a text may be batched, and compare them token by token.

The model alone, without copies, is what all other ways are compared with: asked again, with copies, with the draft
model, with copies and the draft model, with drafts in each round whether that pays or not, after a restart with saved
prompts, in the second turn of a conversation read whole and continued, at a served verifier of eight clients at once
over a link of loopback, and by two devices that have half of the layers each. With a JSON schema, the model alone is
asked by the same schema. Greedy, or at a temperature with a seed. ASKED is Spec-Bench's file of questions, or a part
of it; each is asked in `each` of the ways, by turns. A model without a chat template continues the question. A reply
some of whose tokens were not checked, because the verifier was too busy, is not counted.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import questions
from edgellm.engine import Message, Model, ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.llm import LLM
from edgellm.llm.mesh_llm import open_mesh
from edgellm.llm.model_loading import EngineConfig
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.placement import model_costs
from edgellm.mesh.weight_cache import ComputeUnit, WeightCache
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer, WorkerServer
from edgellm.spec.params import ReplyOptions
from edgellm.spec.types import UNVERIFIED, Token
from edgellm.storage.model_files import resolve

CLIENTS = 8
SAVED = 2**31  # bytes of saved prompts at most
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"answer": {"type": "string"}, "keywords": {"type": "array", "items": {"type": "string"}}},
        "required": ["answer", "keywords"],
        "additionalProperties": False,
    }
)
Prompt: TypeAlias = str | Sequence[Message]
Ask: TypeAlias = Callable[[LLM, Prompt], list[int]]


class Continued(str):
    """A text that a model without a chat template continues."""


def written(pair: LLM, prompt: Prompt, options: ReplyOptions) -> list[int]:
    """Return the tokens of a reply; none where some were not checked, as a verifier across the link was too busy."""
    reply = pair.complete(prompt, options) if isinstance(prompt, Continued) else pair.reply(prompt, options)
    tokens = [event for event in reply if isinstance(event, Token)]
    return [] if any(token.source in UNVERIFIED for token in tokens) else [token.id for token in tokens]


def conversation(prompt: str, reply: bytes) -> Prompt:
    """Return a conversation whose second turn is to be answered."""
    said = reply.decode(errors="replace")
    if isinstance(prompt, Continued):
        return Continued(f"{prompt}{said}\n\nIn other words:")
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


@contextmanager
def over_two_devices(verifier: str, hardware: Hardware, n_ctx: int) -> Iterator[LLM]:
    """Yield a pair without a draft model whose verifier's layers two workers of this machine have half of each."""
    file, unit = ModelFile.open(resolve(verifier)), ComputeUnit(hardware)
    layers = int(model_costs(file).shape.layers)
    with ExitStack() as running:
        addresses = [
            running.enter_context(
                WorkerServer(WeightCache(WholeModel(file), unit=unit), Address("127.0.0.1", 0))
            ).address
            for _ in range(2)
        ]
        split = "{}:1-{half},{}:{next}-{layers}".format(
            *addresses, half=layers // 2, next=layers // 2 + 1, layers=layers
        )
        config = EngineConfig("none", hardware=replace(hardware, n_ctx=n_ctx), history=False, replies=4)
        yield running.enter_context(open_mesh(file, split, config)).pair


WAYS = (
    "asked again",
    "with copies",
    "second turn, continued",
    "copies and draft model",
    "drafts in each round",
    "second turn, with drafts",
    "with a schema",
    "second turn, after a restart",
    "eight clients, over a link",
    "layers on two devices",
)
Replies: TypeAlias = dict[int, list[int]]  # by the question's number


def ways(
    verifier: str, draft: str, prompts: Sequence[str], each: int, options: Mapping[str, Any], hardware: Hardware,
    n_ctx: int,
) -> Iterator[tuple[str, Replies, Replies]]:  # fmt: skip
    """Yield for each way its name, the replies that are expected, and those that were written: of each question in
    `each` of the ways, by turns."""
    off, default = ReplyOptions(**options, retrieval="off"), ReplyOptions(**options)
    always = ReplyOptions(**options, gamma=6, gate="always", retrieval="off")
    asked = dict(enumerate(prompts))

    def some(*names: str) -> list[int]:
        """Return the numbers of the questions that are asked in any of these ways."""
        at = [WAYS.index(name) for name in names]
        return [number for number in asked if any((way - number * each) % len(WAYS) < each for way in at)]

    def replies(pair: LLM, wanted: ReplyOptions, of: Mapping[int, Prompt], *names: str) -> Replies:
        return {number: written(pair, of[number], wanted) for number in track(some(*names), names[0])}

    def opened(draft: str = "none", **more: Any) -> LLM:
        return LLM.open(draft, verifier, n_ctx=n_ctx, hardware=hardware, **({"history": False} | more))

    by_schema, later = "with a schema", [name for name in WAYS if name.startswith("second turn")]
    with opened() as alone:
        plain = {number: written(alone, prompt, off) for number, prompt in enumerate(track(prompts, "alone"))}
        for name, wanted in (("asked again", off), ("with copies", default)):
            yield name, plain, replies(alone, wanted, asked, name)
        turns = {at: conversation(asked[at], b"".join(map(alone.piece, plain[at]))) for at in some(*later)}
        second = replies(alone, off, turns, *later)
        continued: Replies = {}
        for number in track(some(later[0]), later[0]):
            written(alone, asked[number], off)
            continued[number] = written(alone, turns[number], off)
        yield later[0], second, continued
        schema = replies(alone, replace(off, json_schema=SCHEMA), asked, by_schema)
    with opened(draft) as pair:
        for name, wanted in (("copies and draft model", default), ("drafts in each round", always)):
            yield name, plain, replies(pair, wanted, asked, name)
        yield later[1], second, replies(pair, default, turns, later[1])
        yield by_schema, schema, replies(pair, replace(default, json_schema=SCHEMA), asked, by_schema)
    restarted: Replies = {}
    for number in track(some(later[2]), later[2]):
        with opened(history=True, prompt_cache=SAVED) as first:
            written(first, asked[number], off)
        with opened(history=True, prompt_cache=SAVED) as again:
            restarted[number] = written(again, turns[number], off)
    yield later[2], second, restarted
    eight, mesh = WAYS[-2:]
    with Model.load(resolve(verifier), LoadSpec(hardware)) as model:
        found = at_once(model, draft, [asked[number] for number in some(eight)], default, n_ctx)
        yield eight, plain, dict(zip(some(eight), found, strict=True))
    with over_two_devices(verifier, hardware, n_ctx) as halves:
        yield mesh, plain, replies(halves, default, asked, mesh)


def table(figures: Mapping[str, Any]) -> str:
    """Return for each way how many replies are equal, and where the others differ first."""
    lines = [f"{'':32}equal\n"]
    for row in figures["rows"]:
        where = ", ".join(f"{name} at {at}" for name, at in row["different"][:6])
        lines.append(f"{row['way']:32}{row['equal']} of {row['replies']}   {where}\n")
    return "".join(lines)


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    verifier: str = "smollm2:135m",
    draft: str = "smollm2:draft",
    count: Annotated[int, "questions, spread over the file"] = 240,
    tokens: Annotated[int, "of a reply at most"] = 96,
    temperature: float = 0.0,
    reproducible: Annotated[int, "1: with --reproducible"] = 1,
    n_ctx: Annotated[int, "positions"] = 4096,
    each: Annotated[int, "ways in which each question is asked, by turns"] = 1,
) -> Iterator[Figures]:
    """Yield the figures after each way."""
    found = questions(asked)
    found = found[:: max(1, len(found) // count)][:count]
    with Model.load(resolve(verifier), LoadSpec(text_only=True)) as model:
        form = str if model.chat_template_source else Continued
    prompts = [form(question.text) for question in found]
    options = {"max_tokens": tokens, "temperature": temperature, "seed": 7}
    hardware = Hardware(reproducible=bool(reproducible))
    rows: list[dict[str, Any]] = []
    for way, wanted, got in ways(verifier, draft, prompts, each, options, hardware, n_ctx):
        different = [
            (f"{number} ({found[number].category})", first_difference(wanted[number], reply))
            for number, reply in got.items()
            if reply and wanted[number] != reply
        ]
        checked = sum(map(bool, got.values()))
        rows.append({"way": way, "replies": checked, "equal": checked - len(different), "different": different})
        yield {"verifier": verifier, "tokens": tokens, "rows": rows}


def failures(figures: Mapping[str, Any]) -> list[str]:
    """Return the ways in which a reply was another."""
    return [f"{row['way']}: {row['equal']} of {row['replies']} equal" for row in figures["rows"] if row["different"]]
