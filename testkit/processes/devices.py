"""Several devices in one process, which connect, send requests, pause, leave in the middle, and reconnect.

Reads lines of JSON from stdin: `{"pause": SECONDS}` sets the mean time between two replies of a device; the process
ends with stdin. Writes a line for every reply: the milliseconds of its verdicts, and its errors.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgellm.engine import Model
from edgellm.errors import EdgeError
from edgellm.rpc.trust.trust import Trust
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Ids
from edgellm.storage import resolve

GAMMA = 4
WRONG = 0.3  # share of chunks with a token that the verifier would not write
ABRUPT = 0.1  # share of replies that are left in the middle
ROUNDS = 12  # rounds of a reply


class Pace:
    """The mean pause between two replies of a device, and the end of the process."""

    def __init__(self, pause: float) -> None:
        self.pause = pause
        self._over = threading.Event()

    def listen(self) -> None:
        for line in sys.stdin:
            self.pause = json.loads(line)["pause"]
        self._over.set()

    def rest(self, rng: random.Random) -> bool:
        """Pause; return False if the process is to end."""
        return not self._over.wait(min(rng.expovariate(1.0 / self.pause), 10 * self.pause))


class Device:
    """A device with its own connection, whose requests follow the verifier's own text."""

    def __init__(self, port: int, trust: Trust, model: Model, rng: random.Random, work: list[tuple[Ids, Ids]]) -> None:
        self._port, self._trust, self._model, self._rng, self._work = port, trust, model, rng, work

    def live(self, pace: Pace) -> None:
        while pace.rest(self._rng):
            began = time.monotonic()
            try:
                remote = RemoteVerifier(f"127.0.0.1:{self._port}", self._model.vocabulary, trust=self._trust)
            except EdgeError as error:
                _say(error=f"{type(error).__name__}: {error.what}")
                continue
            _say(connected=(time.monotonic() - began) * 1e3)
            for _ in range(self._rng.randrange(1, 7)):
                self._reply(remote)
                if not pace.rest(self._rng):
                    break
            remote.close()

    def _reply(self, remote: RemoteVerifier) -> None:
        prompt, text = self._rng.choice(self._work)
        session = remote.open(GenerationState())
        leave = self._rng.randrange(1, ROUNDS) if self._rng.random() < ABRUPT else ROUNDS
        at, waits, wrong = 0, [], 0
        error = ""
        with suppress(IndexError):
            for number in range(ROUNDS):
                chunk = text[at : at + GAMMA].copy()
                right = self._rng.random() >= WRONG
                if not right:
                    chunk[self._rng.randrange(GAMMA)] ^= 1
                began = time.monotonic()
                pending = session.submit(np.concatenate((prompt, text[:at])), Chunk(ids=chunk))
                if number == leave:
                    break
                try:
                    verdict = pending.result()
                except EdgeError as lost:
                    error = f"{type(lost).__name__}: {lost.what}"
                    break
                waits.append((time.monotonic() - began) * 1e3)
                written = np.concatenate((chunk[: verdict.accepted], verdict.tokens))
                wrong += not np.array_equal(written, text[at : at + len(written)]) or (right and len(written) <= GAMMA)
                at += len(written)
        session.close()
        _say(waits=waits, wrong=wrong, left=leave < ROUNDS, error=error)


_writing = threading.Lock()


def _say(**what: object) -> None:
    with _writing:
        print(json.dumps(what), flush=True)


def main() -> None:
    port, home, texts, devices, seed, pause = sys.argv[1:]
    pace = Pace(float(pause))
    trust = Trust.load(Path(home) / "data" / "trust")
    with np.load(texts) as kept:
        work = [(kept[f"prompt{i}"], kept[f"text{i}"]) for i in range(len(kept.files) // 2)]
    with Model.load(resolve("edgellm-draft")) as model:
        made = [Device(int(port), trust, model, random.Random(f"{seed}/{i}"), work) for i in range(int(devices))]
        threads = [threading.Thread(target=device.live, args=(pace,)) for device in made]
        for thread in threads:
            thread.start()
        pace.listen()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
