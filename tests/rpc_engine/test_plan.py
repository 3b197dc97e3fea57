"""The plan over RPC: as good as the best of all ways, and what it says of one device alone and one model each."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from edgellm.coldstart.costs import Device, Link
from edgellm.errors import PlanImpossible
from edgellm.layer_range import HERE
from edgellm.rpc_engine.plan import RpcHome, RpcModelCosts, RpcPlacement, RpcSite, by_memory, plan_rpc

MB = 10**6


def model(layers: int = 6, size: int = 100 * MB) -> RpcModelCosts:
    return RpcModelCosts(
        "m", (size,) * layers, (float(size),) * layers, (2.0 * size,) * layers, 50 * MB, 1e8, 50 * MB, 2_048, 50_000,
        cache=5.0 * MB, compute=20.0 * MB,
    )  # fmt: skip


def device(name: str, *, flops: float = 1e11, disk: float = 3e8, memory: float = 1e10, reads: float = 1e10) -> Device:
    return Device(name, flops, 1.0, 0.05, disk, memory, 1e8, 1e8, 0.0, reads)


def site(one: Device, *, rate: float = 1e9, latency: float = 1e-3, kept: float = 0.0) -> RpcSite:
    return RpcSite(one, Link(rate, latency), Link(rate, latency), kept)


def planned(here: Device, sites: list[RpcSite], model: RpcModelCosts, tokens_out: int = 64) -> RpcPlacement:
    """The plan for a whole reply to 128 tokens."""
    return plan_rpc(RpcHome(RpcSite(here), tuple(sites), model, 128, tokens_out, "reply"))


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
        if any(limit > one.memory for limit, one in zip(limits, [here, *(s.device for s in sites)], strict=True)):
            continue
        tight = [
            replace(one, device=replace(one.device, memory=limit)) for one, limit in zip(sites, limits[1:], strict=True)
        ]
        found = planned(replace(here, memory=limits[0]), tight, costs, 32).option
        assert best <= found.reply_s * (1 + 1e-9)


def test_layers_go_where_there_is_memory_if_nothing_else_is_known() -> None:
    costs = RpcModelCosts("m", (10**8,) * 6, (1e8,) * 6, (2e8,) * 6, 10**7, 1e7, 10**7, 2_048, 50_000)
    assert [share.name for share in by_memory(costs, {"desk": 10**9, HERE: 10**9})] == [HERE]
    shares = by_memory(costs, {HERE: 3 * 10**8, "desk": 5 * 10**8})
    assert {share.name: len(share.layers) for share in shares} == {HERE: 2, "desk": 4}
    with pytest.raises(PlanImpossible, match="the devices have"):
        by_memory(costs, {HERE: 10**8, "desk": 2 * 10**8})
