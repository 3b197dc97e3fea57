"""Decoders of messages between the devices of a mesh: orders, rows, reports, recipes, figures."""

import numpy as np

from edgellm.errors import ProtocolError
from edgellm.layer_range import LayerRange
from edgellm.mesh.messages import Event, Failed, MicroBatch, StageAnswer, StageSpec, Took
from edgellm.mesh.stage import check
from edgellm.rpc.layers import read_manifest
from edgellm.rpc.measuring import read_blocks, read_figures
from edgellm.rpc.protos import PROTOCOL, layers_pb2, mesh_pb2, parse_message
from edgellm.rpc.protos.mesh_pb2 import StageLoaded
from edgellm.services import mesh_codec
from edgellm.services.mesh_codec import read_event, read_work, write_event, write_micro_batch, write_work
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Sampling, Verdict
from tests.fuzz.reading import Reader

WORK = StageSpec("ab" * 32, "big", LayerRange(2, 8), 8, 16, 300, 512)
FIRST = StageSpec("ab" * 32, "big", LayerRange(0, 4), 8, 16, 300, 512)
NUMBER = 7
_CHUNK = Chunk(ids=np.array([5, 6], np.int32))
_ROWS = np.linspace(-3, 3, 4 * WORK.n_embd, dtype=np.float32).reshape(4, -1)


def _order(data: bytes) -> None:
    """Decode an order as the worker's service and its stage do."""
    order = parse_message(mesh_pb2.Order, data)
    kind = order.WhichOneof("order")
    if kind == "prepare":
        read_work(order.prepare)
    elif kind == "parcel":
        work = FIRST if order.parcel.ids else WORK
        check(mesh_codec.read_micro_batch(order.parcel, work), work)
    elif kind is None:
        raise ProtocolError("An order is empty.", "Say what is to be done.")


def _report(data: bytes) -> None:
    """Decode a report as a coordinator does that requested logits."""
    asked = {NUMBER: VerifyRequest(0, GREEDY, 8, NO_IDS, _CHUNK, logits=True)}
    event = read_event(parse_message(mesh_pb2.Report, data), WORK, asked.get)
    if isinstance(event, StageAnswer) and (
        event.logits is None or event.logits.shape != (len(_CHUNK) + 1, WORK.n_vocab)
    ):
        raise AssertionError(f"logits of another shape got through: {event.logits}")


def _reserve(data: bytes) -> None:
    """Decode what room is asked for as the store of layers does."""
    read_manifest(parse_message(layers_pb2.Wanted, data).recipe)


def _figures(data: bytes) -> None:
    read_figures(parse_message(layers_pb2.Figures, data))


def readers() -> list[Reader]:
    """Return all readers of a mesh's messages."""
    warm = VerifyRequest(0, Sampling(0.8, 40, 0.9, 5), 2, NO_IDS, _CHUNK, logits=True)
    ids = MicroBatch(0, 1, 0, np.array([1, 2, 5, 6], np.int32), warm)
    orders = [mesh_pb2.Order(prepare=write_work(WORK)),
              mesh_pb2.Order(parcel=write_micro_batch(ids, half=True)),
              mesh_pb2.Order(parcel=write_micro_batch(MicroBatch(1, 2, 8, _ROWS, warm), half=False)),
              mesh_pb2.Order(parcel=write_micro_batch(MicroBatch(1, 2, 8, _ROWS), half=True))]  # fmt: skip
    verdict = Verdict(1, np.array([9], np.int32), 0.1)
    logits = np.zeros((3, WORK.n_vocab), np.float32)
    events: list[Event] = [
        StageLoaded(layers=3), MicroBatch(1, 2, 8, _ROWS, took=Took(0.5, 0.2)), StageAnswer(NUMBER, verdict, logits),
        Failed(NUMBER, ProtocolError("No.", "Ask again.")),
    ]  # fmt: skip
    reports = [write_event(event, half=True) for event in events]
    piece = layers_pb2.Piece(first=0, last=1, size=5, sha256=bytes(32))
    recipe = layers_pb2.Recipe(fingerprint=bytes(32), name="big", architecture="llama", layers=2, pieces=[piece])
    wanted = layers_pb2.Wanted(protocol=PROTOCOL, recipe=recipe)
    figures = layers_pb2.Figures(taken=1, rows=[1, 4], seconds=[0.1, 0.2], layer=9, disk=1e9, memory=5)
    query = layers_pb2.MeasureRequest(protocol=PROTOCOL, header=b"GGUF" * 9, data=5, layers=2, width=64)
    return [
        Reader("mesh orders", orders, _order),
        Reader("mesh reports", reports, _report),
        Reader("layers", [wanted], _reserve),
        Reader("figures", [figures], _figures),
        Reader("measuring", [query], lambda data: read_blocks(parse_message(layers_pb2.MeasureRequest, data))),
    ]
