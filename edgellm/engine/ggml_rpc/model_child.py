"""The process that holds a model over RPC servers: `python -m edgellm.engine.ggml_rpc.model_child`.

llama.cpp ends the process whose RPC server goes away, so this one does nothing but compute for
`edgellm.engine.ggml_rpc.model_process`, whose orders it reads from its standard input. It ends with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgellm.engine.context import Context
from edgellm.engine.ggml_rpc import backend
from edgellm.engine.ggml_rpc.messages import pack, pack_error, unpack
from edgellm.engine.gguf.reader import ModelFile, mtp_layers
from edgellm.engine.hardware import Hardware
from edgellm.engine.kv.sequences import SeqRows
from edgellm.engine.memory_fit import reckon
from edgellm.engine.model import Model
from edgellm.engine.trial.self_test import self_test
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EdgeError, EngineFailed
from edgellm.isolation.serving import LENGTH, Answer, serve
from edgellm.system import be_killed_first, limit

_NO_REUSE = "LLAMA_GRAPH_REUSE_DISABLE"
"""llama.cpp's variable: with several contexts, a server may have dropped the graph that it is asked to use again."""
_NO_IDS = np.empty(0, np.int32)
_STEP = 0.01  # of the model, between two reports of how much is loaded


class _Held:
    """The model and the context of this process."""

    def __init__(self, reports: IO[bytes]) -> None:
        """Write how much of the model is loaded to `reports`, before the answer."""
        self._reports, self._reported = reports, 0.0
        self._model: Model | None = None
        self._opened: Context | None = None
        self._orders: dict[str, Callable[[dict[str, Any], Ids], bytes]] = {
            "reckon": self._reckon, "load": self._load, "decode": self._decode, "sync": self._sync,
            "rollback": self._rollback, "copy": self._copy, "clear": self._clear,
        }  # fmt: skip

    def answer(self, message: bytes) -> bytes:
        fields, rest = unpack(message)
        try:
            return self._orders[fields["do"]](fields, np.frombuffer(rest, np.int32) if len(rest) else _NO_IDS)
        except EdgeError as error:
            return pack_error(error)

    @property
    def _context(self) -> Context:
        if self._opened is None:
            raise EngineFailed("No model is loaded.", "Load one first.")
        return self._opened

    def _reckon(self, fields: dict[str, Any], _ids: Ids) -> bytes:
        """Answer with the bytes that the model takes as a whole beside its weights."""
        file = ModelFile.open(Path(fields["model"]))
        found = reckon(file, _hardware(fields, gpu_layers=0), lambda model: [_context_of(model, fields)], reserved=True)
        return pack({"caches": found.caches.total(), "compute": found.compute.total()})

    def _load(self, fields: dict[str, Any], _ids: Ids) -> bytes:
        """Load the model over the servers at some ports of this machine; answer with what llama.cpp gets wrong."""
        file = ModelFile.open(Path(fields["model"]))
        devices: list[str] = []
        shares: list[float] = []
        for port, layers in zip(fields["ports"], fields["layers"], strict=True):
            names = backend.add_server(port)
            devices += names
            shares += [layers / len(names)] * len(names)
        cards = fields["cards"]
        devices += cards
        shares += [fields["on_cards"] / max(1, len(cards))] * len(cards)
        if shares:  # llama.cpp counts the head as a layer, and an MTP layer that is not loaded, too
            shares[-1] += 1 + mtp_layers(file.header)
        hardware = _hardware(fields, gpu_layers=round(sum(shares)), devices=tuple(devices), tensor_split=tuple(shares))
        faults = fields["faults"]
        self._model = Model.load(file, hardware=hardware, probe=False, faults=faults or (), progress=self._report)
        if faults is None and (faults := self._tried(self._model)):
            self._model.close()
            self._model = Model.load(file, hardware=hardware, probe=False, faults=faults)
        self._opened = _context_of(self._model, fields)
        return pack({"faults": list(faults)})

    def _report(self, share: float) -> None:
        if share >= self._reported + _STEP:
            self._reported = share
            message = pack({"progress": share})
            self._reports.write(LENGTH.pack(len(message)) + message)
            self._reports.flush()

    def _tried(self, model: Model) -> Sequence[str]:
        """Return what llama.cpp gets wrong of a model."""
        os.environ[_NO_REUSE] = "1"
        try:
            return self_test(model)
        finally:
            del os.environ[_NO_REUSE]

    def _decode(self, fields: dict[str, Any], ids: Ids) -> bytes:
        rows, at = [], 0
        for seq, n, outputs in fields["rows"]:
            rows.append(SeqRows(seq, ids[at : at + n], outputs))
            at += n
        found = self._context.decode_rows(rows)
        return pack({}, *(one.tobytes() for one in found))

    def _sync(self, fields: dict[str, Any], ids: Ids) -> bytes:
        return pack({"length": self._context.sync(ids, fields["seq"])})

    def _rollback(self, fields: dict[str, Any], _ids: Ids) -> bytes:
        self._context.rollback(fields["length"], fields["seq"])
        return pack({})

    def _copy(self, fields: dict[str, Any], _ids: Ids) -> bytes:
        self._context.copy_prefix(fields["from"], fields["to"], fields["length"])
        return pack({})

    def _clear(self, fields: dict[str, Any], _ids: Ids) -> bytes:
        self._context.clear(fields["seq"])
        return pack({})


def _hardware(fields: dict[str, Any], **places: Any) -> Hardware:
    wanted = fields["hardware"]
    return Hardware(
        threads=wanted["threads"], cache_type=wanted["cache_type"], flash_attn=wanted["flash_attn"], **places
    )


def _context_of(model: Model, fields: dict[str, Any]) -> Context:
    n_seq = fields["n_seq"]
    return Context(
        model, n_ctx=fields["n_ctx"], n_seq=n_seq, n_batch=fields["n_batch"], unified=n_seq == 1, rolls_back=True
    )


def prepare(reports: IO[bytes]) -> Answer:
    """Return the function that answers orders."""
    limit("RLIMIT_CORE", 0)
    be_killed_first()
    return _Held(reports).answer


if __name__ == "__main__":
    serve(partial(prepare, os.fdopen(os.dup(1), "wb")))
