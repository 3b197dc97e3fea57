"""A mesh worker in a process of its own, which can be killed, stopped and started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from edgellm.errors import EdgeError
from edgellm.rpc.address import Address
from edgellm.rpc.link import Endpoint
from edgellm.services.client.stage_client import RemoteDevice
from testkit import ROOT, free_port

_SERVE = """
import sys
from pathlib import Path
from edgellm.engine import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.rpc.address import Address
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.mesh.layer_sources import WholeModel
from edgellm.mesh.weight_cache import WeightCache
from edgellm.services.server.servers import WorkerServer
model, port, threads, keep = sys.argv[1:]
unit = ComputeUnit(Hardware(threads=int(threads) or None))
cache = WeightCache(WholeModel(ModelFile.open(Path(model))), unit=unit, keep=float(keep))
server = WorkerServer(cache, Address("127.0.0.1", int(port)))
server.start()
server.wait()
"""


class WorkerProcess:
    """A worker's process, which can be killed or stopped, and started again."""

    def __init__(self, model: Path, home: Path, threads: int | None = 1, keep: float = 30.0, first: str = "") -> None:
        """`first` is code that the process runs first."""
        self.port = free_port()
        words = (model, self.port, threads or 0, keep)
        self._run = [sys.executable, "-c", first + _SERVE, *map(str, words)]
        self._environment = {**os.environ, "EDGELLM_HOME": str(home)}
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._run, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def hit(self, kind: str) -> None:
        self._process.send_signal(signal.SIGSTOP if kind == "hang" else signal.SIGKILL)

    def again(self) -> None:
        """Start it again, if it was hit."""
        self.close()
        self._process = self._started()

    def processor(self) -> float:
        """Return the processor seconds that it has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        """Wait until it answers. Raise its EdgeError after a minute."""
        end = time.monotonic() + 60
        while True:
            try:
                self.member("it").describe("0" * 64)
            except EdgeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
            else:
                return

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    def member(self, name: str) -> RemoteDevice:
        return RemoteDevice(Endpoint(name, self.address))
