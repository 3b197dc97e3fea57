"""Measure whether attention predicts which chunks the verifier rejects, and which of them matter (Synera, 4.2).

    python -m bench.synera.importance [--pair home|code] [--prompts 240] [--gamma 4]

The pair writes held-out replies with everything verified. Each drafted chunk is read once more with the draft
model's attention captured in all layers. Each rejected chunk is kept once while all others are verified: it matters if
that lowers the reply's score.

A reading turns a chunk's attention into one number. The table has its AUC: the chance that the number is higher for a
rejected chunk than for an accepted one, or for a rejected chunk that matters than for one that does not. 0.5 is chance.
Columns: the mean over all layers, each layer alone, and the best layer and the best head. As the best of many is partly
luck, it is chosen on one half of the prompts, and its AUC is that of the other half.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.harness.report import write
from edgellm.engine import Capture, Context, ContextSpec, Model
from edgellm.spec.drafters.importance import importance
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.fitting import auc
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Floats, Ids, Verdict
from edgellm.storage import resolve
from edgellm.verifier.in_process import ContextPool, LocalVerifier
from testkit.questions import ASKED, MOST, Question, parsed_with_pair, questions

Flags: TypeAlias = npt.NDArray[np.bool_]
SEED = 3003
POSITIONS = 1024
KINDS = {
    "all": "chunks, rejected",
    "full": "chunks of full length, rejected",
    "rejected": "rejected chunks, those that matter",
}
SINK = 4
"""First positions, which get the attention that has no other target."""


def without_sink(rows: Floats, keys: int = 1) -> Floats:
    """Return the rows without attention to the first `keys` positions, the sink for attention that finds nothing, again
    of sum 1.

    A row that holds nothing else becomes zero.
    """
    rest = rows.copy()
    rest[..., :keys] = 0.0
    total = rest.sum(axis=-1, keepdims=True)
    np.divide(rest, total, out=rest, where=total > 0)
    return rest


def entropy(rows: Floats) -> Floats:
    """Return the entropy of each query's attention in nats, averaged over heads and layers, shape (queries,); 0: it
    attends to one token."""
    logs = np.log(rows, out=np.zeros_like(rows), where=rows > 0)
    spread: Floats = -(rows * logs).sum(axis=-1).mean(axis=(0, 1))
    return spread


def prompt_share(rows: Floats, prompt: int) -> Floats:
    """Return how much of each query's attention falls on the first `prompt` positions, averaged likewise, shape
    (queries,)."""
    share: Floats = rows[..., :prompt].sum(axis=-1).mean(axis=(0, 1))
    return share


@dataclass(frozen=True, slots=True)
class Seen:
    """A drafted chunk: attention of its tokens (layers, heads, len(chunk), keys), whether it was rejected, and whether
    keeping it then would have lowered the score.
    """

    rows: Floats
    prompt: int
    first: int
    chunk: Chunk
    rejected: bool
    matters: bool
    half: int


class Writer:
    """Writes replies with everything verified, in chunks of `gamma`."""

    def __init__(self, draft: Model, verifier: Model, gamma: int, closing: ExitStack) -> None:
        self._draft, self._verifier, self._gamma = draft, verifier, gamma
        self._drafter = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, threads=1)))
        closing.callback(self._drafter.close)
        local = LocalVerifier(
            verifier, ContextPool(lambda: Context(verifier, ContextSpec(n_ctx=POSITIONS, threads=1))), POSITIONS
        )
        closing.callback(local.close)
        self._session = local.open(GenerationState())
        closing.callback(self._session.close)

    def rounds(self, prompt: Ids, ids: Ids) -> Iterator[tuple[Ids, Chunk, Verdict, Ids]]:
        """Continue `ids`; yield for each round the text before it, the chunk, the verdict, and the text after it."""
        while len(ids) < len(prompt) + MOST and not self.over(ids[len(prompt) :]):
            chunk = self._drafter.propose(GenerationState(ids), self._gamma)
            verdict = self._session.submit(ids, chunk).result()
            after = np.concatenate((ids, chunk.ids[: verdict.accepted], verdict.tokens[:1]))
            yield ids, chunk, verdict, after
            ids = after

    def over(self, reply: Ids) -> bool:
        return any(map(self._draft.is_eog, reply.tolist()))

    def score(self, question: Question, prompt: Ids, ids: Ids) -> float:
        """Return the score of the reply that follows `prompt` in `ids`, continued to its end."""
        for *_, after in self.rounds(prompt, ids):
            ids = after
        reply = ids[len(prompt) :].tolist()
        end = next((at for at, token in enumerate(reply) if self._draft.is_eog(token)), len(reply))
        return question.score(self._verifier.detokenize(reply[:end]).decode(errors="replace").strip())


def chunks(draft: Model, verifier: Model, pair: str, prompts: int, gamma: int) -> list[Seen]:
    """Return all chunks of fully verified replies to `prompts` questions of a pair."""
    layers = tuple(range(draft.n_layer))
    found: list[Seen] = []
    with ExitStack() as closing:
        context = closing.enter_context(
            Context(draft, ContextSpec(n_ctx=POSITIONS, threads=1), capture=Capture(attention=layers))
        )
        writer = Writer(draft, verifier, gamma, closing)
        for number, question in enumerate(questions(-(-prompts // len(ASKED[pair])), SEED, pair)[:prompts]):
            prompt = verifier.chat_prompt(question.messages)
            rounds = list(writer.rounds(prompt, prompt))
            best = writer.score(question, prompt, rounds[-1][-1])
            for ids, chunk, verdict, _ in rounds:
                rejected = verdict.accepted < len(chunk)
                kept = np.concatenate((ids, chunk.ids))
                matters = rejected and writer.score(question, prompt, kept) < best
                rows = attention(context, ids, chunk)
                found.append(Seen(rows, len(prompt), len(ids), chunk, rejected, matters, number % 2))
    return found


def attention(context: Context, ids: Ids, chunk: Chunk) -> Floats:
    """Return the attention of the chunk's tokens after `ids`, in every layer."""
    recorder = context.captured
    if recorder is None:
        raise RuntimeError("the context captures nothing")
    recorder.attend(None)
    context.decode(ids[context.sync(ids) :])
    recorder.attend(slice(0, len(ids) + len(chunk)))
    context.decode(chunk.ids, outputs=len(chunk))
    rows = np.stack([recorder.attention(layer) for layer in recorder.capture.attention])
    context.rollback(len(ids))
    return rows


