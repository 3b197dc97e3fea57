"""Strangers at a pairing: one who leads it frame by frame, and one through whom it passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from edgellm.rpc.address import Address
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.versions import PAIRING_PROTOCOL
from testkit.hostile import pairing_relay
from testkit.hostile.pairing_relay import PAIR


class Talk:
    """A conversation frame by frame, as a stranger would lead it."""

    def __init__(self, at: Address) -> None:
        self.channel = grpc.insecure_channel(str(at), options=[("grpc.use_local_subchannel_pool", 1)])
        self._out: list[bytes | None] = []
        self._news = threading.Condition()
        stream: Any = self.channel.stream_stream
        self._in: Any = stream(PAIR)(self._frames(), timeout=120)

    def _frames(self) -> Iterator[bytes]:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._out)
                frame = self._out.pop(0)
            if frame is None:
                return
            yield frame

    def say(self, frame: pb.PairFrame | bytes | None) -> None:
        with self._news:
            self._out.append(frame.SerializeToString() if isinstance(frame, pb.PairFrame) else frame)
            self._news.notify()

    def hear(self) -> pb.PairFrame:
        return pb.PairFrame.FromString(next(self._in))

    def refused(self) -> str:
        with pytest.raises(grpc.RpcError) as caught:
            self.hear()
        self.close()
        return f"{caught.value.code().name} {caught.value.details()}"

    def close(self) -> None:
        self.say(None)
        self._in.cancel()
        self.channel.close()


def hello(identity: Identity, spake: bytes, protocol: int = PAIRING_PROTOCOL) -> pb.PairFrame:
    return pb.PairFrame(hello=pb.PairHello(protocol=protocol, certificate=identity.certificate.der, spake=spake))


class Relay(pairing_relay.Relay):
    """A man in the middle: everything passes through him, and he may change it. His address is what `with` gives."""

    def __init__(
        self,
        at: Address,
        change: Callable[[pb.PairFrame], Any] = lambda _frame: None,
        up: Callable[[bytes], Any] = lambda _frame: None,
    ) -> None:
        """`up` hears every frame to the window, `change` may change those of either way."""

        def passing(frame: pb.PairFrame, upwards: bool) -> None:
            if upwards:
                up(frame.SerializeToString())
            change(frame)

        super().__init__(at, passing)
