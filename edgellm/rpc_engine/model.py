"""A model over the RPC servers of several devices; when a device is lost, it is loaded again over the rest.

The context lives in a child process, with the text's cache. A loss ends that process: the text itself is with the
sessions, which are told that the verifier is busy until the model is loaded again, and then send it once more.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from edgellm import errors
from edgellm.engine import ContextSpec, Floats, Ids, ModelFile, SeqRows
from edgellm.engine.hardware import N_BATCH
from edgellm.layer_range import HERE, StageShare
from edgellm.mesh.coordinator import check_shares
from edgellm.mesh.weight_cache import ComputeUnit
from edgellm.rpc.link import Endpoint
from edgellm.rpc_engine.plan import MARGIN, rpc_costs
from edgellm.rpc_engine.process import ModelProcess, ProcessSilent
from edgellm.rpc_engine.session import RpcPort
from edgellm.spec.protocols import Capabilities
from edgellm.spec.sampling import GrammarState
from edgellm.spec.types import NO_IDS
from edgellm.spec.verification import VerdictDeadline, VerdictWork
from edgellm.verifier.scheduler import SchedulerLimits
from edgellm.verifier.worker import ColocatedVerifier, VerifierWorker

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BLAME_SECONDS = 1.0  # wait for a session to report its loss, once llama.cpp has ended the process over it
_CRASHES = 3  # crashes of the process in a row with no device at fault
_RETRY_SECONDS = 5.0  # before all devices are tried again, and the least announced time of loading again
LOAD_SILENCE = 120.0
"""Seconds of silence while a model is loaded: a server may read a large tensor from its disk meanwhile."""
LEAST_SILENCE = 10.0
"""Seconds of silence in any other order: giving up a device costs that the model is loaded again."""


Planner = Callable[[Collection[str]], Sequence[StageShare]]
"""Returns each device's layers, in order, over the devices of these names and this device. Raises PlanImpossible."""


@dataclass(frozen=True, slots=True)
class RpcWork:
    """A model and its context, and the `unit` that computes this device's own share."""

    file: ModelFile
    context: ContextSpec
    unit: ComputeUnit


@dataclass(slots=True, eq=False)
class _Opened:
    """A loaded model: its process, the sessions at the other devices, and how long these may be silent."""

    shares: tuple[StageShare, ...]
    process: ModelProcess
    hosts: tuple[RpcPort, ...] = ()
    deadline: VerdictDeadline = field(default_factory=lambda: VerdictDeadline(LEAST_SILENCE))

    def close(self) -> None:
        self.process.close()
        for host in self.hosts:
            host.close()


