"""The child process of `edgellm.engine.trial.probe`: load a model, decode some rows, report the outcome.

It writes lines of JSON to standard output: shares of the progress, the first before it touches the file, and at the end
an object, which holds the error where one is raised. The process ends earlier if the file crashes it, or it takes more
than it is granted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engine.context import Context
from edgellm.engine.embedding.embedder import Embedder
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.engine.layer_block import Block
from edgellm.engine.model import Model
from edgellm.engine.trial.probe import AGAIN
from edgellm.engine.trial.self_test import self_test
from edgellm.errors import EdgeError, EngineFailed
from edgellm.system import be_killed_first, limit

_POSITIONS = 32
_ROWS = 4
_STEP = 0.02  # shares of the progress between two lines
_GIGABYTE = 10**9
_SECONDS, _SECONDS_A_GIGABYTE = 60, 60  # of all processors together
_MEMORY = 4 * _GIGABYTE  # besides twice the file, which llama.cpp may lay out again


def main(arguments: list[str]) -> None:
    """Try a model; `arguments` are its path, that of an EAGLE-3 head or nothing, the bytes of all files, the hardware
    in JSON, 1 for the vocabulary alone, 1 for its MTP layer, too, 1 for embeddings, and 1 for the self-test."""
    path, eagle3 = Path(arguments[0]), Path(arguments[1]) if arguments[1] else None
    size, hardware = int(arguments[2]), _hardware(json.loads(arguments[3]))
    text_only, mtp, embeds, tests = (flag == "1" for flag in arguments[4:])
    _limit(size)
    _say(0.0)
    outcome: dict[str, object] = {}
    try:
        outcome = {"faults": _load(path, eagle3, hardware, text_only, mtp, embeds, tests)}
    except EdgeError as error:
        outcome = {"error": type(error).__name__, "what": error.what, "next_step": error.next_step}
    except MemoryError:  # it takes more than it is granted
        raise
    except Exception as error:  # noqa: BLE001  an error of Python's says nothing of the file
        what = f"The trial of {path} failed: {error!r}."
        outcome = {"error": EngineFailed.__name__, "what": what, "next_step": AGAIN}
    _say(outcome)


def _load(
    path: Path, eagle3: Path | None, hardware: Hardware, text_only: bool, mtp: bool, embeds: bool, tests: bool
) -> list[str]:
    """Load, decode and test the model; return what `self_test` does, nothing without it or for one that embeds."""
    reported = 0.0

    def report(share: float) -> None:
        nonlocal reported
        if share >= reported + _STEP:
            reported = share
            _say(share)

    with Model.load(
        path,
        hardware=hardware,
        text_only=text_only,
        progress=report,
        probe=False,
        speculates=mtp or eagle3 is not None,
        eagle3=None if eagle3 is None else ModelFile.open(eagle3),
    ) as model:
        if model.has_vocabulary:
            _ = model.vocabulary
            model.tokenize("A word,\n2 words.", special=True)
        if text_only:
            return []
        if embeds:
            with Embedder(model, positions=_POSITIONS) as embedder:
                embedder.embed(np.arange(_ROWS, dtype=np.int32) % max(1, model.n_vocab))
            return []
        _decode(model)
        return self_test(model) if tests and model.has_vocabulary else []


def _hardware(fields: dict[str, Any]) -> Hardware:
    """Return the hardware of the fields in `TRIED`, without a choice of its own where there is none."""
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Hardware(**{**fields, **lists, "gpu_layers": fields["gpu_layers"] or 0})


def _decode(model: Model) -> None:
    """Decode several rows together, then one alone, with and without flash attention."""
    if not model.has_vocabulary:
        block = Block(model, head=True, n_ctx=_POSITIONS, rows=_ROWS)
        for start, n in ((0, _ROWS), (_ROWS, 1)):
            block.forward(np.zeros((n, model.n_embd), dtype=np.float32), start=start, outputs=1)
        return
    ids = np.arange(_ROWS, dtype=np.int32) % max(1, model.n_vocab)
    for flash in (None, False):
        with Context(model, n_ctx=_POSITIONS, n_batch=_ROWS, flash=flash) as context:
            context.decode(ids)
            context.decode(ids[:1])
            if not context.flash:
                return


def _limit(size: int) -> None:
    """Limit processor time and memory, leave no core file, and be the first to be killed when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too, and ends this process
    be_killed_first()
    limit("RLIMIT_CORE", 0)
    limit("RLIMIT_CPU", _SECONDS + _SECONDS_A_GIGABYTE * size // _GIGABYTE, soft=True)
    limit("RLIMIT_DATA", _MEMORY + 2 * size)


def _say(found: object) -> None:
    os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
