"""The best placement over llama.cpp's RPC on the devices of a home."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgellm.coldstart.rpc_plan import RpcSite
from edgellm.engine import ModelFile
from edgellm.engine.ggml_rpc import backend
from edgellm.errors import EdgeError
from edgellm.layer_range import HERE
from edgellm.llm.home.target import PlanTarget
from edgellm.llm.rpc_llm import context_sizes
from edgellm.mesh.compute_unit import ComputeUnit
from edgellm.mesh.ggml_rpc.costs import rpc_costs
from edgellm.mesh.ggml_rpc.needs import MARGIN, beside_weights
from edgellm.mesh.ggml_rpc.placement import RpcPlacement, place

if TYPE_CHECKING:
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.rpc.discovery.workers import Worker
    from edgellm.services.client.rpc_session import RpcOffer


def place_over_rpc(file: ModelFile, home: Survey, target: PlanTarget, offers: RpcOffers | None = None) -> RpcPlacement:
    """Return the best placement of the model in `file` on the surveyed devices that serve llama.cpp's RPC. `offers` are
    those of the devices, if they were asked already.

    Raises:
        EngineFailed: this llama.cpp has no RPC backend.
        ModelUnsupported, DeviceLost: llama.cpp cannot use the model.
        PlanImpossible: the devices cannot hold it.
    """
    backend.require()
    unit = ComputeUnit.choose(target.hardware)
    sizes = context_sizes(file, target.context, target.sessions, target.hardware)
    costs = rpc_costs(file, *beside_weights(file, sizes, unit.hardware))
    offers = offers or ask_offers(home.workers)
    left_out = [*offers.refused, *((name, error.what) for name, error in home.left_out)]
    fleet = home.fleet()
    known = {device.name: device for device in fleet.devices}
    total, links, sites = sum(costs.layer_bytes) + costs.head, fleet.links or {}, []
    for name, offer in offers.given.items():
        device = replace(known[name], memory=float(max(1, offer.memory - MARGIN)))
        sites.append(RpcSite(device, links[HERE, name], links[name, HERE], min(1.0, offer.cached / total)))
    workers = {name: home.workers[name] for name in offers.given}
    return place(
        costs, known[HERE], sites, workers, target.tokens_in, target.tokens_out, objective=target.objective,
        cards=bool(unit.name), left_out=left_out, cold=target.cold,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RpcOffers:
    """What the workers that serve llama.cpp's RPC offer, by name; and why others do not."""

    given: Mapping[str, RpcOffer]
    refused: Sequence[tuple[str, str]] = ()


def ask_offers(workers: Mapping[str, Worker]) -> RpcOffers:
    """Ask all workers at once whether they serve llama.cpp's RPC."""
    if not workers:
        return RpcOffers({})
    from edgellm.services.client.rpc_session import ask_offer
    from edgellm.services.client.worker_selection import endpoint_of

    given: dict[str, RpcOffer] = {}
    refused: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        try:
            given[name] = ask_offer(endpoint_of(workers[name]))
        except EdgeError as error:
            refused.append((name, str(error)))

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(ask, workers))
    return RpcOffers({name: given[name] for name in workers if name in given}, sorted(refused))