def mean_importance(seen: Seen, rows: Floats, *, own: bool = True, last: bool = False) -> float:
    """Return the paper's importance: the chunk's mean of the column sums over the queries decoded before the gate.

    `last` adds the last token's query, which costs another decode.
    """
    n = len(seen.chunk)
    queries = n if last else max(1, n - 1)
    return float(importance(rows[:, :, :queries], seen.first, n, own=own).mean())


READINGS: dict[str, Callable[[Seen, Floats], float]] = {
    "importance, as the gate has it": mean_importance,
    "without attention to itself": lambda seen, rows: mean_importance(seen, rows, own=False),
    "with the last token's query": lambda seen, rows: mean_importance(seen, rows, last=True),
    "without the sink": lambda seen, rows: mean_importance(seen, without_sink(rows, SINK)),
    "entropy of the rows": lambda _seen, rows: float(entropy(rows).mean()),
    "share on the prompt": lambda seen, rows: -float(prompt_share(rows, seen.prompt).mean()),
    "share on the sink": lambda _seen, rows: float(rows[..., :SINK].sum(axis=-1).mean()),
}


def study(found: list[Seen], label: Callable[[Seen], bool]) -> dict[str, Any]:
    """Return the AUC of every reading for the `label` of a chunk: of all layers, each, and the best layer and head."""
    positive = np.array([label(seen) for seen in found])
    half = np.array([seen.half for seen in found])
    n_layer, n_head = found[0].rows.shape[:2]
    rows: dict[str, Any] = {}
    for name, read in READINGS.items():
        alone = np.array(
            [
                [[read(seen, seen.rows[i : i + 1, h : h + 1]) for h in range(n_head)] for i in range(n_layer)]
                for seen in found
            ]
        )
        rows[name] = {
            "all_layers": auc(alone.mean(axis=(1, 2)), positive),
            "layers": [auc(alone[:, layer].mean(axis=1), positive) for layer in range(n_layer)],
            "best_layer": chosen(alone.mean(axis=2), positive, half),
            "best_head": chosen(alone.reshape(len(found), -1), positive, half),
        }
    mean = np.array([-float(seen.chunk.confidence.mean()) for seen in found])
    least = np.array([-float(seen.chunk.confidence.min()) for seen in found])
    return {
        "chunks": len(found),
        "positive": int(positive.sum()),
        "confidence": {"mean": auc(mean, positive), "least": auc(least, positive)},
        "importance": rows,
    }


def chosen(values: Floats, positive: Flags, half: Ids) -> float:
    """Choose the column of best AUC, or worst, on one half; return its AUC on the other half, mean over both halves."""
    found = []
    for one in (0, 1):
        here, there = half == one, half != one
        aucs = [auc(values[here, column], positive[here]) for column in range(values.shape[1])]
        best = int(np.abs(np.array(aucs) - 0.5).argmax())
        sign = 1.0 if aucs[best] >= 0.5 else -1.0
        found.append(auc(sign * values[there, best], positive[there]))
    return float(np.mean(found))


def table(figures: dict[str, Any]) -> str:
    """Return a Markdown table for each question, with a row for each reading."""
    lines = []
    for kind, about in KINDS.items():
        found = figures[kind]
        sure = found["confidence"]
        lines += [
            "{} {}: {}. Low confidence: mean {:.2f}, least {:.2f}.".format(
                found["chunks"], about, found["positive"], sure["mean"], sure["least"]
            ),
            "",
            "| reading | all layers | layer by layer | best layer, on the other half | best head, likewise |",
            "|---|---|---|---|---|",
        ]
        for name, row in found["importance"].items():
            layers = " ".join(f"{value:.2f}" for value in row["layers"])
            lines.append(
                f"| {name} | {row['all_layers']:.2f} | {layers} | {row['best_layer']:.2f} | {row['best_head']:.2f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--name", default="importance", help="of the result file")
    arguments = parsed_with_pair(parser)
    with Model.load(resolve(arguments.draft)) as small, Model.load(resolve(arguments.verifier)) as big:
        found = chunks(small, big, arguments.pair, arguments.prompts, arguments.gamma)
    full = [seen for seen in found if len(seen.chunk) == arguments.gamma]
    wrong = [seen for seen in found if seen.rejected]
    figures = {
        "prompts": arguments.prompts,
        "gamma": arguments.gamma,
        "all": study(found, lambda seen: seen.rejected),
        "full": study(full, lambda seen: seen.rejected),
        "rejected": study(wrong, lambda seen: seen.matters),
    }
    sys.stdout.write(table(figures) + "\n")
    sys.stdout.write(f"written: {write(arguments.name, 'bench.synera.importance', figures, SEED)}\n")


if __name__ == "__main__":
    main()
