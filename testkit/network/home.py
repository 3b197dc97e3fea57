"""A home on one machine: network namespaces with real bandwidths, disks and processors that are really throttled.

    specs = [Spec("desk", up=100, down=200, disk=80, cpu=1.0), Spec("phone", up=20, disk=30, cpu=0.5)]
    with home(specs, folder) as (desk, phone), phone.worker():
        print(desk.edge("mesh", "peers"))

Each machine has a namespace, a veth pair to one bridge with `tc tbf` on both of its ends, a control group (v1) with
`blkio.throttle.read_bps_device` and a CPU quota, and a home folder of its own with an identity; all are paired with
each other. Everything is removed when the `with` ends. It needs root; `why_not()` says what else is missing.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.rpc.trust.trust import Peer, Right, Trust
from testkit import ROOT, environment

GROUPS = Path("/sys/fs/cgroup")
_PERIOD = 10_000  # microseconds of a CPU quota: a machine is slow all the time, not fast and then stopped
_FIRST = 100_000  # other programs have 1,024, so that a machine gets its share beside them
_NET = "10.79.0"


class Machine:
    """A network namespace with a home folder of its own."""

    def __init__(self, name: str, home: Path, before: Sequence[str] = (), *, brief: bool = False) -> None:
        """`before`: words that start a command, such as those of a shell that joins a control group. `brief`: its speed
        is measured as by `testkit.processes.brief_figures`."""
        self.name, self.home, self._before = name, home, tuple(before)
        self._python = (sys.executable, "-m", *(("testkit.processes.brief_figures",) if brief else ()))

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", "-n", self.name, *words], check=True, capture_output=True)

    def start(self, *words: str, module: str = "edgellm", program: Sequence[str] = ()) -> subprocess.Popen[str]:
        """Start a command in the namespace: a module of Python's, or another `program`."""
        return subprocess.Popen(
            [*self._before, "ip", "netns", "exec", self.name, *(program or (*self._python, module)), *words],
            cwd=ROOT,
            env=environment()
            | {"EDGELLM_HOME": str(self.home), "LLAMA_CACHE": str(self.home / "llama"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def edge(self, *words: str) -> str:
        """Run an edgellm command to its end and return both of its streams."""
        out, err = self.start(*words).communicate(timeout=300)
        assert "Traceback" not in err, err
        return out + err

    def json(self, *words: str) -> Any:
        out, err = self.start(*words, "--json").communicate(timeout=300)
        assert "Traceback" not in err, err
        assert out, err
        return json.loads(out)

    @contextmanager
    def running(
        self, *words: str, until: str, module: str = "edgellm", program: Sequence[str] = ()
    ) -> Iterator[list[str]]:
        """Run a command in the background; wait for a line that matches `until`, then yield all printed lines."""
        process, printed = self.start(*words, module=module, program=program), list[str]()
        news = threading.Condition()
        assert process.stderr is not None
        assert process.stdout is not None

        def read(lines: Any) -> None:
            for line in lines:
                with news:
                    printed.append(line)
                    news.notify_all()

        readers = [threading.Thread(target=read, args=(pipe,)) for pipe in (process.stderr, process.stdout)]
        for reader in readers:
            reader.start()
        try:
            with news:
                assert news.wait_for(lambda: re.search(until, "".join(printed)), 90), "".join(printed)
            yield printed
        finally:
            process.send_signal(signal.SIGTERM if program else signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            for reader in readers:
                reader.join()
            process.stdout.close()
            process.stderr.close()


@dataclass(frozen=True, slots=True)
class Spec:
    """The specification of a machine; 0 is no limit.

    `up` and `down` are Mbit/s to and from the others, `disk` is MB/s, `cpu` is processor cores. The machine sees whole
    cores, and uses as many threads; machines that need less than a core share one, see `cores`.
    """

    name: str
    up: float = 0.0
    down: float = 0.0
    disk: float = 0.0
    cpu: float = 0.0


class Throttled(Machine):
    """A machine of a home; `address` is its own in the home's network."""

    def __init__(self, name: str, spec: Spec, home: Path, place: int, cores: Sequence[int], *, brief: bool) -> None:
        self.spec, self.address = spec, f"{_NET}.{place}"
        self._groups = [GROUPS / kind / name for kind in ("blkio", "cpu")]
        self._device = ""
        joins = "".join(f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && " for group in self._groups)
        among = ",".join(map(str, cores))
        super().__init__(name, home, ("sh", "-c", f'{joins}exec taskset -c {among} "$@"', "sh"), brief=brief)

    @property
    def trust(self) -> Trust:
        return Trust.load(self.home / "data" / "trust")

    @contextmanager
    def worker(self, *words: str) -> Iterator[list[str]]:
        """Run a worker that keeps layers for the others; yield the lines that it prints."""
        serve = ("serve", "--role", "worker", "--host", self.address, "--port", "50151", *words)
        with self.running(*serve, until="Use it with") as printed:
            yield printed

    def forget(self) -> int:
        """Drop all of its files from memory, so that the next load is cold; return their bytes."""
        size = 0
        for path in self.home.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    size += path.stat().st_size
                    handle = os.open(path, os.O_RDONLY)
                    try:
                        os.fsync(handle)
                        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                    finally:
                        os.close(handle)
        return size

    def throttle(self, folder: Path) -> None:
        """Create its control groups, for the disk that `folder` is on."""
        for group in self._groups:
            group.mkdir(exist_ok=True)
        (self._groups[1] / "cpu.shares").write_text(str(_FIRST))
        (self._groups[1] / "cpu.cfs_period_us").write_text(str(_PERIOD))
        number = folder.stat().st_dev
        self._device = f"{os.major(number)}:{os.minor(number)}"
        self._limit()

    def _limit(self, disk: bool = True, cpu: bool = True) -> None:
        """Limit the disk and the processor, each only if a limit is given."""
        rate = int(self.spec.disk * 1e6) if disk else 0
        quota = int(self.spec.cpu * _PERIOD) if cpu and self.spec.cpu else -1
        (self._groups[0] / "blkio.throttle.read_bps_device").write_text(f"{self._device} {rate}")
        (self._groups[1] / "cpu.cfs_quota_us").write_text(str(quota))

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Lift the limits of its disk and cores until the `with` ends, for work that is not measured."""
        self._limit(disk=False, cpu=False)
        try:
            yield
        finally:
            self._limit()

    def leave(self) -> None:
        """Remove its namespace and its control groups."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        for group in self._groups:
            for _ in range(50):  # the last process may still be ending
                try:
                    group.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.1)
                else:
                    break


def cores(specs: Sequence[Spec], there: int) -> list[list[int]]:
    """Return the cores among `there` that each machine sees.

    The least used cores are taken, so that each machine gets its share as long as there are enough for all.
    """
    left = [1.0] * there
    found: list[list[int]] = [list(range(there))] * len(specs)
    for at in sorted((at for at, spec in enumerate(specs) if spec.cpu), key=lambda at: -specs[at].cpu):
        many = min(there, max(1, round(specs[at].cpu + 0.49)))
        found[at] = sorted(sorted(range(there), key=lambda core: -left[core])[:many])
        for core in found[at]:
            left[core] -= specs[at].cpu / many
    return found


def no_namespaces() -> str:
    """Return why no network namespace can be made here; empty if one can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux and iproute2"
    name = f"edge-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return ""


def why_not() -> str:
    """Return why no home can be made here; empty if one can."""
    if reason := no_namespaces():
        return reason
    for program in ("tc", "taskset"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    for kind, file in (("blkio", "blkio.throttle.read_bps_device"), ("cpu", "cpu.cfs_quota_us")):
        group = GROUPS / kind / f"edge-{os.getpid()}-try"
        try:
            group.mkdir()
            found = (group / file).exists()
            group.rmdir()
        except OSError as error:
            return f"no control group (v1) can be made for {kind}: {error.strerror}"
        if not found:
            return f"the control groups for {kind} have no {file}"
    return ""


@contextmanager
def home(specs: Sequence[Spec], folder: Path, *, brief: bool = False) -> Iterator[list[Throttled]]:
    """Yield the machines in the order of `specs`, until the `with` ends. `folder` is on the disk that is throttled.
    `brief` as for `Machine`."""
    hub = Machine(f"edge-{os.getpid()}-hub", folder)
    among = cores(specs, os.cpu_count() or 1)
    machines = [
        Throttled(f"edge-{os.getpid()}-{spec.name}", spec, folder / spec.name, place, among[place - 1], brief=brief)
        for place, spec in enumerate(specs, 1)
    ]
    try:
        subprocess.run(["ip", "netns", "add", hub.name], check=True, capture_output=True)
        hub.ip("link", "add", "home0", "type", "bridge")
        hub.ip("link", "set", "home0", "up")
        for place, machine in enumerate(machines, 1):
            _join(machine, hub, f"port{place}")
            machine.home.mkdir(parents=True, exist_ok=True)
            machine.throttle(folder)
        _pair(machines)
        yield machines
    finally:
        for machine in machines:
            machine.leave()
        subprocess.run(["ip", "netns", "del", hub.name], check=False, capture_output=True)


def _join(machine: Throttled, hub: Machine, port: str) -> None:
    """Connect the machine to the hub by a cable with a bandwidth in each direction."""
    subprocess.run(["ip", "netns", "add", machine.name], check=True, capture_output=True)
    machine.ip("link", "set", "lo", "up")
    machine.ip("link", "add", "lan0", "type", "veth", "peer", "name", port, "netns", hub.name)
    machine.ip("addr", "add", f"{machine.address}/24", "dev", "lan0")
    machine.ip("link", "set", "lan0", "up")
    hub.ip("link", "set", port, "master", "home0", "up")
    for where, device, rate in ((machine, "lan0", machine.spec.up), (hub, port, machine.spec.down)):
        if rate:
            burst = max(16_384, int(rate * 1e6 / 8 * 0.005))  # bytes that may be sent at once: those of 5 ms
            words = f"qdisc add dev {device} root tbf rate {rate}mbit burst {burst} latency 100ms"
            subprocess.run(["tc", "-n", where.name, *words.split()], check=True, capture_output=True)


def _pair(machines: Sequence[Throttled]) -> None:
    """Pair every two machines, with all rights."""
    from edgellm.rpc.address import Address

    known = [(machine, machine.trust) for machine in machines]
    for machine, trust in known:
        for other, theirs in known:
            if other is not machine:
                everything = frozenset(Right)
                trust.peers.add(Peer(other.spec.name, theirs.identity.certificate, everything, everything))
                trust.peers.record_seen(theirs.identity.id, Address(other.address, 50151), everything)