class RpcModel:
    """A `ModelRunner` for the verifier's engine. One thread decodes.

    Decodes raise VerifierBusy while the model is being loaded again, and MeshBroken while it cannot be loaded: then all
    devices are tried again from time to time.
    """

    def __init__(
        self, work: RpcWork, devices: Sequence[Endpoint], plan: Planner, notify: Callable[[str], None] | None = None
    ) -> None:
        """Set up the model; `open` loads it. `notify` is called with every change, in words for people."""
        self.work = work
        self._devices = {device.name: device for device in devices}
        self._plan, self._notify = plan, notify or (lambda _text: None)
        self._costs = rpc_costs(work.file)
        self._lock = threading.Lock()
        self._opened: _Opened | None = None
        self._closed = threading.Event()
        self._loading: ModelProcess | None = None
        self._reopening: threading.Thread | None = None
        self._lost: dict[str, errors.EdgeError] = {}
        self._broken: errors.EdgeError | None = None
        self._stale: set[int] = set()  # sequences of an ended process, not synced since
        self._crashes = 0
        self._load_seconds = 0.0
        self.shares: tuple[StageShare, ...] = ()
        """The layers of each device now, or last."""

    def open(self, progress: Callable[[float], None] | None = None) -> None:
        """Load the model. `progress` is called with the share that is loaded, in 0..1. Raises PlanImpossible: the
        devices cannot hold it; InvalidOption: this device's layers are not the first ones; ModelUnsupported,
        EngineFailed: llama.cpp cannot use it; DeviceLost: a device cannot be used; as for `RpcPort.open`."""
        self._install(self._load(tuple(self._devices), progress))

    @property
    def ready(self) -> bool:
        """Return whether the model is loaded."""
        return self._opened is not None

    def decode_rows(self, rows: list[SeqRows]) -> list[Floats]:
        """Decode rows. Raise VerifierBusy for a sequence that was lost, and MeshBroken."""
        if any(one.seq in self._stale for one in rows):
            raise self._away()
        found = self._asked(lambda process: process.decode_rows(rows), sum(len(one.ids) for one in rows))
        self._crashes = 0
        return found

    def cached(self, seq: int = 0) -> Ids:
        opened = self._opened
        return NO_IDS if opened is None or seq in self._stale else opened.process.cached(seq)

    def sync(self, ids: Ids, seq: int = 0) -> int:
        """Sync a sequence. Raise VerifierBusy and MeshBroken."""
        if self._opened is not None:
            self._stale.discard(seq)
        return self._asked(lambda process: process.sync(ids, seq))

    def rollback(self, length: int, seq: int = 0) -> None:
        """Roll back. If the process has ended, the next decode says so."""
        self._quietly(lambda process: process.rollback(length, seq), seq)

    def copy_prefix(self, src: int, dst: int, length: int) -> None:
        """Copy a prefix. If the process has ended, the next decode says so."""
        self._quietly(lambda process: process.copy_prefix(src, dst, length), src)

    def clear(self, seq: int = 0) -> None:
        self._quietly(lambda process: process.clear(seq), seq)
        self._stale.discard(seq)

    def fill(self, widths: Sequence[int]) -> None:
        """Do nothing: no decode is padded."""

    def stop(self) -> None:
        """Have decodes end at once; the model is not loaded again."""
        self._closed.set()
        for process in (self._loading, None if (opened := self._opened) is None else opened.process):
            if process is not None:
                process.kill()

    def close(self) -> None:
        """End the process and all sessions."""
        self.stop()
        if self._reopening is not None:
            self._reopening.join()
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _quietly(self, change: Callable[[ModelProcess], None], seq: int) -> None:
        if self._opened is not None and seq not in self._stale:
            with suppress(errors.VerifierUnavailable):
                self._asked(change)

    def _asked(self, ask: Callable[[ModelProcess], T], rows: int = 0) -> T:
        """Return what `ask` returns for the process, which computes `rows` rows. The longest silence follows from the
        fastest pass seen, and from the rows: reading a prompt may take long. Raise VerifierBusy and MeshBroken."""
        if (opened := self._opened) is None:
            raise self._away()
        work, began = VerdictWork(rows, 1), time.perf_counter()
        opened.process.expect(opened.deadline.limit(work))
        try:
            found = ask(opened.process)
        except errors.DeviceLost as error:
            self._lose(opened, error)
            raise self._away() from None
        if rows:
            opened.deadline.record(work, time.perf_counter() - began)
        return found

    def _away(self) -> errors.EdgeError:
        """Return why the model cannot be asked now."""
        broken = self._broken
        if broken is not None:
            return errors.MeshBroken(broken.what, broken.next_step)
        if self._closed.is_set():
            return errors.MeshBroken("The model is closed.", "Open it again.")
        seconds = max(_RETRY_SECONDS, 2 * self._load_seconds)
        return errors.VerifierBusy("A device was lost: the model is loaded on the others.", "Wait a moment.", seconds)

    # Losses.

    def _lose(self, opened: _Opened, error: errors.DeviceLost | None = None) -> None:
        """Give up a process that has ended or is about to; begin to load the model again."""
        if isinstance(error, ProcessSilent):
            _blame_silent(opened.hosts, error.seconds)
        with self._lock:
            if self._opened is not opened or self._closed.is_set():
                return
            self._opened = None
            self._stale = set(range(self.work.context.n_seq))
            self._reopening = threading.Thread(
                target=self._reopen, args=(opened,), name="edgellm-rpc-reopen", daemon=True
            )
            self._reopening.start()

    def _session_lost(self, opened: _Opened) -> None:
        opened.process.kill()
        self._lose(opened)

    def _reopen(self, opened: _Opened) -> None:
        if not self._blame(opened):
            self._crashes += 1
        opened.close()
        while not self._closed.is_set():
            known = len(self._lost)
            try:
                if self._crashes > _CRASHES:
                    raise errors.DeviceLost("The process that holds the model ends again and again.", "Open it again.")
                self._install(self._load([name for name in self._devices if name not in self._lost]))
            except errors.EdgeError as error:
                if len(self._lost) > known:
                    continue
                why = "".join(f" {name}: {lost.what}" for name, lost in self._lost.items())
                self._broken = errors.PlanImpossible(error.what + why, error.next_step)
            else:
                return
            self._closed.wait(_RETRY_SECONDS)
            self._lost.clear()
            self._crashes = 0

    def _blame(self, opened: _Opened) -> bool:
        """Note the devices whose sessions are lost; return whether there are any."""
        if opened.hosts:
            wait_for([host.lost for host in opened.hosts], _BLAME_SECONDS, return_when="FIRST_COMPLETED")
        lost = {host.name: host.lost.result() for host in opened.hosts if host.lost.done()}
        self._lost |= lost
        return bool(lost)

    # Loading.

    def _install(self, opened: _Opened) -> None:
        with self._lock:
            again, why = bool(self.shares), "; ".join(f"{name}: {error.what}" for name, error in self._lost.items())
            self._opened, self.shares, self._broken = opened, opened.shares, None
        if again:
            who = ", ".join(f"{share.name} {share.layers}" for share in opened.shares)
            cause = f"A device was lost ({why})" if why else "The process that held the model has ended."
            _log.warning("%s The layers are now on %s", cause, who)
            self._notify(f"{cause} The layers are now on {who}; the reply continues.")
        for host in opened.hosts:
            host.lost.add_done_callback(lambda _error: self._session_lost(opened))
        if self._closed.is_set():
            opened.process.kill()

    def _load(self, names: Collection[str], progress: Callable[[float], None] | None = None) -> _Opened:
        """Load the model over some devices and this one. If one of them cannot be used, raise why; it is then lost."""
        began = time.monotonic()
        work = self.work
        vocabulary, cards = self._costs.vocabulary, work.unit.devices if work.unit.name else ()
        process = self._loading = ModelProcess(work.file.path, vocabulary, work.context, work.unit.hardware)
        hosts: list[RpcPort] = []
        try:
            shares = self._checked(self._plan(names))
            remote = [share for share in shares if share.name != HERE]
            hosts += self._sessions(remote, *(process.beside_weights() if remote else (0, 0)))
            ports = self._ports(hosts, process.pid)
            served = [(port, len(share.layers)) for port, share in zip(ports, remote, strict=True)]
            own = sum(len(share.layers) for share in shares if share.name == HERE)
            process.expect(LOAD_SILENCE, lambda: [host.traffic.moved for host in hosts])
            process.load(served, cards, own if cards else 0, progress)
        except BaseException as error:
            opened = _Opened((), process, tuple(hosts))
            if isinstance(error, ProcessSilent):
                _blame_silent(hosts, error.seconds)
            lost = isinstance(error, errors.DeviceLost) and self._blame(opened)
            opened.close()
            if lost:
                raise next(self._lost[host.name] for host in hosts if host.name in self._lost) from None
            raise
        for host in hosts:
            host.confirm()
        self._load_seconds = time.monotonic() - began
        return _Opened(shares, process, tuple(hosts))

    def _checked(self, shares: Sequence[StageShare]) -> tuple[StageShare, ...]:
        """Return the shares if llama.cpp can lay the layers out like that."""
        check_shares(shares, self._costs.layers, (HERE, *self._devices))
        names = [share.name for share in shares]
        if HERE in names and names.index(HERE) != (len(names) - 1 if self.work.unit.name else 0):
            raise errors.InvalidOption(
                f"This device has layers {shares[names.index(HERE)].layers} of {self._costs.name}.",
                f"Over RPC it can only have the {'last' if self.work.unit.name else 'first'} ones.",
            )
        return tuple(shares)

    def _sessions(self, shares: Sequence[StageShare], caches: int, compute: int) -> list[RpcPort]:
        costs, hosts = self._costs, []
        for share in shares:
            weights = costs.weights(share.layers)
            memory = weights + caches * len(share.layers) // costs.layers + compute + MARGIN
            hosts.append(RpcPort(self._devices[share.name], memory=memory, weights=weights, model=costs.name))
        return hosts

    def _ports(self, hosts: Sequence[RpcPort], process: int) -> list[int]:
        """Open all sessions at once; return their ports, which lead only the process there."""

        def open_one(host: RpcPort) -> int:
            try:
                return host.open(process)
            except errors.EdgeError as error:
                self._lost[host.name] = error
                raise

        if not hosts:
            return []
        with ThreadPoolExecutor(len(hosts)) as pool:
            return list(pool.map(open_one, hosts))


