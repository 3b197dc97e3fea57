"""Measuring over the link: a device, and the line to it."""

from dataclasses import replace
from typing import Any

import pytest

from edgellm.engine.gguf.synthetic_layers import Blocks
from edgellm.errors import EdgeError, LayersRefused, MeasureFailed, ProtocolError
from edgellm.rpc import measuring
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel
from edgellm.rpc.layers import ask
from edgellm.rpc.measuring import DeviceFigures, measure, read_figures, write_figures
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.storage.layer_store import LayerStore
from testkit.network.relay import Network, Relay
from tests.rpc.layering import taking

BLOCKS = Blocks(b"header", 1000, 2, 64)
FIGURES = DeviceFigures(
    1_700_000_000, "asked for", BLOCKS.key, (1, 8), (0.5, 1.0), 500, 1e8, 10**9, "a chip", "1", 0.0, "", "asked for",
)  # fmt: skip


class Measuring:
    def __init__(self) -> None:
        self.said: DeviceFigures | EdgeError = FIGURES
        self.asked: list[tuple[Blocks, float]] = []

    def __call__(self, blocks: Blocks, oldest: float) -> DeviceFigures:
        self.asked.append((blocks, oldest))
        if isinstance(self.said, EdgeError):
            raise self.said
        return self.said


async def test_a_device_says_what_it_has_measured(store: LayerStore) -> None:
    measurer = Measuring()
    async with taking(store, measurer=measurer) as address, open_channel(address) as channel:
        assert await measure(channel, "desk", BLOCKS, 60.0) == FIGURES
        assert measurer.asked == [(BLOCKS, 60.0)]
        for bad in (replace(BLOCKS, header=b""), replace(BLOCKS, layers=0), replace(BLOCKS, width=2**21)):
            with pytest.raises(EdgeError, match="layers to measure are invalid"):
                await measure(channel, "desk", bad, 60.0)
        measurer.said = MeasureFailed("The disk is full.", "Make room there.")
        with pytest.raises(MeasureFailed, match=r"desk: The disk is full\. Make room there"):
            await measure(channel, "desk", BLOCKS, 0.0)
    async with taking(store) as address, open_channel(address) as channel:
        with pytest.raises(MeasureFailed, match="does not measure itself"):
            await measure(channel, "desk", BLOCKS, 60.0)


def test_figures_that_cannot_be_are_not_believed() -> None:
    assert read_figures(write_figures(FIGURES)) == FIGURES
    changes: tuple[dict[str, Any], ...] = (
        {"disk": -1.0}, {"disk": 0.0}, {"disk": float("inf")}, {"layer": 0}, {"seconds": [1.0]}, {"rows": []},
        {"rows": [0, 8]}, {"seconds": [1.0, float("nan")]}, {"seconds": [0.0, 1.0]},
    )  # fmt: skip
    for change in changes:
        said = write_figures(FIGURES)
        for key, value in change.items():
            if isinstance(value, list):
                said.ClearField(key)
                getattr(said, key).extend(value)
            else:
                setattr(said, key, value)
        with pytest.raises(ProtocolError):
            read_figures(said)
    with pytest.raises(ProtocolError):
        measuring.LinkSpeed(0.1, float("nan"), 1.0)


async def test_a_line_is_measured_both_ways(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a relay of known bandwidth and delay."""
    monkeypatch.setattr(measuring, "SECONDS", 0.3)
    async with taking(store) as address:
        with Relay(address.port, Network(40.0, 0.02)) as relay:
            async with open_channel(Address("127.0.0.1", relay.port)) as channel:
                line = await measuring.measure_link(channel, "desk")
    assert line.round_trip >= 0.02
    for rate in (line.up, line.down):  # of thousands without the relay, and how exact depends on what else runs
        assert 1e6 < rate < 4e8


async def test_more_than_can_be_wanted_is_refused(store: LayerStore) -> None:
    async with taking(store) as address, open_channel(address) as channel:
        with pytest.raises(LayersRefused, match="is too large"):
            await ask(channel, "Flow", "desk", pb.FlowRequest(want=2**40), pb.FlowReply, 60.0)
