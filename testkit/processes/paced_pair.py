"""The bundled pair at the pace of a device: 30 ms a drafted token, 60 ms a verification, over a home's network.

The pair's own speed says little about devices: its draft model takes a third of a millisecond for a token. So every
decode of the draft model and every pass of the verifier is made to last a given time. All else is real: two processes,
gRPC, and a relay with the network's bandwidth and round trip between them.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from edgellm.engine import Context
from edgellm.llm import LLM
from edgellm.llm import engine as made
from testkit import ROOT, free_port, until_listening
from testkit.network.relay import Network, Relay

TOKEN, PASS = 0.030, 0.060  # seconds

_SERVE = """
import sys
from functools import partial
from pathlib import Path
from testkit.processes.paced_pair import Paced
from edgellm.engine.hardware import Hardware
from edgellm.services.server.servers import Listening, serve_verifier
from edgellm.verifier import worker
model, port, pace, sessions = sys.argv[1:]
worker.Context = partial(Paced, pace=float(pace))
hardware = Hardware(threads=1, n_ctx=1024)
serve_verifier(Path(model), Listening(port=int(port)), int(sessions), hardware=hardware).wait()
"""


class Paced(Context):
    """A context in which each decode lasts at least `pace` seconds."""

    def __init__(self, *arguments: Any, pace: float, **options: Any) -> None:
        self._pace = pace
        super().__init__(*arguments, **options)

    def _run(self, n: int, batch: Any) -> None:
        end = time.perf_counter() + self._pace
        super()._run(n, batch)
        time.sleep(max(0.0, end - time.perf_counter()))


@contextmanager
def paced_verifier(model: Path, pace: float, network: Network, sessions: int = 2) -> Iterator[Relay]:
    """Run a verifier at `pace` in a process of its own, and yield the relay in front of it."""
    port = free_port()
    command = [sys.executable, "-c", _SERVE, str(model), str(port), str(pace), str(sessions)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        until_listening(port, process)
        with Relay(port, network) as relay:
            yield relay
    finally:
        process.kill()
        process.wait()


@contextmanager
def paced_pair(draft: str | None, verifier: str, pace: float) -> Iterator[LLM]:
    """Yield a pair whose draft model decodes at `pace`; the other arguments are as in `LLM.open`."""
    paced = patch.object(made, "Context", partial(Paced, pace=pace))
    with paced, LLM.open(draft, verifier, threads=1, tokenizer="edgellm-draft") as pair:
        yield pair
