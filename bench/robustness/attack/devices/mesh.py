"""A worker that lies or is silent: the reply must end with the right text, or with a reason."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.mesh.kill_worker import alone
from bench.robustness.attack.harness import Attack, Found
from edgellm.engine import Ids, Model, to_f32
from edgellm.errors import EdgeError
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh import pipeline
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.verifier import MeshVerifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk
from edgellm.storage import fingerprint, resolve
from testkit.hostile.lying_stage import EITHER, LAST, MIDDLE
from testkit.processes.worker import WorkerProcess

TOKENS = 4
LONGEST = 90.0  # seconds for a reply, with the limits below
QUICK = ("rows of NaN", "nothing", "no answer", "works for ever")


def lying(quick: bool) -> Found:
    """Try every lie in a first and in a last stage, with rows sent directly or through the coordinator."""
    pipeline.IDLE_SECONDS, pipeline.ANSWER_SECONDS, pipeline.LOAD_SECONDS = 3.0, 6.0, 6.0
    lies = [(lie, False) for lie in (*MIDDLE, *EITHER)] + [(lie, True) for lie in (*LAST, *EITHER)]
    tried, wrong, slowest, recovered = 0, list[str](), 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        to_f32(resolve("edgellm-verifier"), model := folder / "verifier.gguf")
        with Model.load(model) as loaded:
            prompt = loaded.tokenize("Where is my red mug? It was in the kitchen this morning.")
            expected = alone(loaded, prompt)[:TOKENS]
            n = loaded.n_layer
            work = StageSpec(
                fingerprint(model), "v", LayerRange(0, n), n, loaded.n_embd, loaded.n_vocab, 256, 2, wide=True
            )
        honest = [WorkerProcess(model, folder) for _ in range(2)]
        try:
            for lie, last in (one for one in lies if not quick or one[0] in QUICK):
                liar = WorkerProcess(
                    model, folder, first=f"from testkit.hostile.lying_stage import lies; lies({lie!r})\n"
                )
                try:
                    for worker in (*honest, liar):
                        worker.wait()
                    for direct in (True, False):
                        tried += 1
                        harm, seconds, lost = reply([liar, *honest], work, prompt, expected, last, direct)
                        slowest, recovered = max(slowest, seconds), recovered + lost
                        where = f"{lie}, {'last' if last else 'first'} stage, {'direct' if direct else 'passed on'}"
                        wrong += [f"{where}: {harm}"] if harm else []
                finally:
                    liar.close()
        finally:
            for worker in honest:
                worker.close()
    return Found(tried, tuple(wrong), {"recovered": recovered, "slowest_s": round(slowest, 1)})


def reply(
    workers: Sequence[WorkerProcess], work: StageSpec, prompt: Ids, expected: list[int], last: bool, direct: bool
) -> tuple[str, float, int]:
    """Return the harm in a reply over the first two of these workers, its seconds, and the number of lost workers."""
    members = [worker.member(name, direct) for worker, name in zip(workers, ("liar", "b", "c"), strict=True)]
    half = work.n_layers // 2
    names = ("b", "liar") if last else ("liar", "b")
    mesh = Mesh(
        members,
        [StageShare(names[0], LayerRange(0, half)), StageShare(names[1], LayerRange(half, work.n_layers))],
        work,
    )
    verifier = MeshVerifier(mesh, lambda _token: False, rows=8)
    found: list[str] = []

    def write() -> None:
        try:
            session, text = verifier.open(GenerationState()), prompt
            for _ in range(TOKENS):
                token = session.submit(text, Chunk()).result().tokens
                text = np.append(text, token).astype(np.int32)
            written = text[len(prompt) :].tolist()
            found.append("" if written == expected else f"the text is {written} instead of {expected}")
        except EdgeError:
            found.append("")  # an error of ours is right
        except Exception as error:  # noqa: BLE001 - the attack looks for these
            found.append(f"{type(error).__name__}: {error}")

    began = time.monotonic()
    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(LONGEST)
    seconds = time.monotonic() - began
    verifier.close()
    if not found:
        print(f"no end after {LONGEST:g} s", file=sys.stderr)
    return (found or [f"no end after {LONGEST:g} s"])[0], seconds, mesh.recoveries


ATTACKS = (
    Attack("mesh-liar", "a device of a mesh sends wrong shapes, NaN, too much, nothing, or works forever", lying),
)
