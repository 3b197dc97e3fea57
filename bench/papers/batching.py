"""Measure what a verifier of many devices gains by choosing draft lengths and batches together (DiP-SD, arXiv
2604.20919), beside greedy batching.

    python -m bench.papers.batching [--pair home] [--devices 16 64] [--drafts copied model] [--pauses-ms 0 100]
                                    [--verdicts 20] [--repeats 7] [--threads N]

First, the pair answers a held-out question for each device over a loopback link, greedily, with everything
verified, and all requests are recorded: `copied` with the default drafts, whose lengths vary most, `model` with those
of the draft model alone. Then all devices send their requests again to one verifier in this process, closed loop: each
sends the next request `pauses-ms` after a verdict, which is its time for drafting and the network. After its last
request a device starts again with its first. The verifier is real: model, engine and scheduler. Prompts stay in its
cache.

Greedy batching is the scheduler without `SchedulerLimits.cut_drafts`: in turns of the devices, whole drafts of equal
length. Two verifiers, one with each, take turns and keep what they have learned.

Columns: verified tokens a second, accepted ones and the verifier's own, by greedy batching and with both chosen
together; their ratio within each turn, as median and range; the same for each second of processor time, which other
programs disturb less; and, greedy first, requests in a batch, rows for each verified token, and the share of the time
in which the verifier computed. The lines below have the cost of a batch, a + c n + b r for n requests with r rows in
all, fitted to all batches. Every verdict is compared with the recorded one; rounding differs with the shape of a
batch, so a tie may turn.
"""

from __future__ import annotations

import argparse
import heapq
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.harness.report import write
from bench.harness.statistics import alternate, spread
from edgellm.engine import Model, common_prefix
from edgellm.llm import LLM
from edgellm.services.server.servers import serve_verifier
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Ids, Verdict
from edgellm.storage import resolve
from edgellm.verifier.in_process import VerifierWorker
from edgellm.verifier.requests import Answer, Deliver, Tenant, VerifyRequest
from edgellm.verifier.scheduler import SchedulerLimits
from testkit.questions import ASKED, MOST, parsed_with_pair, questions
from testkit.simulated_devices import Clocked

