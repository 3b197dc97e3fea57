"""A plan over llama.cpp's RPC on the screen, and for a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import one_line, size
from edgellm.coldstart.plan import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from edgellm.coldstart.rpc_plan import RpcOption
    from edgellm.mesh.ggml_rpc.placement import RpcPlacement


def print_rpc_plan(console: Console, placed: RpcPlacement, model: str, tokens_in: int, tokens_out: int) -> None:
    """Print which device holds which layers, the times beside those of other ways, and the advice."""
    costs, plan = placed.model, placed.plan
    goal = f"the end of a reply of {tokens_out} tokens" if plan.objective == "reply" else "the first token"
    console.print(
        f"{one_line(costs.name)}: {costs.layers} layers, {size(sum(costs.layer_bytes) + costs.head)}, over llama.cpp's"
        f" RPC; least time to {goal} for a prompt of {tokens_in} tokens"
    )
    console.print()
    layers = Table(box=None, pad_edge=False)
    for name in ("DEVICE", "LAYERS", "SIZE"):
        layers.add_column(name, justify="left" if name == "DEVICE" else "right", no_wrap=True)
    for share in placed.shares:
        layers.add_row(one_line(share.name), str(share.layers), size(costs.weights(share.layers)))
    for name, why in placed.left_out:
        layers.add_row(one_line(name), "-", one_line(why), style="dim")
    console.print(layers)
    console.print()
    console.print(_ways(placed))
    console.print()
    console.print(Text(plan.advice, style="bold"), soft_wrap=True)
    if (better := placed.one_model_each(model)) is not None:
        console.print(Text(better), soft_wrap=True)


def _ways(placed: RpcPlacement) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("PLAN", "FIRST TOKEN", "PER TOKEN", "REPLY", ""):
        table.add_column(name, justify="left" if name in ("PLAN", "") else "right", no_wrap=True)
    plan = placed.plan
    elsewhere = plan.elsewhere
    rows = (
        ("this plan", plan.option, ""),
        ("this device alone", plan.alone, ""),
        ("one model each", elsewhere, f"whole on {one_line(elsewhere.shares[0].name)}" if elsewhere else ""),
    )
    for name, way, more in rows:
        if way is None:
            table.add_row(name, "does not fit", "", "", "", style="dim")
        else:
            times = (way.ttft_s, way.token_s, way.reply_s)
            table.add_row(name, *map(format_seconds, times), more)
    return table


def rpc_figures(placed: RpcPlacement) -> dict[str, Any]:
    """Return the plan for a script; layers are counted from 1, both ends included."""
    plan = placed.plan

    def times(way: RpcOption | None) -> dict[str, Any] | None:
        if way is None:
            return None
        return {
            "load_s": way.load_s, "ttft_s": way.ttft_s, "token_s": way.token_s, "reply_s": way.reply_s,
            "shares": [
                {"device": one.name, "first_layer": one.layers.start + 1, "last_layer": one.layers.stop}
                for one in way.shares
            ],
        }  # fmt: skip

    return {
        "plan": times(plan.option), "alone": times(plan.alone), "one_model_each": times(plan.elsewhere),
        "objective": plan.objective, "advice": plan.advice,
        "left_out": [{"device": name, "reason": why} for name, why in placed.left_out],
    }  # fmt: skip
