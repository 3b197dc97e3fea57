"""Measure the gain when sessions go through a stage of a mesh in one batch, not one after another.

Tokens a second of 1 to 8 replies that are written at once, through one worker and through two, each with a
process and one thread of its own. Both variants take turns; ratios are taken within each turn (`gain`). The prompts are
in the caches before the clock starts. In brackets is the processor time of the workers for each token, which leaves out
other programs; `work` is its ratio.
"""

import tempfile
import threading
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np

from bench.harness.results import Figures
from bench.harness.statistics import alternate, spread
from edgellm.engine import Ids, Model
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.verifier import MeshVerifier
from edgellm.spec.protocols import GenerationState, Session
from edgellm.spec.types import Chunk
from edgellm.storage import fingerprint, resolve
from testkit.gguf import random_model
from testkit.processes.worker import WorkerProcess

BEFORE, CONTEXT, SESSIONS = 64, 256, 8
COMPANY = (1, 2, 4, 8)
STAGES = (1, 2)
# Run first by a worker without micro-batching.
ALONE = "from edgellm.mesh import stage\nstage.SHARED_ROWS = 1\n"


class Home:
    """Workers that hold the model's parts, and replies through them."""

    def __init__(self, model: Path, folder: Path, stages: int, first: str, closing: ExitStack) -> None:
        with Model.load(model) as loaded:
            n = loaded.n_layer
            work = StageSpec(
                fingerprint(model), loaded.name, LayerRange(0, n), n, loaded.n_embd, loaded.n_vocab, CONTEXT, SESSIONS
            )
        self._workers = workers = [WorkerProcess(model, folder, 1, first=first) for _ in range(stages)]
        for worker in workers:
            closing.callback(worker.close)
            worker.wait()
        ends = [round(n * at / stages) for at in range(stages + 1)]
        shares = [StageShare(str(at), LayerRange(a, b)) for at, (a, b) in enumerate(pairwise(ends))]
        mesh = Mesh([worker.member(str(at)) for at, worker in enumerate(workers)], shares, work)
        self._verifier = MeshVerifier(mesh, lambda _token: False)
        closing.callback(self._verifier.close)
        self._vocabulary = work.n_vocab

    def rate(self, replies: int, tokens: int) -> tuple[float, float]:
        """Return tokens a second of all replies together, and milliseconds of the workers' processors for each."""
        sessions = [self._verifier.open(GenerationState()) for _ in range(replies)]
        texts = [self._text(seed) for seed in range(replies)]
        for pending in [session.submit(text, _NOTHING) for session, text in zip(sessions, texts, strict=True)]:
            pending.result()
        threads = [
            threading.Thread(target=_written, args=(session, text, tokens))
            for session, text in zip(sessions, texts, strict=True)
        ]
        began, used = perf_counter(), sum(worker.processor() for worker in self._workers)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = perf_counter() - began
        used = sum(worker.processor() for worker in self._workers) - used
        for session in sessions:
            session.close()
        return replies * tokens / seconds, 1e3 * used / (replies * tokens)

    def _text(self, seed: int) -> Ids:
        rng = np.random.default_rng(seed)
        return rng.integers(100, self._vocabulary, BEFORE).astype(np.int32)


def _written(session: Session, text: Ids, tokens: int) -> None:
    for _ in range(tokens):
        text = np.append(text, session.submit(text, _NOTHING).result().tokens).astype(np.int32)


def replies(model: Path, repeats: int, tokens: int) -> list[dict[str, Any]]:
    """Return the tokens a second, together and one by one."""
    found = []
    for stages in STAGES:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
            homes = [Home(model, Path(folder), stages, first, closing) for first in ("", ALONE)]
            for number in COMPANY:
                both: list[list[tuple[float, float]]] = [[], []]

                def run(at: int, number: int = number, both: list[list[tuple[float, float]]] = both) -> float:
                    both[at].append(homes[at].rate(number, tokens))  # noqa: B023  # called within this turn
                    return both[at][-1][0]

                run(0), run(1)
                for taken in both:
                    taken.clear()
                together, alone = alternate(repeats, partial(run, 0), partial(run, 1))
                found.append({
                    "stages": stages, "replies": number,
                    "together": spread(together), "one_by_one": spread(alone),
                    "gain": spread([a / b for a, b in zip(together, alone, strict=True)]),
                    "together_processor_ms": spread([ms for _, ms in both[0]]),
                    "one_by_one_processor_ms": spread([ms for _, ms in both[1]]),
                    "processor_share": spread([a / b for (_, a), (_, b) in zip(*both, strict=True)]),
                })  # fmt: skip
    return found


def table(found: dict[str, Any]) -> str:
    """Return medians of replies, one by one and together."""
    lines = [found["model"]]
    lines.append("tokens a second of all replies; in brackets milliseconds of the workers' processor time for a token")
    lines.append(f"{'stages':>8} {'replies':>9} {'one by one':>18} {'together':>18} {'gain':>6} {'work':>6}")
    for row in found["replies"]:
        cells = [f"{row[way]['median']:>9.1f} ({row[f'{way}_processor_ms']['median']:>6.2f})" for way in _WAYS]
        gain, share = row["gain"]["median"], row["processor_share"]["median"]
        lines.append(f"{row['stages']:>8} {row['replies']:>9} {cells[0]:>18} {cells[1]:>18} {gain:>6.2f} {share:>6.0%}")
    return "\n".join(lines)


_NOTHING = Chunk()
_WAYS = ("one_by_one", "together")


def measure(
    shape: Annotated[str, "of random weights, in place of the bundled verifier"] = "",
    repeats: int = 5,
    tokens: Annotated[int, "of each reply"] = 32,
) -> Figures:
    """Return the figures of replies through one worker and through two."""
    with tempfile.TemporaryDirectory() as folder:
        path = resolve("edgellm-verifier")
        if shape:
            path = Path(folder) / f"{shape}.gguf"
            random_model.write(path, random_model.SHAPES[shape], "Q4_0")
        return {"model": path.name, "tokens": tokens, "replies": replies(path, repeats, tokens)}