def _blame_silent(hosts: Sequence[RpcPort], seconds: float) -> None:
    """Blame the server that was asked last and has not answered, as llama.cpp waits for one server at a time; blame no
    server if none owes an answer."""
    asked = [(at, number) for number, host in enumerate(hosts) if (at := host.traffic.asked_at) is not None]
    if not asked:
        _log.warning("the process that holds the model has done nothing for %.0f seconds, and is ended", seconds)
        return
    host = hosts[max(asked)[1]]
    host.blame(
        errors.DeviceLost(
            f"The RPC server on {host.name} hangs: no answer for {seconds:.0f} seconds. If that happens again,"
            " restart edgellm there.",
            f"See what keeps {host.name} busy: its processor, its memory, or a graphics driver.",
        )
    )


class RpcVerifier(ColocatedVerifier):
    """A verifier over `model`, which is closed with it."""

    def __init__(
        self, model: RpcModel, is_eog: Callable[[int], bool], grammar: Callable[[str], GrammarState] | None
    ) -> None:
        """Answer from `model`, which is open. `grammar` returns the grammar of a JSON schema."""
        self.model, context, default = model, model.work.context, SchedulerLimits()
        rows = context.n_batch or N_BATCH  # each batch crosses the network, so a prompt goes in few batches
        limits = replace(default, rows=rows, chunk=min(default.chunk, rows), solo_chunk=rows)
        self._worker = VerifierWorker(model, context.n_seq, is_eog, limits, ready=lambda: model.ready)
        capabilities = Capabilities(
            model.work.file.name, context.n_ctx, logprobs=True, penalties=True, grammars=grammar is not None
        )
        super().__init__(self._worker, capabilities, grammar)
        self._worker.start()

    def close(self) -> None:
        """Close it, and give up a decode."""
        self.model.stop()
        self._worker.close()