RETRIEVAL: Mapping[str, str] = {"copied": "auto", "model": "off"}
SCHEDULERS: Mapping[str, SchedulerLimits] = {
    "greedy": SchedulerLimits(cut_drafts=False),
    "together": SchedulerLimits(),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A recorded request, with the text before its draft, and its verdict."""

    text: Ids
    draft: Chunk
    extra: int
    verdict: Verdict


def recorded(devices: int, retrieval: str, arguments: argparse.Namespace) -> list[list[Asked]]:
    """Return the requests of one reply for each device."""
    name, threads = arguments.pair, arguments.threads
    log: list[tuple[VerifyRequest, Verdict]] = []
    submit = VerifierWorker.submit

    def recording(worker: VerifierWorker, request: VerifyRequest, deliver: Deliver) -> None:
        def answered(answer: Answer) -> None:
            if isinstance(answer, Verdict):
                log.append((request, answer))
            deliver(answer)

        submit(worker, request, answered)

    replies = []
    with patch.object(VerifierWorker, "submit", recording):
        server = serve_verifier(resolve(arguments.verifier), port=0, sessions=1, threads=threads)
        try:
            with LLM.open(arguments.draft, str(server.address), threads=threads) as pair:
                for question in islice(questions(-(-devices // len(ASKED[name])), pair=name), devices):
                    log.clear()
                    reply = pair.reply(
                        question.messages, max_tokens=MOST, seed=0, retrieval=retrieval, parallel=False
                    )  # fmt: skip
                    for _ in reply:
                        pass
                    replies.append(list(log))
        finally:
            server.stop()
    return [_texts(reply) for reply in replies]


def _texts(reply: Sequence[tuple[VerifyRequest, Verdict]]) -> list[Asked]:
    """Return the requests of a reply with their whole texts, without the first one: it sends the prompt while the
    device drafts."""
    asked, held = [], NO_IDS
    for request, verdict in reply:
        text = np.concatenate((held[: request.position], request.prefix))
        asked.append(Asked(text, request.draft, request.extra, verdict))
        held = np.concatenate((text, request.draft.ids[: verdict.accepted], verdict.tokens[:-1]))
    return asked[1:]


@dataclass(slots=True)
class Device:
    """A device that repeats its requests."""

    number: int
    asked: list[Asked]
    at: int = 0
    held: Ids = field(default_factory=lambda: NO_IDS)
    """What the verifier holds of its session."""

    def request(self) -> VerifyRequest:
        """Return the next request."""
        asked = self.asked[self.at]
        position = common_prefix(self.held, asked.text)
        tenant = Tenant(str(self.number))
        prefix = asked.text[position:]
        return VerifyRequest(self.number, GREEDY, position, prefix, asked.draft, asked.extra, tenant=tenant)

    def answered(self, verdict: Verdict) -> bool:
        """Go on to the next request; return whether the verdict is the recorded one."""
        asked = self.asked[self.at]
        self.held = np.concatenate((asked.text, asked.draft.ids[: verdict.accepted], verdict.tokens[:-1]))
        self.at = (self.at + 1) % len(self.asked)
        return (verdict.accepted, verdict.tokens.tolist()) == (asked.verdict.accepted, asked.verdict.tokens.tolist())


class Timed(Clocked):
    """A context that keeps the seconds of each batch, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.taken: list[float] = []
        super().__init__(*arguments, **options)

    def decode_rows(self, *arguments: Any) -> Any:
        before = self.seconds
        views = super().decode_rows(*arguments)
        self.taken.append(self.seconds - before)
        return views


class Counted:
    """What is verified until there are `wanted` verdicts."""

    def __init__(self, wanted: int) -> None:
        self.over = wanted == 0
        self.tokens = self.verdicts = self.different = self.passes = 0
        self.seconds = self.processor = self.computing = 0.0
        self.batches: list[list[tuple[int, int, int]]] = []
        self.taken: list[float] = []
        self._wanted, self._began = wanted, (perf_counter(), process_time())

    def add(self, verdict: Verdict, same: bool, context: Timed) -> None:
        """Count a verdict; `same`: it is the recorded one."""
        self.tokens += verdict.accepted + len(verdict.tokens)
        self.verdicts += 1
        self.different += not same
        self.passes += verdict.passes
        if self.verdicts == self._wanted:
            self.over = True
            self.seconds, self.processor = perf_counter() - self._began[0], process_time() - self._began[1]
            self.computing = context.seconds
            self.batches, self.taken = list(context.batches), list(context.taken)


class ClosedLoop:
    """A verifier's worker, and devices that each send a request `pause` seconds after the verdict on the last."""

    def __init__(
        self, model: Model, replies: list[list[Asked]], limits: SchedulerLimits, pause: float, threads: int | None
    ) -> None:
        positions = max(len(asked.text) + len(asked.draft) + asked.extra for reply in replies for asked in reply) + 1
        self._context = Timed(model, len(replies), threads, limits, positions)
        self._worker = VerifierWorker(self._context, len(replies), model.is_eog, limits)
        self._devices = [Device(number, reply) for number, reply in enumerate(replies)]
        self._pause = pause
        self._lock = threading.Condition()
        self._due: list[tuple[float, int]] = []  # when devices send their next requests
        self._open = 0  # requests without a verdict
        self._counted = Counted(0)
        self._worker.start()
        self._due = [(0.0, device.number) for device in self._devices]
        self.run(len(replies))  # every prompt is computed once

    def run(self, verdicts: int) -> Counted:
        """Let the devices ask until there are so many verdicts, and return what was counted until then. What is still
        open then is answered without being counted."""
        counted = Counted(verdicts)
        self._context.seconds = 0.0
        self._context.batches.clear()
        self._context.taken.clear()
        with self._lock:
            self._counted = counted
            self._due = [(0.0, number) for _, number in self._due]
            heapq.heapify(self._due)
        while True:
            with self._lock:
                if counted.over:
                    break
                now = perf_counter()
                some = []
                while self._due and self._due[0][0] <= now:
                    some.append(heapq.heappop(self._due)[1])
                self._open += len(some)
                if not some:
                    self._lock.wait(self._due[0][0] - now if self._due else None)
            for number in some:
                self._worker.submit(self._devices[number].request(), partial(self._answered, number))
        with self._lock:
            while self._open:
                self._lock.wait()
        return counted

    def close(self) -> None:
        self._worker.close()

    def _answered(self, number: int, answer: Answer) -> None:
        if not isinstance(answer, Verdict):
            raise TypeError(f"no verdict: {answer}")
        same = self._devices[number].answered(answer)
        with self._lock:
            if not self._counted.over:
                self._counted.add(answer, same, self._context)
            self._open -= 1
            heapq.heappush(self._due, (perf_counter() + self._pause, number))
            self._lock.notify()


def compared(model: Model, replies: list[list[Asked]], pause: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both schedulers, which take turns."""
    loops = {name: ClosedLoop(model, replies, limits, pause, arguments.threads) for name, limits in SCHEDULERS.items()}
    found: dict[str, list[Counted]] = {name: [] for name in loops}
    wanted = arguments.verdicts * len(replies)
    try:
        for loop in loops.values():
            loop.run(wanted)  # warms up, and learns

        def rate(name: str) -> float:
            counted = loops[name].run(wanted)
            found[name].append(counted)
            return counted.tokens / counted.seconds

        greedy, together = alternate(arguments.repeats, *(partial(rate, name) for name in loops))
    finally:
        for loop in loops.values():
            loop.close()
    return {
        "tokens_per_second": {"greedy": spread(greedy), "together": spread(together)},
        "ratio": spread([ours / theirs for ours, theirs in zip(together, greedy, strict=True)]),
        "processor_ratio": spread(
            [
                (ours.tokens / ours.processor) / (theirs.tokens / theirs.processor)
                for ours, theirs in zip(found["together"], found["greedy"], strict=True)
            ]
        ),
        "shape": {name: shape(some) for name, some in found.items()},
        "cost": cost([counted for some in found.values() for counted in some]),
    }


def shape(some: Sequence[Counted]) -> dict[str, float]:
    """Return what the batches were like."""
    tokens, verdicts = sum(one.tokens for one in some), sum(one.verdicts for one in some)
    batches = [batch for one in some for batch in one.batches]
    rows = sum(rows for batch in batches for _, rows, _ in batch)
    return {
        "requests_per_batch": float(np.mean([len(batch) for batch in batches])),
        "rows_per_token": rows / tokens,
        "passes_per_verdict": sum(one.passes for one in some) / verdicts,
        "computing": sum(one.computing for one in some) / sum(one.seconds for one in some),
        "different": sum(one.different for one in some) / verdicts,
    }


def cost(some: Sequence[Counted]) -> dict[str, float]:
    """Return the milliseconds of a batch, of a request in it, and of a row, by least relative squares."""
    shapes = [(1.0, len(batch), sum(rows for _, rows, _ in batch)) for one in some for batch in one.batches]
    taken = np.array([1e3 * seconds for one in some for seconds in one.taken])
    fitted = np.linalg.lstsq(np.array(shapes) / taken[:, None], np.ones(len(taken)), rcond=None)[0]
    return dict(zip(("batch_ms", "request_ms", "row_ms"), fitted.tolist(), strict=True))


HEAD = (
    f"{'drafts':<8}{'devices':>8}{'pause':>8}{'greedy':>9}{'together':>10}{'ratio':>8}{'range':>13}"
    f"{'processor':>18}{'requests':>14}{'rows':>12}{'computing':>13}"
)


def _row(row: dict[str, Any]) -> str:
    rates, ratio, processor = row["tokens_per_second"], row["ratio"], row["processor_ratio"]
    greedy, together = (row["shape"][name] for name in SCHEDULERS)

    def both(key: str, form: str) -> str:
        return f"{greedy[key]:{form}} {together[key]:{form}}"

    return (
        f"{row['drafts']:<8}{row['devices']:>8}{row['pause_ms']:>5.0f} ms{rates['greedy']['median']:>9.0f}"
        f"{rates['together']['median']:>10.0f}{ratio['median']:>8.2f}{ratio['min']:>8.2f}-{ratio['max']:.2f}"
        f"{processor['median']:>8.2f}{processor['min']:>6.2f}-{processor['max']:.2f}"
        f"{both('requests_per_batch', '.1f'):>14}{both('rows_per_token', '.2f'):>12}{both('computing', '.0%'):>13}"
    )


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each kind of drafts, number of devices and pause, and one with the cost of a batch."""
    rows = found["rows"]
    costs = [
        f"{row['drafts']}, {row['devices']} devices, {row['pause_ms']:.0f} ms: {row['cost']['batch_ms']:.2f} ms"
        f" + {row['cost']['request_ms']:.2f} ms a request + {row['cost']['row_ms']:.2f} ms a row;"
        f" {row['shape']['together']['passes_per_verdict']:.2f} passes a verdict, {different(row):.2%} verdicts turned"
        for row in rows
    ]
    return "\n".join([HEAD, *map(_row, rows), *costs]) + "\n"


def different(row: dict[str, Any]) -> float:
    """Return the larger share of verdicts that are not the recorded ones."""
    share: float = max(shape["different"] for shape in row["shape"].values())
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--drafts", choices=RETRIEVAL, nargs="+", default=list(RETRIEVAL))
    parser.add_argument("--pauses-ms", type=float, nargs="+", default=[0.0, 100.0])
    parser.add_argument("--verdicts", type=int, default=20, help="of each device in a turn, in the mean")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="batching", help="of the result file")
    arguments = parsed_with_pair(parser)
    rows = []
    print(HEAD)
    with Model.load(resolve(arguments.verifier)) as model:
        for drafts in arguments.drafts:
            replies = recorded(max(arguments.devices), RETRIEVAL[drafts], arguments)
            for devices in arguments.devices:
                for pause in arguments.pauses_ms:
                    found = compared(model, replies[:devices], 1e-3 * pause, arguments)
                    rows.append({"drafts": drafts, "devices": devices, "pause_ms": pause, **found})
                    print(_row(rows[-1]), flush=True)
    figures = {"pair": arguments.pair, "rows": rows, "load_average": os.getloadavg()[0]}
    print(table(figures), end="")
    print(f"written: {write(arguments.name, 'bench.papers.batching', figures)}")


if __name__ == "__main__":
    main()
