"""Authorization of callers: checked for every call after the handshake, and again while the call lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio

from edgellm.errors import EdgeError, IdentityClash, NotPaired, NotPermitted
from edgellm.rpc.discovery.interfaces import own_hosts
from edgellm.rpc.trust.identity import DeviceID, pem_id
from edgellm.rpc.trust.trust import Peer, Right, Trust

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Method: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

RECHECK_SECONDS = 0.25  # seconds between two checks of open calls against the list of paired devices
DRAIN_SECONDS = 2.0  # longest time for which a refused caller's requests are still read
QUIET_SECONDS = 0.25  # silence after which a caller is taken to await the reply

_END: Any = vars(grpc.aio)["EOF"]  # the value after the last request; the type stubs lack it


@dataclass(slots=True, eq=False)
class _OpenCall:
    task: asyncio.Task[Any]
    device: DeviceID
    right: Right | None
    refused: EdgeError | None = None


class AuthInterceptor:
    """Checks the callers of a service's methods. Runs in one event loop."""

    def __init__(self, trust: Trust, notify: Callable[[str], None]) -> None:
        """Set up the checks; `notify` is called with a line for every refused call."""
        self._trust = trust
        self._notify = notify
        self._open: set[_OpenCall] = set()

    def wrap(self, method: Method, right: Right | None = None) -> Method:
        """Return `method`, restricted to paired devices with this right, or to all paired devices without `right`."""

        async def guarded(request: Any, context: Context) -> Any:
            try:
                peer = self.check(caller_id(context), right, caller_host(context))
            except EdgeError as error:
                await self._refuse(error, context)
            task: Any = asyncio.current_task()
            call = _OpenCall(task, peer.id, right)
            self._open.add(call)
            try:
                return await method(request, context)
            except asyncio.CancelledError:
                if call.refused is None:  # the device has left
                    raise
                task.uncancel()
                await self._refuse(call.refused, context)
            finally:
                self._open.discard(call)

        return guarded

    def check(self, device: DeviceID, right: Right | None, host: str = "") -> Peer:
        """Return the paired device with this ID, which calls from `host`. Raise NotPaired for an unknown device,
        IdentityClash for this device's own identity, NotPermitted without the right, and TrustUnusable where the list
        of paired devices cannot be read, so that no device is trusted."""
        if device == self._trust.identity.id:
            raise identity_clash(device, host)
        peer = self._trust.peers.get(device)
        if peer is None:
            raise NotPaired(f"The device {device.short} is not paired with this one.", "Pair the devices: edgellm pair")
        if right is not None and right not in peer.rights:
            raise NotPermitted(
                f"{peer.name} ({device.short}) has no right to {right} here.",
                f"Grant it on this device: edgellm peers grant {device.short} {right}",
            )
        return peer

    async def watch(self) -> None:
        """End the calls of devices that are no longer trusted, until this is cancelled."""
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            for call in list(self._open):
                if call.refused is None:
                    try:
                        self.check(call.device, call.right)
                    except EdgeError as error:
                        call.refused = error
                        call.task.cancel()

    async def _refuse(self, error: EdgeError, context: Context) -> NoReturn:
        """End the call with the error, once the caller has paused: gRPC hides the reason from one that is writing."""
        self._notify(f"Refused {caller_host(context) or 'an unknown caller'}: {error.what}")
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while await asyncio.wait_for(context.read(), QUIET_SECONDS) is not _END:
                    pass
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        raise error  # abort does not return


def caller_id(context: Context) -> DeviceID:
    """Return the device ID of the caller's client certificate, whose key the caller has proved to hold. Raise NotPaired
    without a certificate."""
    shown = b"".join((context.auth_context() or {}).get("x509_pem_cert", ()))
    if not shown:
        raise NotPaired("The caller has shown no certificate.", "Connect with mutual TLS.")
    return pem_id(shown)


def caller_host(context: Context) -> str:
    """Return the host of the caller, or an empty string if it is unknown."""
    _kind, _, rest = unquote(context.peer()).partition(":")
    return rest.rpartition(":")[0].strip("[]")


def identity_clash(device: DeviceID, host: str) -> IdentityClash:
    if host in own_hosts():
        return IdentityClash(
            f"The device {device.short} has connected to itself.", "On one machine, use 127.0.0.1 without pairing."
        )
    return IdentityClash(
        f"The device at {host or 'the other end'} has this device's identity, {device.short}: its files were copied.",
        "On the device with the copy, remove trust/identity.pem from edgellm's data folder, and pair it again.",
    )
