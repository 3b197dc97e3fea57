"""What a reply over several devices really took, to be looked at beside the plan."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.api.mesh import Opened
from edgellm.coldstart.plan import Stage, Way
from edgellm.mesh.pipeline import Lane


@dataclass(frozen=True, slots=True)
class Did:
    """What one device really did, in seconds from the request: when it loaded and computed, and got what was sent."""

    device: str
    first_layer: int
    last_layer: int
    loading: tuple[tuple[float, float], ...]
    computing: tuple[tuple[float, float], ...]
    got: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """A reply as it was: until the first token, stage by stage, and what each further token took."""

    way: Way
    did: tuple[Did, ...]


def measured(opened: Opened, since: float, ttft: float, tokens: int, seconds: float) -> Measured:
    """What the stages did for the reply that has just ended, to be asked once a reply.

    `since` is its beginning, as `perf_counter` has it; the first token came after `ttft` seconds, and the last of
    `tokens` after `seconds`."""
    did = [_did(lane, since) for lane in opened.verifier.measured()]
    stages: list[Stage] = []
    before = 0.0
    for one in did:
        load = max((end for begin, end in one.loading if begin < ttft), default=0.0)
        computing = [(begin, min(end, ttft)) for begin, end in one.computing if begin < ttft]
        finish = max((end for _, end in computing), default=load)
        got = max((moment for moment in one.got if moment < ttft), default=before)
        network = max(0.0, got - before) if stages else 0.0
        compute = sum(end - begin for begin, end in computing)
        wait = max(0.0, got - max(load, 0.0))
        size = sum(opened.model.layer_bytes[one.first_layer - 1 : one.last_layer])
        stages.append(
            Stage(
                one.device, one.first_layer, one.last_layer, load, wait, network, got, compute, finish, size, "measured"
            )
        )
        before = finish
    token = (seconds - ttft) / (tokens - 1) if tokens > 1 else 0.0
    return Measured(Way(tuple(stages), ttft, token, seconds), tuple(did))


def _did(lane: Lane, began: float) -> Did:
    shift = lane.began - began

    def of(kind: str) -> tuple[tuple[float, float], ...]:
        return tuple((span.begin + shift, span.end + shift) for span in lane.spans if span.kind == kind)

    work = lane.work
    got = tuple(begin for begin, _ in of("got"))
    return Did(lane.seat.name, work.first + 1, work.last + 1, of("load"), of("compute"), got)
