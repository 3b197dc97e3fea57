"""Kill or stop a worker during a reply: is a token lost or changed?

Every worker holds all layers of the bundled verifier (an f32 copy); three of the WORKERS hold its stages at first. Each
reply is written twice, greedily, TOKENS long: undisturbed, and with one of the three hit by SIGKILL (in every fifth
reply by SIGSTOP) at a random moment: while it loads, in the prefill, or while it writes. In every second reply the
bundled draft model drafts, so that drafted chunks are on their way. The worker that was hit is started again for the
next reply.

With `moves` all layers move to one worker behind each reply, either one of the three or one that has none; any of the
four is hit, at a random moment between the beginning of the move and its end.

Both texts must be that of the uncut model in one process, else the run fails. The table has the replies with that
text, those that went on over other devices, the state in which the worker was hit, and the time that this cost.
"""

import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.coldstart.costs import Device
from edgellm.coldstart.problem import Home
from edgellm.engine import Context, ContextSpec, Ids, Message, Model, ModelFile
from edgellm.errors import EdgeError
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.messages import StageSpec
from edgellm.mesh.placement import model_costs
from edgellm.mesh.verifier import MeshVerifier
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.rules import AlwaysGate
from edgellm.spec.loop import generate
from edgellm.spec.protocols import GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Token
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.model_files import resolve
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit.gguf.changed import to_f32
from testkit.processes.worker import WorkerProcess

TOKENS = 48
POSITIONS = 512
STAGES = 3


class Endless:
    """The draft model's vocabulary, without an end of the turn."""

    def __init__(self, model: Model) -> None:
        self.piece = model.piece

    def is_eog(self, _token: int) -> bool:
        return False


@dataclass(frozen=True)
class Outcome:
    """The result of one hit, at `moment`, a share of the reply's time, when the mesh was in `state`."""

    kind: str
    state: str
    moment: float
    problems: tuple[str, ...]
    recovered: int
    undisturbed: float
    longer: float


class Coordinator:
    """Writes replies through the workers."""

    def __init__(self, verifier: Path, draft: Model, workers: Sequence[WorkerProcess]) -> None:
        self.workers = {f"worker {at}": worker for at, worker in enumerate(workers)}
        self._draft = draft
        with Model.load(verifier) as model:
            n = model.n_layer
            self._work = StageSpec(
                fingerprint(verifier), model.name, LayerRange(0, n), n, model.n_embd, model.n_vocab, POSITIONS, 2
            )
        self._home = Home((Device.unmeasured("here"),), model_costs(ModelFile.open(verifier)), 1)
        ends = [round(n * at / STAGES) for at in range(STAGES + 1)]
        names = list(self.workers)
        self._shares = [StageShare(name, LayerRange(a, b)) for name, a, b in zip(names, ends, ends[1:], strict=False)]

    def write(
        self, prompt: Ids, drafts: bool, hit: Callable[[Mesh, list[int]], None] | None = None, to: str | None = None
    ) -> tuple[list[int], float, int, tuple[float, float]]:
        """Return the reply, its seconds, how often a pipeline was reopened, and when the move to the worker `to` began
        and was over, in seconds."""
        members = [worker.member(name) for name, worker in self.workers.items()]
        mesh = Mesh(members, self._shares, self._work, self._home)
        if to is not None:
            mesh.move([[StageShare(to, LayerRange(0, self._work.n_layers))]])
        verifier = MeshVerifier(mesh, lambda _token: False, rows=32)
        drafter = (
            ModelDrafter(self._draft, Context(self._draft, ContextSpec(n_ctx=POSITIONS, threads=1))) if drafts else None
        )
        written: list[int] = []
        began = time.perf_counter()
        striker = threading.Thread(target=hit, args=(mesh, written)) if hit is not None else None
        if striker is not None:
            striker.start()
        try:
            events = generate(
                GenerationState(prompt, GREEDY, GenerationLimits(TOKENS, POSITIONS)),
                vocabulary=Endless(self._draft),
                drafter=drafter,
                gate=AlwaysGate(),
                verifier=verifier,
                stats=Summary(),
            )
            written.extend(event.id for event in events if isinstance(event, Token))
            took = time.perf_counter() - began
            over = [(one.began - began, one.at - began) for one in mesh.take_overs]
            return written, took, mesh.recoveries, over[0] if over else (0.0, took)
        finally:
            if striker is not None:
                striker.join()
            verifier.close()
            if drafter is not None:
                drafter.close()


def alone(model: Model, prompt: Ids) -> list[int]:
    """Return the uncut model's own greedy text."""
    with Context(model, ContextSpec(n_ctx=POSITIONS, threads=1)) as context:
        found, ids = [], prompt
        for _ in range(TOKENS):
            found.append(int(context.decode(ids)[0].argmax()))
            ids = np.array(found[-1:], dtype=np.int32)
    return found


