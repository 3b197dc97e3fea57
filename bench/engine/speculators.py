"""Measure replies with a speculator and without: tokens a pass, and speed.

The models have random weights in float32, in the structure of Qwen3.5 with an MTP layer, and of Llama with an EAGLE-3
head that has an LM head of its own. The speculator of each is `right` most of the time, right `now and then`, or
`useless`. The same model without it writes the same text. Both are opened in one process, in this process as a verifier
without a draft model and as a served one over loopback, and write replies to the same questions by turns; the order
alternates. Nothing is copied, so that the speculator alone decides. The first reply of each warms up.

Rows of the table: how often a drafted token stood, tokens a pass of the verifier, and the median of the ratio of both
times for a reply with its quartiles; more than 1 is faster with the speculator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Model, ModelFile
from edgellm.engine.model import LoadSpec
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.stats import Summary
from testkit.gguf import architectures
from testkit.speculators import eagle3

KINDS = {"mtp": "MTP layer", "eagle3": "EAGLE-3 head"}
BRANCHES = {"right": 0.05, "now and then": 0.5, "useless": 1.0}
"""What the layers of each model add to the residual stream: the less, the more often the speculator is right."""
POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Case:
    """A verifier with a speculator, in its own file or in a `head`, and the file of the same model without."""

    verifier: Path
    without: Path
    head: Path | None = None


@contextmanager
def opened(path: Path, head: Path | None, *, served: bool) -> Iterator[LLM]:
    """Open a model as a verifier with an EAGLE-3 `head`, if given: in this process, or served over loopback."""
    with ExitStack() as closing:
        if not served:
            yield closing.enter_context(LLM.open(head, path, n_ctx=POSITIONS, history=False))
            return
        eagle3 = None if head is None else ModelFile.open(head)
        model = closing.enter_context(Model.load(path, LoadSpec(speculates=True, eagle3=eagle3)))
        server = VerifierServer(model, Address("127.0.0.1", 0), context=POSITIONS, sessions=1)
        closing.enter_context(server)
        yield closing.enter_context(LLM.open(None, str(server.address), tokenizer=path, history=False))


def asked(llm: LLM, number: int, tokens: int) -> tuple[list[int], Summary]:
    """Return the ids of a reply, and its summary."""
    question = f"Number {number}: where is the mug, and where is the key that was in the drawer?"
    reply = llm.reply(question, max_tokens=tokens, retrieval="off")
    return [token.id for token in reply], reply.summary


def measured(case: Case, tokens: int, repeats: int, *, served: bool) -> dict[str, Any]:
    """Return what replies with the speculator took, against those of the same model without."""
    ratios, passes, tested, accepted, written = [], 0.0, 0, 0, 0
    with (
        opened(case.verifier, case.head, served=served) as one,
        opened(case.without, None, served=served) as other,
    ):
        if not served:
            for llm in (one, other):  # else that is done while no reply is written
                llm.curve()
        for turn in range(repeats + 1):
            found = {}
            for llm in (one, other) if turn % 2 else (other, one):
                found[llm] = asked(llm, turn, tokens)
            (ids, summary), (expected, plain) = found[one], found[other]
            if ids != expected:
                raise RuntimeError("The speculator has changed the text.")
            if turn and min(plain.seconds_decoding, summary.seconds_decoding) > 0.0:  # else all came at once
                ratios.append(plain.seconds_decoding / summary.seconds_decoding)
                passes += (summary.verifier_passes_per_token or 0.0) * len(ids)
                tested, accepted = tested + summary.tested, accepted + summary.accepted
                written += len(ids)
    low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "acceptance": accepted / tested if tested else None,
        "tokens_per_pass": written / passes,
        "ratio": median(ratios),
        "quartiles": [low, high],
        "replies": len(ratios),
    }


def table(found: Mapping[str, Any]) -> str:
    """Return a Markdown table with a row for each model and place."""
    lines = [
        "| speculator | it is | verifier | drafted tokens that stood | tokens a pass | speed, of plain |",
        "|---|---|---|---|---|---|",
    ]
    rows = ((kind, name, places) for kind, models in found["kinds"].items() for name, places in models.items())
    for kind, name, places in rows:
        for place, row in places.items():
            stood = "-" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
            low, high = row["quartiles"]
            speed = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
            lines.append(f"| {KINDS[kind]} | {name} | {place} | {stood} | {row['tokens_per_pass']:.2f} | {speed} |")
    return "\n".join(lines) + "\n"


def made(kind: str, name: str, folder: Path, sizes: Mapping[str, Any]) -> Case:
    """Write the files of a case."""
    useful, branch = name != "useless", BRANCHES[name]
    verifier, other = folder / f"{kind}-{name}.gguf", folder / f"{kind}-{name}-other.gguf"
    if kind == "eagle3":
        architectures.write("llama", verifier, sizes=sizes, branch=branch)
        eagle3.write(other, verifier, useful=useful, own=True)
        return Case(verifier, verifier, other)
    mtp: architectures.Mtp = "useful" if useful else "useless"
    architectures.write("qwen35", verifier, mtp=mtp, sizes=sizes, branch=branch)
    architectures.write("qwen35", other, sizes=sizes, branch=branch)
    return Case(verifier, other)


def measure(
    kinds: Sequence[Literal["mtp", "eagle3"]] = ("mtp", "eagle3"),
    models: Sequence[Literal["right", "now and then", "useless"]] = ("right", "now and then", "useless"),
    layers: int = 12,
    width: int = 512,
    tokens: int = 96,
    repeats: int = 9,
) -> Figures:
    """Return the figures of each kind of speculator and model, in this process and served."""
    sizes = {
        "block_count": layers, "embedding_length": width, "feed_forward_length": 3 * width,
        "context_length": POSITIONS, "attention.head_count": width // 32,
        "attention.head_count_kv": max(1, width // 128),
    }  # fmt: skip
    states = {"ssm.inner_size": width, "ssm.time_step_rank": width // 32, "ssm.group_count": width // 64}
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, name in track([(kind, name) for kind in kinds for name in models], "models"):
            case = made(kind, name, Path(folder), sizes | states if kind == "mtp" else sizes)
            found.setdefault(kind, {})[name] = {
                place: measured(case, tokens, repeats, served=place == "served")
                for place in ("in this process", "served")
            }
    return {"kinds": found, "sizes": sizes}
