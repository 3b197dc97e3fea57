"""A paired device that floods a verifier with requests of one of the `KINDS`; in the last kind it is not paired.

    python -m bench.robustness.attack.devices.flooder PORT HOME KIND

It prints a line when the flood has begun, and ends with its stdin.
"""

import asyncio
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO, SESSION, open_channel
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.protos import parse_message
from edgellm.rpc.trust.trust import Trust
from edgellm.services.verification_codec import write_open
from edgellm.spec.types import GREEDY


@dataclass(frozen=True, slots=True)
class Flood:
    """`streams` at once; each repeats the request `verify(rng, round)`, in new sessions every `rounds` rounds."""

    streams: int
    verify: Callable[[random.Random, int], pb.Verify]
    rounds: int = 10**9


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(300, 2000) for _ in range(n)]


def _extra(tokens: int) -> Callable[[random.Random, int], pb.Verify]:
    return lambda rng, number: pb.Verify(round=number, prefix=_ids(rng, 20), extra=tokens)


def _wide(rng: random.Random, number: int) -> pb.Verify:
    return pb.Verify(round=number, prefix=_ids(rng, 700), chunk=_ids(rng, 256))


def _smallest(rng: random.Random, number: int) -> pb.Verify:
    return pb.Verify(round=number, prefix=_ids(rng, 1))


KINDS = {
    "extra 1000": Flood(8, _extra(1000)),
    "extra 100": Flood(8, _extra(100)),
    "700 new, chunk 256": Flood(8, _wide),
    "100 streams": Flood(100, _smallest),
    "300 streams": Flood(300, _smallest),  # more than the queue holds, and `busy` is ignored
    "new sessions": Flood(50, _smallest, rounds=1),
    "new connections": Flood(8, _smallest, rounds=1),
    "bare connections": Flood(8, _smallest),  # without requests: TLS begins, or not even that
}
_HELLO = b"\x16\x03\x01\x00\x05\x01\x00\x01\x00\x03"  # where TLS begins


async def _stream(channel: grpc.aio.Channel, opening: bytes, flood: Flood, rng: random.Random) -> None:
    """Flood one session until its end, or until the verifier ends it."""
    call: Any = channel.stream_stream(SESSION, bytes, bytes)()  # type: ignore[call-arg]
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(opening)
        for number in range(1, flood.rounds + 1):
            await call.write(pb.DeviceFrame(verify=flood.verify(rng, number)).SerializeToString())
            while isinstance(data := await call.read(), bytes):
                if parse_message(pb.VerifierFrame, data).WhichOneof("frame") != "working":
                    break
            else:
                break
    call.cancel()


async def _endless(channel: grpc.aio.Channel, opening: bytes, flood: Flood, rng: random.Random) -> None:
    while True:
        await _stream(channel, opening, flood, rng)
        await asyncio.sleep(0)


async def _churn(address: Address, trust: Trust, opening: bytes, flood: Flood, rng: random.Random) -> None:
    while True:
        async with open_channel(address, trust) as channel:
            await _stream(channel, opening, flood, rng)


async def _knock(address: Address, rng: random.Random) -> None:
    while True:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(_HELLO[: rng.randrange(len(_HELLO))])
            writer.close()
        await asyncio.sleep(0)


async def _flood(port: int, home: Path, kind: str) -> None:
    trust = Trust.load(home / "data" / "trust")
    address, flood = Address("127.0.0.1", port), KINDS[kind]
    channels = [open_channel(address, trust) for _ in range(1 + flood.streams // 200)]
    hello = pb.HelloReply.FromString(await channels[0].unary_unary(HELLO)(b""))  # type: ignore[call-arg]
    opening = write_open(GREEDY, hello.vocabulary.hex()).SerializeToString()
    rngs = [random.Random(i) for i in range(flood.streams)]
    if kind == "bare connections":
        works = [_knock(address, rng) for rng in rngs]
    elif kind == "new connections":
        works = [_churn(address, trust, opening, flood, rng) for rng in rngs]
    else:
        works = [_endless(channels[i % len(channels)], opening, flood, rng) for i, rng in enumerate(rngs)]
    tasks = [asyncio.ensure_future(work) for work in works]
    print("flooding", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_flood(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