def trial(home: Coordinator, big: Model, prompt: Ids, number: int, rng: random.Random, moves: bool = False) -> Outcome:
    """Write one reply, undisturbed and hit, and return the result. `moves`: all layers move to one worker behind it."""
    for worker in home.workers.values():
        worker.wait()
    drafts, kind = number % 2 == 1, "hang" if number % 5 == 4 else "kill"
    own = alone(big, prompt)
    names = list(home.workers)
    to = names[rng.choice((1, STAGES))] if moves else None
    undisturbed, seconds, _, (begins, ends) = home.write(prompt, drafts, to=to)
    victim, moment = rng.choice(names if moves else names[:STAGES]), rng.random()
    states = []

    def strike(mesh: Mesh, written: list[int]) -> None:
        at = begins + moment * (ends - begins) if moves else moment * seconds
        time.sleep(max(0.0, at))  # a move may begin before the first token is asked for
        if moves and (mesh.coming() is not None or mesh.take_overs):
            states.append("moving" if mesh.coming() is not None else "moved")
            home.workers[victim].hit(kind)
            return
        if (pipeline := mesh.current()) is None:  # the reply is over, or between two pipelines
            states.append("between")
            home.workers[victim].hit(kind)
            return
        records = pipeline.records
        loading = not all(record.whole for record in records)
        states.append("loading" if loading else "prefill" if not written else "writing")
        home.workers[victim].hit(kind)

    problems = [] if undisturbed == own else ["the undisturbed text is not the uncut model's"]
    longer, recovered = 0.0, 0
    try:
        text, took, recovered, _ = home.write(prompt, drafts, strike, to)
        longer = took - seconds
        if text != own:
            same = next(
                (at for at, (a, b) in enumerate(zip(text, own, strict=False)) if a != b), min(len(text), TOKENS)
            )
            problems.append(f"{len(text)} tokens, and the text differs from token {same} on")
    except EdgeError as error:
        problems.append(f"the reply ended: {error}")
    home.workers[victim].again()
    return Outcome(kind, states[0], moment, tuple(problems), recovered, seconds, longer)


def run(
    draft: Path, verifier: Path, replies: int, seed: int, workers: int = 4, *, moves: bool = False
) -> Iterator[Outcome]:
    """Yield the outcomes of all trials, on f32 model files. `moves` as for `trial`."""
    rng = random.Random(seed)
    cases = [held_out(family, -(-replies // len(FAMILIES))) for family in FAMILIES]
    prompts = [case.prompt for group in zip(*cases, strict=True) for case in group][:replies]
    with tempfile.TemporaryDirectory() as folder:
        served = [WorkerProcess(verifier, Path(folder), keep=1.0) for _ in range(workers)]
        try:
            with Model.load(draft) as small, Model.load(verifier) as big:
                home = Coordinator(verifier, small, served)
                for number, turns in enumerate(track(prompts, "replies")):
                    prompt = small.chat_prompt([Message(turn.role, turn.text) for turn in turns])[: POSITIONS - TOKENS]
                    yield trial(home, big, prompt, number, rng, moves)
        finally:
            for worker in served:
                worker.close()


def measure(
    replies: int = 100,
    workers: int = 4,
    moves: Annotated[bool, "all layers move to one worker behind each reply"] = False,
    seed: int = 0,
) -> Figures:
    """Return the figures of all replies."""
    with tempfile.TemporaryDirectory() as folder:
        draft, verifier = Path(folder) / "draft.gguf", Path(folder) / "verifier.gguf"
        to_f32(resolve("edgellm-draft"), draft)
        to_f32(resolve("edgellm-verifier"), verifier)
        outcomes = list(run(draft, verifier, replies, seed, workers, moves=moves))
    figures: Figures = {
        "replies": len(outcomes), "workers": workers, "stages": STAGES, "tokens": TOKENS, "moves": moves,
        "complete_and_the_same": sum(not outcome.problems for outcome in outcomes),
        "hit_while": dict(Counter(outcome.state for outcome in outcomes)),
        "recovered": sum(outcome.recovered > 0 for outcome in outcomes),
        "problems": dict(Counter(problem for outcome in outcomes for problem in outcome.problems)),
    }  # fmt: skip
    for kind in ("kill", "hang"):
        of = [outcome for outcome in outcomes if outcome.kind == kind]
        if of:
            figures[kind] = {
                "replies": len(of),
                "seconds_undisturbed": spread([outcome.undisturbed for outcome in of]),
                "seconds_longer": spread([outcome.longer for outcome in of]),
            }
    return figures


def failures(found: Figures) -> list[str]:
    """Return what was wrong with a reply."""
    return list(found["problems"])


def table(found: dict[str, Any]) -> str:
    """Return a summary of the replies."""
    states = ", ".join(f"{count} {state}" for state, count in sorted(found["hit_while"].items()))
    complete, replies = found["complete_and_the_same"], found["replies"]
    lines = [f"{complete} of {replies} replies complete and the same; {found['recovered']} of them over other devices"]
    lines.append(f"hit while: {states}")
    for kind in ("kill", "hang"):
        if (row := found.get(kind)) is not None:
            longer = row["seconds_longer"]
            lines.append(f"{kind}: {longer['median']:.2f} s longer in the median, {longer['max']:.2f} s at most")
    return "\n".join(lines)
