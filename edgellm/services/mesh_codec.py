"""Conversion between the mesh's records and the messages of `mesh.proto`; all input is checked here."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgellm.engine import Floats, Ids
from edgellm.engine.gguf.reader import MAX_LAYERS
from edgellm.engine.native import VERSION
from edgellm.errors import InvalidOption, ProtocolError
from edgellm.layer_range import LayerRange
from edgellm.mesh import messages
from edgellm.rpc.layers import read_pieces, write_pieces
from edgellm.rpc.protos import PROTOCOL, check_version
from edgellm.rpc.protos import edgellm_pb2 as words
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.services import verification_codec as codec
from edgellm.spec.protocols import VerifyRequest

CONTRACT = pb.DESCRIPTOR.services_by_name["Mesh"]
HOLDS, WORK = (f"/{CONTRACT.full_name}/{name}" for name in ("Holds", "Work"))
_MAX_POSITIONS = 2**20  # positions of all sessions of a stage


def check_engine(version: str, name: str) -> None:
    """Raise ProtocolError where another device has another llama.cpp: the same text might come out differently."""
    if version != VERSION:
        raise ProtocolError(
            f"{name} has llama-cpp-python {version[:40]}, and this device {VERSION}.",
            "Install the same version on both.",
        )


def write_work(work: messages.StageSpec) -> pb.Prepare:
    return pb.Prepare(
        protocol=PROTOCOL, model=bytes.fromhex(work.model), name=work.name, first=work.layers.start,
        last=work.layers.last, parameters=work.n_params, reproducible=work.reproducible,
        layers=work.n_layers, n_embd=work.n_embd, n_vocab=work.n_vocab, context=work.context, sessions=work.sessions,
        half=work.half, version=VERSION, pieces=write_pieces(work.pieces),
    )  # fmt: skip


def read_work(message: pb.Prepare) -> messages.StageSpec:
    """Return a stage's work from Prepare, checked. Raises ProtocolError: it cannot be meant, or comes from a
    coordinator that speaks or computes otherwise; LayersRefused: it names pieces that cannot be."""
    check_version(message.protocol, "the coordinator")
    check_engine(message.version, "The coordinator")
    if len(message.model) != 32:
        codec.refuse("The request for a stage has no model.")
    if not (message.first <= message.last < message.layers <= MAX_LAYERS):
        codec.refuse(f"The requested layers {message.first} to {message.last} of {message.layers} are invalid.")
    if not (0 < message.n_embd <= 2**16 and 0 < message.n_vocab <= 2**22 and 0 < message.context <= 2**22):
        codec.refuse("The model's dimensions are invalid.")
    if not (0 < message.sessions <= 64 and message.sessions * message.context <= _MAX_POSITIONS):
        codec.refuse(f"The request for {message.sessions} sessions of {message.context} positions is invalid.")
    return messages.StageSpec(
        message.model.hex(), message.name[: codec.SAID], LayerRange(message.first, message.last + 1), message.layers,
        message.n_embd, message.n_vocab, message.context, message.sessions, message.half,
        read_pieces(message.pieces), message.parameters, message.reproducible,
    )  # fmt: skip


def write_micro_batch(batch: messages.MicroBatch, half: bool) -> pb.MeshParcel:
    """Convert a micro-batch to its message. Rows travel as 32-bit floats; `half`: as 16-bit floats unless they exceed
    these."""
    message = pb.MeshParcel(session=batch.session, number=batch.number, start=batch.start)
    data = batch.data
    if data.ndim == 1:
        message.ids.extend(data.tolist())
    else:
        message.wide = not half or not float(np.abs(data).max()) <= float(np.finfo(np.float16).max)
        message.rows = data.astype("<f4" if message.wide else "<f2").tobytes()
    if (request := batch.request) is not None:
        message.ask.CopyFrom(codec.write_verify(replace(request, round=batch.number)).verify)
        message.sampling.CopyFrom(codec.write_sampling(request.sampling))
        message.logits = request.logits
    return message


def read_micro_batch(message: pb.MeshParcel, work: messages.StageSpec) -> messages.MicroBatch:
    """Return a micro-batch for a stage of `work`; the stage checks the rest. Raises ProtocolError: it violates the
    protocol."""
    if message.rows:
        kind = np.dtype("<f4" if message.wide else "<f2")
        if message.ids or len(message.rows) % (kind.itemsize * work.n_embd):
            codec.refuse(f"A micro-batch has {len(message.ids)} ids and {len(message.rows)} bytes of rows.")
        data: Ids | Floats = np.frombuffer(message.rows, kind).reshape(-1, work.n_embd).astype(np.float32)
    else:
        data = codec.read_ids(message.ids, work.n_vocab)
    request = None
    if message.HasField("ask"):
        sampling = codec.read_sampling(message.sampling)
        request = codec.read_verify(message.ask, work.n_vocab, work.context, message.session, sampling)
        if len(request.prefix) or request.extra or request.position + len(request.draft) != message.start + len(data):
            codec.refuse("The requested outputs do not match the micro-batch.")
        request.logits = message.logits
    return messages.MicroBatch(message.session, message.number, message.start, data, request)


def write_event(event: messages.Event, half: bool) -> pb.Report:
    """Return a stage's report of an event. Raise the error of a loss, with which the stream ends."""
    match event:
        case pb.StageLoaded():
            return pb.Report(loaded=event)
        case messages.MicroBatch():
            return pb.Report(onward=write_micro_batch(event, half), **event.took._asdict())
        case messages.StageAnswer():
            logits = b"" if event.logits is None else event.logits.astype("<f4").tobytes()
            verdict = codec.write_verdict(event.number, event.verdict).verdict
            return pb.Report(answer=pb.StageAnswer(verdict=verdict, logits=logits), **event.took._asdict())
        case messages.Failed():
            error = event.error
            return pb.Report(failed=pb.StageFailed(number=event.number, what=error.what, next_step=error.next_step))
    raise event.error


