"""A service in the network's loop that is started and stopped from any thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Self

import grpc.aio

from edgellm.rpc.address import Address
from edgellm.rpc.event_loop import network_loop, run_there
from edgellm.rpc.trust.trust import Trust

GRACE_SECONDS = 10.0  # for what is in flight, when the server is stopped


class Listener:
    """`start`, then `stop`; both may come from any thread. Subclasses implement `_serve`."""

    def __init__(self, address: Address, trust: Trust | None) -> None:
        """With `trust`, answer only paired devices, by mutual TLS; without it, every caller on this machine.

        Raises:
            PairingRequired: the address is not loopback, and there is no `trust`.
        """
        self.address = address if trust is not None else address.require_loopback()
        self.trust = trust
        self._life: Future[None] | None = None
        self._up = threading.Event()  # listening, or failed to
        self._trouble: BaseException | None = None
        self._goodbyes: asyncio.Queue[float] = asyncio.Queue()

    def start(self) -> Address:
        """Start to listen; return the address, with the real port if port 0 was asked for.

        Raises:
            PairingRequired: with `trust`, nobody is paired.
            PortTaken: something else listens there.
            InvalidOption: this machine does not have the address, or does not give away the port.
        """
        self._life = run_there(self._live())
        self._up.wait()
        if self._trouble is not None:
            self._life.result()
            raise self._trouble
        return self.address

    def request_stop(self, grace: float = GRACE_SECONDS) -> None:
        """Begin to stop, and return at once; may be called in a signal handler, and again with less grace.

        Nothing new is taken from now on. What is in flight is finished, for at most `grace` seconds; 0 cuts it off.
        """
        if self._life is not None and not self._life.done():
            network_loop().call_soon_threadsafe(self._goodbyes.put_nowait, grace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has ended; return whether it has."""
        return self._life is None or bool(wait_for([self._life], timeout).done)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Stop, and return when everything is closed."""
        self.request_stop(grace)
        self.wait()

    def close(self) -> None:
        """Release the server's resources, after it has ended."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    async def _live(self) -> None:
        try:
            await self._serve()
        except Exception as error:  # noqa: BLE001 - whatever it is, `start` waits for it and raises it
            self._trouble = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        """Serve until a stop is requested; set `_up` once the server listens."""
        raise NotImplementedError

    async def _farewell(self, server: grpc.aio.Server, grace: float) -> None:
        """Stop the server; a further stop request may shorten the `grace`."""
        closing = asyncio.create_task(server.stop(grace))
        while grace > 0 and not closing.done():
            hurry = asyncio.create_task(self._goodbyes.get())
            await asyncio.wait({closing, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if not hurry.cancel():
                grace = hurry.result()
                if grace <= 0:
                    await server.stop(None)
        await closing
