"""Measuring over the link: a device, and the line to it; and whom a device dials for another one."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.engine.gguf.synthetic_layers import Blocks
from edgellm.errors import EdgeError, MeasureFailed, ProtocolError
from edgellm.rpc import measuring
from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel
from edgellm.rpc.discovery import peer_probe
from edgellm.rpc.discovery.peer_probe import may_dial, uniform_failure
from edgellm.rpc.layers import method
from edgellm.rpc.measuring import DeviceFigures, measure, read_figures, write_figures
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.services.server import listener
from edgellm.storage.layer_store import LayerStore
from testkit.network.relay import Network, Relay
from tests.rpc.layering import taking
from tests.rpc.strangers import device, known

BLOCKS = Blocks(b"header", 1000, 2, 64)
FIGURES = DeviceFigures(
    1_700_000_000, "asked for", BLOCKS.key, (1, 8), (0.5, 1.0), 500, 1e8, "5 MB read", 10**9, "free", 2, "a chip", "1",
    0.0, "", "asked for",
)  # fmt: skip


class Measuring:
    def __init__(self, said: DeviceFigures | EdgeError = FIGURES, seconds: float = 0.0) -> None:
        self.said, self.seconds = said, seconds
        self.asked: list[tuple[Blocks, float]] = []

    def __call__(self, blocks: Blocks, oldest: float, doing: Callable[[str], None]) -> DeviceFigures:
        self.asked.append((blocks, oldest))
        doing("computing")
        time.sleep(self.seconds)
        if isinstance(self.said, EdgeError):
            raise self.said
        return self.said


async def test_a_device_says_what_it_has_measured(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BEAT_SECONDS", 0.02)
    measurer = Measuring(seconds=0.1)
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
    changes: tuple[dict[str, Any], ...] = ({"disk": -1.0}, {"layer": 0}, {"seconds": [1.0]}, {"rows": []})
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
        open_line: Any = channel.stream_stream
        call = open_line(
            method("Flow"),
            request_serializer=pb.FlowFrame.SerializeToString,
            response_deserializer=pb.FlowFrame.FromString,
        )()
        await call.write(pb.FlowFrame(want=2**40))
        with pytest.raises(Exception, match="is too large"):
            await call.read()


# --- whom a device dials because another one asks ---------------------------------------------------------------------


def test_a_device_is_dialled_where_it_is_known_to_be_and_nowhere_else(tmp_path: Path) -> None:
    places = ("192.168.1.5:50151", "127.0.0.1:7", "desk.local:50151")
    peer = replace(known(device(tmp_path), "desk"), addresses=tuple(map(Address.parse, places)))
    elsewhere = (
        "192.168.1.6:50151", "127.0.0.1:7", "127.0.0.1:22", "[::1]:22", "[::ffff:127.0.0.1]:22", "169.254.169.254:80",
        "desk.local:50151", "evil.example:443", "localhost:22",
    )  # fmt: skip
    for asked in elsewhere:
        assert not may_dial(peer, Address.parse(asked), local=False), asked
    assert may_dial(peer, Address.parse("192.168.1.5:50999"), local=False)
    assert may_dial(peer, Address.parse("127.0.0.1:22"), local=True)
    assert not may_dial(peer, Address.parse("desk.local:50151"), local=True)


async def test_failures_take_the_same_time_for_who_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    # not `asyncio.sleep` itself: tasks of other tests may still be ending in this process's loop
    names = {**vars(asyncio), "sleep": sleep}
    monkeypatch.setattr(peer_probe, "asyncio", SimpleNamespace(**names))
    for near in (False, True):
        with pytest.raises(EdgeError, match="One answer"):
            async with uniform_failure(near, EdgeError("One answer.", "Ask again.")):
                raise ValueError("refused, or timed out, or no TLS")
    assert len(slept) == 1
    assert 0.0 < slept[0] <= peer_probe.FAILED_SECONDS
