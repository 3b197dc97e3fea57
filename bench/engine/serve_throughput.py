"""Measure the tokens a second of a verifier against the number of devices that use it at once.

    python -m bench.engine.serve_throughput [--devices 1 2 4 8 16] [--repeats 5] [--model PATH] [--threads N] [--seed 0]

Every device sends chunks of four along the verifier's own greedy text, three in ten of them with a wrong token, and
sends the next one as soon as it has a verdict. Accepted tokens and the verifier's own are counted.

Columns, in turns: the engine with one batch over all sessions, the engine with one session a batch, and the first of
the two over gRPC (a process of its own, loopback, all devices in this process). Then the `gain` of the first over the
second, and the speed over gRPC as a share of the first (`of batch`), both within a turn. All are medians.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import write
from bench.harness.statistics import alternate, spread
from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Ids, Verdict
from edgellm.spec.verifier import VerifyRequest
from edgellm.storage import resolve
from edgellm.verifier.in_process import VerifierWorker
from edgellm.verifier.judgement import Answer
from edgellm.verifier.scheduler import SchedulerLimits
from models.home.corpus import held_out
from models.home.families import FAMILIES
from testkit.processes.verifier import VerifierProcess

GAMMA, TOKENS, POSITIONS, WRONG = 4, 128, 1024, 0.3
HEAD = f"{'devices':>7}{'one batch':>12}{'one by one':>12}{'over gRPC':>12}{'gain':>8}{'of batch':>12}"


@dataclass(frozen=True)
class Script:
    """A prompt, and the verifier's own text after it."""

    prompt: Ids
    text: Ids
    seed: int

    def chunk(self, at: int) -> Chunk:
        """Return the draft after `at` tokens of the text."""
        rng = random.Random(f"{self.seed}/{at}")
        ids = self.text[at : at + GAMMA].copy()
        if rng.random() < WRONG:
            ids[rng.randrange(len(ids))] ^= 1
        return Chunk(ids=ids)

    def prefix(self, at: int) -> Ids:
        return np.concatenate((self.prompt, self.text[:at]))


def scripts(model: Model, devices: int, threads: int | None, seed: int) -> list[Script]:
    """Return a script for each device, from held-out cases of the families in turn."""
    made = []
    with Context(model, ContextSpec(n_ctx=POSITIONS, threads=threads)) as context:
        for number in range(devices):
            case = list(held_out(list(FAMILIES)[number % len(FAMILIES)], number // len(FAMILIES) + 1))[-1]
            prompt = model.chat_prompt([Message(turn.role, turn.text) for turn in case.prompt])[
                : POSITIONS - 2 * TOKENS
            ]
            context.clear()
            feed, text = prompt, []
            for _ in range(TOKENS + GAMMA):
                text.append(int(context.decode(feed)[0].argmax()))
                feed = np.array(text[-1:], dtype=np.int32)
            made.append(Script(prompt, np.array(text, dtype=np.int32), seed + number))
    return made


class Worker:
    """The verifier's engine alone, with room for every device."""

    def __init__(self, model: Model, work: list[Script], threads: int | None, limits: SchedulerLimits) -> None:
        context = Context(model, ContextSpec(n_ctx=POSITIONS, n_seq=len(work), threads=threads, unified=False))
        self._worker = VerifierWorker(context, len(work), lambda _token: False, limits)
        self._worker.start()
        self._work = work
        self._written = [0] * len(work)
        self._over = threading.Semaphore(0)

    def close(self) -> None:
        self._worker.close()

    def rate(self) -> float:
        """Return the tokens a second; the prompts are in the cache before the clock starts."""
        for device, script in enumerate(self._work):
            self._submit(VerifyRequest(device, GREEDY, 0, script.prompt, Chunk()))
        self._wait()
        before, began = sum(self._written), perf_counter()
        for device in range(len(self._work)):
            self._go_on(device)
        self._wait()
        seconds = perf_counter() - began
        written = sum(self._written) - before
        for device in range(len(self._work)):
            self._worker.end_session(device)
            self._written[device] = 0
        return written / seconds

    def _wait(self) -> None:
        for _ in self._work:
            self._over.acquire()

    def _submit(self, request: VerifyRequest) -> None:
        self._worker.submit(request, partial(self._answered, request.session))

    def _go_on(self, device: int) -> None:
        script, at = self._work[device], self._written[device]
        held = len(script.prompt) + at - 1
        self._submit(VerifyRequest(device, GREEDY, held, script.prefix(at)[held:], script.chunk(at), round=at + 1))

    def _answered(self, device: int, answer: Answer) -> None:
        assert isinstance(answer, Verdict), answer
        first = not self._written[device]
        self._written[device] += answer.accepted + len(answer.tokens)
        if first or self._written[device] >= TOKENS:
            self._over.release()
        else:
            self._go_on(device)


def through_link(remote: RemoteVerifier, work: list[Script]) -> float:
    """Return the tokens a second of a verifier process, the prompts sent before the clock starts."""
    sessions = [remote.open(GenerationState()) for _ in work]
    for session, script in zip(sessions, work, strict=True):
        session.submit(script.prompt, Chunk()).result()

    def drive(device: int) -> int:
        at = 1
        while at < TOKENS:
            verdict = sessions[device].submit(work[device].prefix(at), work[device].chunk(at)).result()
            at += verdict.accepted + len(verdict.tokens)
        return at - 1

    with ThreadPoolExecutor(len(work)) as pool:
        began = perf_counter()
        written = sum(pool.map(drive, range(len(work))))
        seconds = perf_counter() - began
    for session in sessions:
        session.close()
    return written / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="edgellm-verifier")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="serve_throughput", help="of the result file")
    arguments = parser.parse_args()
    path, threads, most = Path(resolve(arguments.model)), arguments.threads, max(arguments.devices)
    rows = []
    print(HEAD)
    served = VerifierProcess(path, sessions=most, threads=threads)
    try:
        with Model.load(path) as model:
            remote = served.connect(model)
            everything = scripts(model, most, threads, arguments.seed)
            for devices in arguments.devices:
                work = everything[:devices]
                with (
                    closing(Worker(model, work, threads, SchedulerLimits())) as batched,
                    closing(Worker(model, work, threads, SchedulerLimits(rows=1))) as single,
                ):
                    together, one_by_one, link = alternate(
                        arguments.repeats, batched.rate, single.rate, partial(through_link, remote, work)
                    )
                rows.append(
                    {
                        "devices": devices,
                        "together": spread(together),
                        "one_by_one": spread(one_by_one),
                        "link": spread(link),
                        "gain": spread([a / b for a, b in zip(together, one_by_one, strict=True)]),
                        "link_share": spread([a / b for a, b in zip(link, together, strict=True)]),
                    }
                )
                print(_line(rows[-1]), flush=True)
            remote.close()
    finally:
        served.close()
    figures = {"model": path.name, "tokens_per_second": rows, "load_average": os.getloadavg()[0]}
    print(f"written: {write(arguments.name, 'bench.engine.serve_throughput', figures, arguments.seed)}")


def table(found: dict[str, Any]) -> str:
    """Return a line for each number of devices: medians of tokens a second, and their ratios."""
    return "\n".join([HEAD, *map(_line, found["tokens_per_second"])]) + "\n"


def _line(row: dict[str, Any]) -> str:
    speeds = "".join(f"{row[name]['median']:>12.0f}" for name in ("together", "one_by_one", "link"))
    return f"{row['devices']:>7}{speeds}{row['gain']['median']:>8.2f}{row['link_share']['median']:>12.2f}"


if __name__ == "__main__":
    main()
