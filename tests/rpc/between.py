"""Strangers at a pairing: one who leads it frame by frame, and one through whom it passes."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from edgellm.rpc.address import Address
from edgellm.rpc.protos import PROTOCOL
from edgellm.rpc.protos import trust_pb2 as pb
from edgellm.rpc.trust.identity import Identity

PAIR = "/edgellm.v1.Pairing/Pair"


class Talk:
    """A conversation frame by frame, as a stranger would lead it."""

    def __init__(self, at: Address) -> None:
        self.channel = grpc.insecure_channel(str(at), options=[("grpc.use_local_subchannel_pool", 1)])
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        stream: Any = self.channel.stream_stream
        self._in: Any = stream(PAIR)(iter(self._out.get, None), timeout=120)

    def say(self, frame: pb.PairFrame | bytes | None) -> None:
        self._out.put(frame.SerializeToString() if isinstance(frame, pb.PairFrame) else frame)

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


def hello(identity: Identity, spake: bytes, protocol: int = PROTOCOL) -> pb.PairFrame:
    return pb.PairFrame(hello=pb.PairHello(protocol=protocol, certificate=identity.certificate.der, spake=spake))


class Relay:
    """A man in the middle: everything passes through him, and he may change it. His address is what `with` gives."""

    def __init__(
        self,
        at: Address,
        change: Callable[[pb.PairFrame], Any] = lambda _frame: None,
        up: Callable[[bytes], Any] = lambda _frame: None,
    ) -> None:
        """`up` hears every frame to the window, `change` may change those of either way."""
        self._at, self._change, self._up = at, change, up
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])

    def __enter__(self) -> Address:
        method = grpc.stream_stream_rpc_method_handler(self._pass)
        handler = grpc.method_handlers_generic_handler("edgellm.v1.Pairing", {"Pair": method})
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return Address("127.0.0.1", port)

    def __exit__(self, *_raised: object) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()

    def _pass(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with grpc.insecure_channel(str(self._at), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stream: Any = channel.stream_stream
            try:
                for frame in stream(PAIR)(self._changed(frame, True) for frame in frames):
                    yield self._changed(frame, False)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "")

    def _changed(self, data: bytes, upwards: bool) -> bytes:
        if upwards:
            self._up(data)
        frame = pb.PairFrame.FromString(data)
        self._change(frame)
        return frame.SerializeToString()
