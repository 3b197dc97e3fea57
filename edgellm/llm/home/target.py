"""What a plan for a home is made for."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.coldstart.plan import Objective
from edgellm.engine.hardware import ON_PROCESSOR, Hardware


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """The reply that a plan is for: the tokens of its prompt and its own, and the `objective`, the time to minimise.

    Each device has memory for `sessions` replies at once, of `context` tokens each, by default as many as `hardware`
    says, which also says where this device computes. `cold`: nothing is loaded yet but what devices say; else
    everything is.
    """

    tokens_in: int
    tokens_out: int
    objective: Objective = "ttft"
    context: int | None = None
    sessions: int = 1
    hardware: Hardware = ON_PROCESSOR
    cold: bool = True

    @property
    def positions(self) -> int | None:
        """The tokens of a context, if that was asked for."""
        return self.context or self.hardware.n_ctx
