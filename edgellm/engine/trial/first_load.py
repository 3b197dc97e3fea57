"""The child process of `edgellm.engine.trial.probe`: load a model, and decode some rows.

The process ends earlier if the file crashes it, or it takes more than it is granted.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engine.context import Context
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.engine.layer_block import Block
from edgellm.engine.model import ContextSpec, LoadSpec, Model
from edgellm.engine.trial.probe import AGAIN
from edgellm.errors import EdgeError, EngineFailed
from edgellm.isolation.serving import Functions, Report
from edgellm.system import be_killed_first, limit

_SECONDS = 60  # processor time of all threads, and so much for each gigabyte
_MEMORY = 2**32  # bytes beside twice the file, which llama.cpp may lay out anew
_POSITIONS = 64


def functions(report: Report) -> Functions:
    """Return the function that tries a model."""
    return {"try_model": partial(_try_model, report)}


def _try_model(
    report: Report, _data: memoryview, path: str, eagle3: str, size: int, hardware: dict[str, Any],
    ways: dict[str, bool],
) -> None:  # fmt: skip
    """Load a model, and decode some rows, or only open a context for it.

    `eagle3` is the path of an EAGLE-3 head or "", `size` the bytes of all files. `ways`: `text_only` for the vocabulary
    alone, `mtp` to try the MTP layer, too, `dry` to load no weights.
    """
    limit("RLIMIT_CORE", 0)
    limit("RLIMIT_CPU", _SECONDS + _SECONDS * size // 10**9, soft=True)
    limit("RLIMIT_DATA", _MEMORY + 2 * size)
    be_killed_first()
    report(0.0)
    lists = {name: tuple(value) for name, value in hardware.items() if isinstance(value, list)}
    # The child chooses no cards where the parent has not.
    chosen = Hardware(**{**hardware, **lists, "gpu_layers": hardware["gpu_layers"] or 0})
    head = ModelFile.open(Path(eagle3)) if eagle3 else None
    spec = LoadSpec(chosen, text_only=ways["text_only"], dry=ways["dry"], speculates=ways["mtp"] or head is not None,
                    eagle3=head)  # fmt: skip
    try:
        with Model.load(Path(path), spec, progress=report, faults=()) as model:
            if spec.dry:
                Context(model, ContextSpec(n_ctx=_POSITIONS, rolls_back=True, speculates=True)).close()
                return
            if model.has_vocabulary:
                _ = model.vocabulary
                model.tokenize("A word,\n2 words.", special=True)
            if not ways["text_only"]:
                _decode(model)
            if model.speculator is not None:
                _speculate(model)
    except (EdgeError, MemoryError):
        raise
    except Exception as error:
        raise EngineFailed(f"The trial of {path} failed: {error!r}.", AGAIN) from error


def _decode(model: Model) -> None:
    """Decode several rows together, then one alone, with and without flash attention; or embed them."""
    ids = np.arange(6, dtype=np.int32) % max(1, model.n_vocab)
    if model.header.number("pooling_type") > 0:  # its file says how it embeds
        from edgellm.engine.embedding.embedder import Embedder

        with Embedder(model, positions=_POSITIONS) as embedder:
            embedder.embed(ids)
        return
    if not model.has_vocabulary:
        block = Block(model, ContextSpec(_POSITIONS), head=True)
        for start, n in ((0, len(ids)), (len(ids), 1)):
            block.forward(np.zeros((n, model.n_embd), dtype=np.float32), start=start, outputs=1)
        return
    for flash in (None, False):
        with Context(model, ContextSpec(n_ctx=_POSITIONS, flash=flash)) as context:
            context.decode(ids)
            context.decode(ids[:1])
            if not context.native_spec.flash:
                return


def _speculate(model: Model) -> None:
    """Draft two tokens from the model's states, and reject them."""
    ids = np.arange(4, dtype=np.int32) % max(1, model.n_vocab)
    with Context(model, ContextSpec(n_ctx=_POSITIONS, rolls_back=True, speculates=True)) as context:
        if context.speculator is not None:
            context.decode(ids[:3])
            context.speculator.predict(ids)
            context.speculator.follow(int(ids[0]))
            context.decode(ids, outputs=2)
            context.rollback(4)
            context.speculator.predict(context.cached())
