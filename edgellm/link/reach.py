"""Whether anybody listens at an address, whatever it speaks."""

from __future__ import annotations

import asyncio
import socket
from enum import StrEnum

from edgellm.link.address import Address


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
