"""Check that replies by random JSON schemas are valid, and compare the tokens that a pass of the verifier brings.

Schemas are random, in the shapes of JSONSchemaBench and JSON-Schema-Test-Suite: objects with required and optional
properties, arrays and tuples, enums, constants, anyOf, references, lengths, patterns, formats, bounds and multiples,
nested up to three deep. Each has a held-out question of the bundled pair, which is no model for JSON, and its own
seed. A reply is *valid* if it parses and jsonschema-rs accepts it.

*Tokens a pass* are compared with two runs without a grammar: the same tokens, which the verifier is made to write, and
other replies to the same questions with the same seeds and at most as many tokens. Nothing is copied from earlier
replies.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import jsonschema_rs

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Context, ContextSpec, Model
from edgellm.llm import LLM
from edgellm.spec.stats import Summary
from edgellm.storage.model_files import resolve
from testkit.forced_verifier import ForcedVerifier
from testkit.questions import questions

Schema: TypeAlias = dict[str, Any]

MOST = 800  # tokens of a reply
CONTEXT = 1_024
WORDS = ("day", "place", "name", "count", "owner", "time", "room", "list", "kind", "value", "note", "open")


def random_schema(chance: random.Random, depth: int = 0) -> Schema:
    """Return a schema whose texts are of limited length."""
    makers: list[Callable[[random.Random, int], Schema]] = [_string, _integer, _scalar, _enum]
    if depth < 3:
        makers += [_object] * 3 + [_array, _any_of]
    maker = _object if depth == 0 and chance.random() < 0.7 else chance.choice(makers)
    return maker(chance, depth)


def _string(chance: random.Random, _depth: int) -> Schema:
    least = chance.randint(0, 3)
    lengths = {"minLength": least, "maxLength": least + chance.randint(1, 16)}
    pattern = {
        "pattern": chance.choice(["^[a-z]+$", r"^\d{3}-[A-Z]{2}$", "^(?=.*[0-9])[a-z0-9]{4,}$"]),
        "maxLength": 12,
    }
    form = {"format": chance.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])}
    return {"type": "string", **chance.choice([lengths, lengths, pattern, form])}


def _integer(chance: random.Random, _depth: int) -> Schema:
    bounds = {"minimum": chance.randint(-20, 10), "maximum": chance.randint(11, 120)}
    above = {"exclusiveMinimum": chance.randint(0, 100)}
    multiple = {**bounds, "multipleOf": chance.choice([2, 5, 10])}
    return {"type": "integer", **chance.choice([{}, bounds, above, multiple])}


def _scalar(chance: random.Random, _depth: int) -> Schema:
    number = {"type": "number", "minimum": chance.randint(-9, 0) / 4, "exclusiveMaximum": chance.randint(1, 99) / 8}
    cents = {"type": "number", "minimum": 0, "multipleOf": 0.01}
    plain: list[Schema] = [{"type": kind} for kind in ("boolean", "null", "number", ["integer", "null"])]
    return chance.choice([*plain, number, cents])


def _enum(chance: random.Random, _depth: int) -> Schema:
    values = chance.sample(["Monday", "Friday", "mug", "shelf", 3, 12.5, True, None, "a longer text, with a comma"], 3)
    return {"const": values[0]} if chance.random() < 0.2 else {"enum": values}


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(WORDS, chance.randint(1, 4))
    properties = {name: random_schema(chance, depth + 1) for name in names}
    required = [name for name in names if chance.random() < 0.7] or names[:1]
    schema: Schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if depth == 0 and chance.random() < 0.2:
        schema["$defs"] = {"part": random_schema(chance, 2)}
        properties["part"] = {"$ref": "#/$defs/part"}
    return schema


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 2)
    if chance.random() < 0.3:
        items = [random_schema(chance, 3) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "minItems": least, "maxItems": 2}
    return {"type": "array", "items": random_schema(chance, depth + 1), "minItems": least, "maxItems": least + 2}


def _any_of(chance: random.Random, _depth: int) -> Schema:
    kinds = chance.sample([_string(chance, 3), _integer(chance, 3), {"type": "boolean"}, {"type": "null"}], 2)
    return {"anyOf": kinds}


class Rate:
    """Tokens and passes of the verifier."""

    def __init__(self) -> None:
        self.tokens, self.passes = 0, 0.0

    def add(self, summary: Summary) -> None:
        """Count a reply."""
        self.tokens += summary.tokens
        self.passes += summary.tokens * (summary.verifier_passes_per_token or 0.0)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


def written(pair: LLM, prompt: Any, **options: Any) -> tuple[list[int], Summary]:
    """Return the ids of a reply, and its summary."""
    reply = pair.reply(prompt, retrieval="off", **options)
    ids = [token.id for token in reply]
    return ids, reply.summary


def is_valid(schema: Schema, text: str) -> bool:
    """Return whether a text is JSON, and valid by `schema`."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True).is_valid(json.loads(text))
    except ValueError:
        return False


