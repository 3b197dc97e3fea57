"""A man in the middle of pairings, who may change every frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from edgellm.rpc.address import Address
from edgellm.rpc.protos import trust_pb2 as pb

PAIR = "/edgellm.v1.Pairing/Pair"


class Relay:
    """A man in the middle of pairings, who may change every frame in both directions; `with` gives his address."""

    def __init__(self, at: Address, change: Callable[[pb.PairFrame, bool], object]) -> None:
        """`change` gets each frame, and whether it goes to the side that shows the code."""
        self._at, self._change = at, change
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

    def _changed(self, data: bytes, up: bool) -> bytes:
        frame = pb.PairFrame.FromString(data)
        self._change(frame, up)
        return frame.SerializeToString()
