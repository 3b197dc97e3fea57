"""Whether anybody listens at an address, whatever it speaks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TypeVar

import grpc
import grpc.aio

from edgellm.rpc.address import Address

T = TypeVar("T")
PATIENCE = 3.0


class Reach(StrEnum):
    """What came of knocking at a TCP port."""

    OPEN = "open"
    REFUSED = "refused"  # the machine is there, and nothing listens
    SILENT = "silent"  # no answer: off, elsewhere, or behind a firewall
    UNKNOWN = "unknown"  # no such name, or no way there


async def reach(address: Address, seconds: float = 1.0) -> Reach:
    """Connects and hangs up."""
    try:
        async with asyncio.timeout(seconds):
            _reader, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return Reach.SILENT
    except ConnectionRefusedError:
        return Reach.REFUSED
    except socket.gaierror:
        return Reach.UNKNOWN
    except OSError:
        return Reach.UNKNOWN
    writer.transport.abort()
    return Reach.OPEN


async def answered(ask: Callable[[float], Awaitable[T]], address: Address, seconds: float) -> T:
    """Return what `ask`, a call with a deadline in seconds, returns within `seconds`; where somebody listens at
    `address` and is slow to answer, as a busy machine is, within `PATIENCE` times as long at a second try.

    Raises:
        grpc.aio.AioRpcError: what `ask` raises; DEADLINE_EXCEEDED where no answer came in time.
    """
    try:
        return await ask(seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or await reach(address) is not Reach.OPEN:
            raise
    return await ask(PATIENCE * seconds)


async def listening(addresses: Sequence[Address], seconds: float = 1.0) -> Address:
    """The first of a device's addresses at which somebody listens, as not all of its networks are reached from here;
    the first of all where nobody does.
    """
    found = await asyncio.gather(*(reach(address, seconds) for address in addresses))
    return next((address for address, what in zip(addresses, found, strict=True) if what is Reach.OPEN), addresses[0])