def measure(schemas: int = 200, temperature: float = 1.0, seed: int = 0, threads: int | None = None) -> Figures:
    """Return the figures of so many schemas."""
    chance = random.Random(seed)
    outcomes, kinds = Counter[str](), Counter[str]()
    grammar, free, same = Rate(), Rate(), Rate()
    wrong: list[dict[str, Any]] = []
    replies: list[tuple[Any, list[int]]] = []
    asked = [question.messages for question in questions(-(-schemas // 8), seed)] * 2
    with LLM.open("edgellm-draft", "edgellm-verifier", threads=threads, n_ctx=CONTEXT, history=False) as pair:
        for number, prompt in enumerate(track(asked[:schemas], "schemas")):
            schema, own = random_schema(chance), seed + number
            options: Any = {"temperature": temperature, "seed": own}
            ids, summary = written(pair, prompt, json_schema=json.dumps(schema), max_tokens=MOST, **options)
            kinds[str(schema.get("type", next(iter(schema))))] += 1
            outcome = "valid" if is_valid(schema, summary.text) else f"not valid ({summary.finish_reason})"
            outcomes[outcome] += 1
            if outcome != "valid":
                wrong.append({"schema": schema, "text": summary.text, "finish_reason": summary.finish_reason})
            grammar.add(summary)
            free.add(written(pair, prompt, max_tokens=len(ids), **options)[1])
            replies.append((prompt, ids))
    with Model.load(resolve("edgellm-draft")) as draft, Model.load(resolve("edgellm-verifier")) as model:
        forced = ForcedVerifier(model, Context(model, ContextSpec(n_ctx=CONTEXT, threads=threads)))
        with LLM(model, draft=draft, verifier=forced, threads=threads, history=False) as told:
            for prompt, ids in replies:
                forced.says(told.prompt_writer.ids(prompt), tuple(ids))
                same.add(written(told, prompt, max_tokens=len(ids))[1])
    rates = {name: rate.tokens_per_pass for name, rate in (("grammar", grammar), ("other", free), ("same", same))}
    return {
        "schemas": schemas, "temperature": temperature, "kinds": kinds, "outcomes": outcomes, "tokens": grammar.tokens,
        "tokens_per_pass": rates, "share_of_other": rates["grammar"] / rates["other"],
        "share_of_same": rates["grammar"] / rates["same"], "wrong": wrong,
    }  # fmt: skip


def failures(found: Figures) -> list[str]:
    """Return how many replies were not valid."""
    return [f"{len(found['wrong'])} replies are not valid"] if found["wrong"] else []


def table(found: dict[str, Any]) -> str:
    """Return the result as lines."""
    rates = found["tokens_per_pass"]
    outcomes = ", ".join(f"{count} {name}" for name, count in found["outcomes"].items())
    return (
        f"{found['schemas']} schemas at temperature {found['temperature']:g}: {outcomes} ({found['tokens']} tokens)\n"
        f"tokens a pass: {rates['grammar']:.2f} with a grammar; {rates['same']:.2f} for the same tokens without"
        f" ({found['share_of_same']:.2f} times as many); {rates['other']:.2f} in other replies without"
        f" ({found['share_of_other']:.2f})\n"
    )
