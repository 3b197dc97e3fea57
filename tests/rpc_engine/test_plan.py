"""The plan over RPC: as good as the best of all ways, and what it says of one device alone and one model each."""

import itertools
import os
import random
from dataclasses import replace
from math import inf
from pathlib import Path

import psutil
import pytest

from edgellm.coldstart.costs import Device
from edgellm.engine import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.errors import EngineFailed, ModelUnsupported, PlanImpossible
from edgellm.layer_range import HERE
from edgellm.llm.mesh_llm import choose_engine
from edgellm.rpc_engine import backend
from edgellm.rpc_engine.plan import RpcHome, RpcModelCosts, RpcPlacement, by_memory, plan_rpc
from edgellm.rpc_engine.service import TensorCache
from tests.conftest import Architectures

MB = 10**6


def model(layers: int = 6, size: int = 100 * MB) -> RpcModelCosts:
    return RpcModelCosts(
        "m", (size,) * layers, float(size), 2.0 * size, 50 * MB, 1e8, 50 * MB, 2_048, 50_000, 5.0 * MB, 20.0 * MB
    )


def device(name: str, *, flops: float = 1e11, disk: float = 3e8, memory: float = 1e10, reads: float = 1e10) -> Device:
    return Device(name, flops, 1.0, 0.05, disk, memory, 1e8, 1e8, 0.0, reads)


Site = tuple[Device, float]


def site(one: Device, *, rate: float = 1e9, latency: float = 1e-3, kept: float = 0.0) -> Site:
    """Another device, the line to it and back, and the share of the weights that it keeps."""
    return replace(one, uplink=rate, downlink=rate, latency=latency), kept


def planned(here: Device, sites: list[Site], model: RpcModelCosts, tokens_out: int = 64) -> RpcPlacement:
    """The plan for a whole reply to 128 tokens."""
    kept, here = {one.name: share for one, share in sites}, replace(here, uplink=inf, downlink=inf)
    return plan_rpc(RpcHome((here, *(one for one, _ in sites)), model, 128, tokens_out, "reply", kept))


def test_this_device_alone_if_others_only_cost_time() -> None:
    plan = planned(device("here"), [site(device("desk"), rate=1e7)], model())
    assert [share.name for share in plan.option.shares] == ["here"]
    assert plan.option == plan.alone
    assert "this device alone" in plan.advice


def test_what_does_not_fit_here_goes_to_the_device_that_computes_it_soonest() -> None:
    here = device("here", memory=400.0 * MB)
    sites = [site(device("slow", reads=1e9)), site(device("fast"))]
    plan = planned(here, sites, model())
    assert plan.alone is None
    assert {share.name for share in plan.option.shares} == {"here", "fast"}
    assert plan.option.shares[0].name == "here"
    assert sum(len(share.layers) for share in plan.option.shares) == 6
    assert "does not fit this device alone" in plan.advice


def test_weights_that_are_kept_there_load_sooner() -> None:
    here = device("here", memory=400.0 * MB)
    cold, kept = (
        planned(here, [site(device("desk"), rate=1e8, kept=share)], model(), 1).option.load_s for share in (0.0, 1.0)
    )
    assert kept < cold / 2


def test_one_model_each_where_a_device_can_hold_all_of_it() -> None:
    here = device("here", memory=400.0 * MB, reads=2e9)
    plan = planned(here, [site(device("desk"), rate=1e8, latency=5e-3)], model())
    assert plan.one_each is not None
    assert plan.one_each.shares[0].name == "desk"
    assert "one model each" in plan.advice
    small = site(device("desk", memory=400.0 * MB), rate=1e8, latency=5e-3)
    assert planned(here, [small], model()).one_each is None


def test_devices_that_are_too_small_together_are_said_so() -> None:
    with pytest.raises(PlanImpossible, match=r"needs 0.7 GB with its caches, and the devices have 0.3 GB"):
        planned(device("here", memory=2e8), [site(device("desk", memory=1e8))], model())


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_is_faster(seed: int) -> None:
    """Each way to give the layers to the devices is a plan with memories that allow nothing else."""
    rng = random.Random(seed)
    costs = model(5)

    def drawn(name: str) -> Device:
        return device(
            name, flops=10 ** rng.uniform(10, 12), disk=10 ** rng.uniform(7, 9), memory=rng.uniform(3e8, 8e8),
            reads=10 ** rng.uniform(9, 11),
        )  # fmt: skip

    here = drawn("here")
    sites = [site(drawn(name), rate=10 ** rng.uniform(7, 9), latency=10 ** rng.uniform(-4, -2)) for name in "abc"]
    best = planned(here, sites, costs, 32).option.reply_s
    for counts in itertools.product(range(6), repeat=3):
        if sum(counts) > 5:
            continue
        layer = costs.layer_bytes[0] + costs.cache
        fixed = costs.compute + costs.head
        limits = [fixed + (5 - sum(counts)) * layer + costs.embedding, *(fixed + count * layer for count in counts)]
        if any(limit > one.memory for limit, one in zip(limits, [here, *(one for one, _ in sites)], strict=True)):
            continue
        tight = [(replace(one, memory=limit), kept) for (one, kept), limit in zip(sites, limits[1:], strict=True)]
        found = planned(replace(here, memory=limits[0]), tight, costs, 32).option
        assert best <= found.reply_s * (1 + 1e-9)


