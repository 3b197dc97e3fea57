"""Finding out whether anything listens at a TCP address, whatever its protocol."""

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
    """The outcome of connecting to a TCP port."""

    OPEN = "open"
    REFUSED = "refused"  # the machine is there, but nothing listens
    SILENT = "silent"  # no answer: off, elsewhere, or behind a firewall
    UNKNOWN = "unknown"  # no such name, or no route


async def reach(address: Address, seconds: float = 1.0) -> Reach:
    """Connect and hang up, and return the outcome."""
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
    """Return the result of `ask`, a call with a deadline in seconds. If there is none within `seconds`, but something
    listens at `address`, as on a busy machine, try a second time with `PATIENCE` times the deadline.

    Raises:
        grpc.aio.AioRpcError: the error of `ask`; DEADLINE_EXCEEDED if no answer came in time.
    """
    try:
        return await ask(seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or await reach(address) is not Reach.OPEN:
            raise
    return await ask(PATIENCE * seconds)


async def listening(addresses: Sequence[Address], seconds: float = 1.0) -> Address:
    """Return the first of a device's addresses at which something listens, as not all of its networks may be reachable
    from here; return the first address if nothing listens at any.
    """
    found = await asyncio.gather(*(reach(address, seconds) for address in addresses))
    return next((address for address, what in zip(addresses, found, strict=True) if what is Reach.OPEN), addresses[0])
