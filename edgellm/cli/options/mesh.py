"""The options of `edgellm mesh`: the devices of a home, and plans, uploads and replies on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from edgellm.cli.options.models import DEVICES, ENGINES, Engine, interface_flag, model_names
from edgellm.flags import flag

Objective: TypeAlias = Literal["ttft", "reply"]
_LAYERS = "Layers of each device, counted from 1. NAME: here, a paired device, or HOST:PORT."
_SPLIT = "NAME:A-B,NAME:C-D"


@dataclass(frozen=True, slots=True)
class HomeOptions:
    """The devices of a home, and the engine that spreads a model over them."""

    engine: Engine = flag("auto", ENGINES, "auto|stages|rpc")
    peer: tuple[str, ...] = flag(
        (), "Address of a worker besides the paired ones. In a run, a worker without layers replaces a lost one.",
        "[NAME=]HOST:PORT",
    )  # fmt: skip
    interface: tuple[str, ...] = interface_flag()


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of a plan, and its devices if not those of this home."""

    devices: Path | None = flag(None, "Devices file; see --help-all.", "FILE.toml")
    preset: str | None = flag(None, "Named devices: csgo, those of the paper.", "NAME")
    tokens_in: int = flag(1024, "Tokens of the prompt.", "N", least=1)
    tokens_out: int = flag(128, "Tokens of the reply.", "N", least=0)
    objective: Objective = flag("ttft", "Time to minimise: to the first token (ttft), or to the end of the reply.")
    overlap: Literal["paper", "receiving", "streamed"] = flag(
        "streamed", "What a device does while it loads: nothing (paper), receive, or also compute (streamed)."
    )
    warm: bool = flag(False, "Assume that every device has its layers loaded.", names=("--warm",))
    time_limit: float = flag(10.0, "After this time use the best plan so far.", "SECONDS", least=0.0)
    measure: bool = flag(False, "Measure all devices again.", names=("--measure",))
    plot: Path | None = flag(None, "Also draw the plan: a .png or .svg file.", "FILE")


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """The layers to send, and the devices to send them to."""

    split: str | None = flag(None, _LAYERS, _SPLIT, shown="as mesh plan advises")
    tokens_in: int = flag(1024, "Tokens of the prompt to plan for.", "N", least=1)
    tokens_out: int = flag(128, "Tokens of the reply to plan for.", "N", least=0)
    reply: bool = flag(False, "Minimise the time to the end of the reply.", names=("--reply",))
    rate: float = flag(0.0, "Limit over all links together, in Mbit/s; 0: none.", "MBIT", least=0.0)


@dataclass(frozen=True, slots=True)
class RunOptions(HomeOptions):
    """The split of a model over devices, and the question."""

    split: str | None = flag(None, _LAYERS, _SPLIT, shown="the best one")
    devices: Path | None = flag(None, "Devices file to plan for; see edgellm mesh plan --help-all.", "FILE.toml")
    draft: str = flag("none", "Small model that drafts; 'none': no drafts.", "MODEL", complete=model_names)
    system: str | None = flag(None, "System prompt.", "TEXT", names=("-s", "--system"))
    objective: Objective = flag("ttft", "Without --split: time to minimise, to the first token or the reply's end.")
    f32: bool = flag(False, "Send activations as 32-bit, not 16-bit floats.", names=("--f32",), panel=DEVICES)