def test_layers_go_where_there_is_memory_if_nothing_else_is_known() -> None:
    costs = RpcModelCosts("m", (10**8,) * 6, 1e8, 2e8, 10**7, 1e7, 10**7, 2_048, 50_000)
    assert [share.name for share in by_memory(costs, {"desk": 10**9, HERE: 10**9})] == [HERE]
    shares = by_memory(costs, {HERE: 3 * 10**8, "desk": 5 * 10**8})
    assert {share.name: len(share.layers) for share in shares} == {HERE: 2, "desk": 4}
    cards = by_memory(costs, {HERE: 3 * 10**8, "desk": 5 * 10**8}, cards=True)
    assert [share.name for share in cards] == ["desk", HERE]
    with pytest.raises(PlanImpossible, match="the devices have"):
        by_memory(costs, {HERE: 10**8, "desk": 2 * 10**8})


# --- the backend, and the models that get it --------------------------------------------------------------------------


@pytest.mark.rpc
def test_it_listens_on_loopback_alone() -> None:
    running = backend.RpcServer(Hardware(threads=1))
    connections = psutil.Process(running.pid).net_connections(kind="inet")
    listening = {(at.laddr.ip, at.laddr.port) for at in connections if at.status == psutil.CONN_LISTEN}
    running.close()
    assert listening == {("127.0.0.1", running.port)}
    assert not running.alive


@pytest.mark.rpc
def test_a_server_without_its_device_does_not_start() -> None:
    with pytest.raises(EngineFailed, match="did not start"):
        backend.RpcServer(Hardware(threads=1), ("VOODOO0",))


def test_without_the_backend_it_is_said_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "is_compiled_in", lambda: False)
    with pytest.raises(EngineFailed, match="RPC"):
        backend.RpcServer(Hardware(threads=1))
    with pytest.raises(EngineFailed, match="RPC"):
        backend.add_server(1)


def test_stages_if_they_can_cut_it_and_rpc_else(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, uncut = ModelFile.open(architectures("llama")), ModelFile.open(architectures("qwen35"))
    monkeypatch.setattr(backend, "is_compiled_in", lambda: True)
    assert (choose_engine(plain).engine, choose_engine(uncut).engine) == ("stages", "rpc")
    assert "recurrent state cannot be rolled back" in choose_engine(uncut).reason
    assert choose_engine(plain, "rpc").over_rpc
    assert not choose_engine(uncut, "stages").over_rpc
    monkeypatch.setattr(backend, "is_compiled_in", lambda: False)
    assert choose_engine(plain).engine == "stages"
    with pytest.raises(ModelUnsupported, match="RPC"):
        choose_engine(uncut)
    with pytest.raises(EngineFailed, match="RPC"):
        choose_engine(plain, "rpc")


# --- the cache of tensors ---------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path, limit=100)


def opened(cache: TensorCache, owner: str = "a", size: int = 10) -> Path:
    folder = cache.open(owner, size)
    assert folder is not None
    return folder


def put(folder: Path, name: str, size: int, used: int = 0) -> Path:
    file = folder / "rpc" / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(size))
    os.utime(file, (used, used))
    return file


def test_files_count_once_the_model_was_loaded(cache: TensorCache) -> None:
    folder = opened(cache)
    whole = put(folder, "1", 10)
    cache.confirm(folder)
    cut_off = put(folder, "2", 5)
    assert cache.size("a") == 10
    assert opened(cache) == folder
    assert whole.exists()
    assert not cut_off.exists()


def test_devices_do_not_share_files(cache: TensorCache) -> None:
    put(opened(cache, "a"), "1", 10)
    cache.confirm(opened(cache, "a"))
    assert not list(opened(cache, "b").iterdir())
    assert cache.size("b") == 0


def test_room_is_made_by_what_was_written_first_and_others_files_before_own(cache: TensorCache) -> None:
    own, other = opened(cache, "own"), opened(cache, "other")
    oldest, old, new = put(own, "1", 30, used=1), put(other, "2", 30, used=2), put(other, "3", 30, used=3)
    for folder in (own, other):
        cache.confirm(folder)
    opened(cache, "own", size=40)
    assert [file.exists() for file in (oldest, old, new)] == [True, False, True]
    opened(cache, "own", size=100)
    assert not any(file.exists() for file in (oldest, old, new))


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert TensorCache(tmp_path / "file").open("a", 1) is None


def test_a_damaged_list_is_no_list(cache: TensorCache) -> None:
    folder = opened(cache)
    file = put(folder, "1", 10)
    cache.confirm(folder)
    (folder / "whole.json").write_text("[[[")
    opened(cache)
    assert not file.exists()