def read_event(
    message: pb.Report, work: messages.StageSpec, judged: Callable[[int], VerifyRequest | None]
) -> messages.Event | None:
    """Return the event in a stage's report, checked against the request that a micro-batch of that number is `judged`
    for; None for a sign of life, and an answer that is no longer due. Raises ProtocolError: it violates the
    protocol."""
    took = messages.Took(_seconds(message.held), _seconds(message.computing))
    match message.WhichOneof("report"):
        case "loaded":
            if message.loaded.layers > len(work.layers):
                codec.refuse(f"A stage of {len(work.layers)} layers reports that {message.loaded.layers} are loaded.")
            return message.loaded
        case "onward":
            return replace(read_micro_batch(message.onward, work), took=took)
        case "answer":
            answer = _answer(message.answer, work, judged(message.answer.verdict.round))
            return None if answer is None else replace(answer, took=took)
        case "failed":
            what, next_step = message.failed.what[: codec.SAID], message.failed.next_step[: codec.SAID]
            return messages.Failed(message.failed.number, InvalidOption(what, next_step))
        case None:
            codec.refuse("A report is empty.")
    return None


def _answer(
    message: pb.StageAnswer, work: messages.StageSpec, request: VerifyRequest | None
) -> messages.StageAnswer | None:
    if request is None:
        return None
    number, verdict = message.verdict.round, codec.read_verdict(message.verdict, request, work.n_vocab)
    if not request.logits:
        return messages.StageAnswer(number, verdict)
    rows = len(request.draft) + 1
    if len(message.logits) != 4 * rows * work.n_vocab:
        codec.refuse(f"{len(message.logits)} bytes of logits are not {rows} rows of {work.n_vocab}.")
    logits = np.frombuffer(message.logits, "<f4").reshape(rows, work.n_vocab).astype(np.float32)
    if not np.isfinite(logits).all():
        codec.refuse("Logits contain NaN or infinity.")
    return messages.StageAnswer(number, verdict, logits)


def _seconds(taken: float) -> float:
    if not 0.0 <= taken < math.inf:
        codec.refuse(f"A stage reports {taken} seconds, which is invalid.")
    return taken


def write_working(progress: tuple[float, int]) -> pb.Report:
    loaded, step = progress
    return pb.Report(working=words.Working(step=step), progress=loaded)
