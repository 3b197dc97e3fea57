"""Which engine spreads a model over devices: our stages, or llama.cpp's RPC."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from edgellm.coldstart.plan import format_seconds
from edgellm.engine import ModelFile
from edgellm.engine.ggml_rpc import backend
from edgellm.engine.gguf.cuttable import cut_points
from edgellm.errors import EdgeError, ModelUnsupported

EngineName = Literal["auto", "stages", "rpc"]
MIN_RPC_SAVING = 0.2
"""The share of the stages' time to the end of a reply that RPC must save to be taken: predictions of that time were off
by 19% in the median (`bench.mesh.phases`), so a smaller difference does not say which engine is faster."""


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """What the planner predicts for a reply with an engine, in seconds: to its first token, and to its last one."""

    ttft_s: float
    reply_s: float


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and why it is taken.

    `undecided`: RPC may be taken in its place once the planner has been asked for the times of both, which is what
    `stages` and `rpc` are then. They are None where one engine alone is possible.
    """

    engine: EngineName
    reason: str
    undecided: bool = False
    stages: EngineTimes | None = None
    rpc: EngineTimes | None = None

    @property
    def over_rpc(self) -> bool:
        return self.engine == "rpc"

    @property
    def by_times(self) -> bool:
        """Return whether the predicted times of both engines made the choice."""
        return self.stages is not None and self.rpc is not None

    def settled(self) -> EngineChoice:
        """Return the choice where the planner has nothing to compare: the engine stays."""
        return replace(self, undecided=False)


def choose_engine(file: ModelFile, asked: EngineName = "auto") -> EngineChoice:
    """Return the engine for a model before any device is asked: the one that was `asked` for; RPC if its layers cannot
    be cut; else stages, undecided if this llama.cpp has RPC, too.

    Raises:
        ModelUnsupported: its layers cannot be cut, and this llama.cpp has no RPC backend.
        EngineFailed: RPC was asked for, and this llama.cpp has no backend for it.
    """
    if asked != "auto":
        if asked == "rpc":
            backend.require()
        return EngineChoice(asked, "asked for")
    try:
        cut_points(file.header)
    except ModelUnsupported as error:
        if not backend.is_compiled_in():
            raise ModelUnsupported(
                error.what,
                f"Run it over llama.cpp's RPC instead, which it has to be compiled with: {backend.how_to_compile()}",
            ) from None
        return EngineChoice("rpc", error.what)
    reason = "its layers can be cut: each device loads its own, and all do so at once"
    return EngineChoice("stages", reason, undecided=backend.is_compiled_in())


def faster_engine(stages: EngineTimes, rpc: EngineTimes, tokens_out: int) -> EngineChoice:
    """Return the engine with which a reply of `tokens_out` tokens is predicted to end first, stages unless RPC saves
    `MIN_RPC_SAVING`; the reason has the seconds of both."""
    last = f"the last of {tokens_out} tokens" if tokens_out > 1 else "the first token"
    ours, theirs = format_seconds(stages.reply_s), format_seconds(rpc.reply_s)
    if rpc.reply_s < (1.0 - MIN_RPC_SAVING) * stages.reply_s:
        why = _difference(rpc, stages, "over RPC")
        return EngineChoice(
            "rpc", f"{last} comes after {theirs} over llama.cpp's RPC, and after {ours} with stages: {why}",
            stages=stages, rpc=rpc,
        )  # fmt: skip
    if rpc.reply_s < stages.reply_s:
        why = f"RPC is taken if it saves {MIN_RPC_SAVING:.0%}, as predictions may be off by that much"
    else:
        why = _difference(stages, rpc, "with stages")
    return EngineChoice(
        "stages", f"{last} comes after {ours} with stages, and after {theirs} over llama.cpp's RPC: {why}",
        stages=stages, rpc=rpc,
    )  # fmt: skip


def without_stages(error: EdgeError, rpc: EngineTimes) -> EngineChoice:
    """Return the choice of RPC, which takes `rpc`, for a model whose layers could be cut, but not run as stages in this
    home because of `error`."""
    return EngineChoice(
        "rpc", f"stages are impossible here, and over llama.cpp's RPC a reply takes {format_seconds(rpc.reply_s)}."
        f" {error}", rpc=rpc,
    )  # fmt: skip


def _difference(faster: EngineTimes, other: EngineTimes, how: str) -> str:
    """Return which part of a reply it is that an engine is faster with."""
    first = other.ttft_s - faster.ttft_s
    rest = (other.reply_s - other.ttft_s) - (faster.reply_s - faster.ttft_s)
    if max(first, rest) <= 0.0:
        return "there is no difference"
    if first >= rest:
        return f"the first token comes {format_seconds(first)} sooner {how}"
    return f"the tokens after the first one take {format_seconds(rest)} less {how}"
