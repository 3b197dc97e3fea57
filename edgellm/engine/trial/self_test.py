"""The child process of `edgellm.engine.trial.probe`: load a model, decode some rows, and test its cache after rollbacks
and branches: some twenty tokens, against fresh contexts.

The process ends earlier if the file crashes it, or it takes more than it is granted. A sliding window loses what is
behind it only in a text longer than the window and than the least that llama.cpp keeps. So a rollback behind the window
is tried with small models alone.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from edgellm.engine.context import Context
from edgellm.engine.gguf.memory import cells
from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.engine.kv.sequences import SeqRows
from edgellm.engine.layer_block import Block
from edgellm.engine.model import ContextSpec, LoadSpec, Model
from edgellm.engine.trial.probe import AGAIN
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import EdgeError, EngineFailed
from edgellm.isolation.serving import Functions, Report
from edgellm.system import be_killed_first, limit

ROLLBACK, SEQUENCES, ROWS = "rollback", "sequences", "rows"
"""Trials of logits: after a rollback; of several sequences in a batch, also branches; of several rows of a sequence in
a batch. Another is of the model's speculator, after a rejected draft."""
_Part: TypeAlias = Callable[[Model, Ids], bool]
_SECONDS = 60  # processor time of all threads, and so much for each gigabyte
_MEMORY = 2**32  # bytes beside twice the file, which llama.cpp may lay out anew
_TEXT = 6  # tokens
_POSITIONS, _ROWS = 64, 16
_MOST_WORK = 2e11  # positions times parameters, about ten seconds of two cores
_NEAR = 0.02  # share of the largest logit: other batch sizes move logits by 0.001, wrong states by 0.1
_SPREAD = 3.0  # limit as a multiple of a quantised model's own rounding, if that is more
_EXACT = 2e-3  # share of the largest logit for a model in float32, where tables of functions round


def self_test(model: Model, seed: int = 0) -> list[str]:
    """Return which trials leave a model's cache in a state that differs from a fresh context's. `seed` chooses the
    tokens."""
    ids = np.random.default_rng(seed).integers(0, model.n_vocab, 3 * _TEXT).astype(np.int32)
    trials: dict[str, tuple[_Part, ...]] = {
        ROLLBACK: (_after_a_batch, _after_single_tokens, _behind_the_window, _beside_others),
        SEQUENCES: (_in_branches,),
        ROWS: (_in_one_batch,),
        **({} if model.speculator is None else {model.speculator.kind: (_speculated,)}),
    }
    return [name for name, parts in trials.items() if not all(_passes(part, model, ids) for part in parts)]


def _passes(part: _Part, model: Model, ids: Ids) -> bool:
    try:
        return part(model, ids)
    except EngineFailed:  # llama.cpp refuses a batch that does not follow its cache
        return False


def _after_a_batch(model: Model, ids: Ids) -> bool:
    """Roll back a part of a batch, a whole batch, and more."""
    with Context(model, ContextSpec(n_ctx=_POSITIONS, n_batch=_ROWS, rolls_back=True)) as context:
        context.decode(ids[:_TEXT])
        for dropped, again in ((3, 2), (5, 3), (9, 2)):
            context.decode(ids[_TEXT : _TEXT + 5], outputs=5)
            context.rollback(context.length() - dropped)
            if not _near(model, context, context.decode(ids[-again:])):
                return False
    return True


def _after_single_tokens(model: Model, ids: Ids) -> bool:
    """Reject a draft that was decoded token by token, twice."""
    with Context(model, ContextSpec(n_ctx=_POSITIONS, n_batch=_ROWS)) as context:
        text = ids[:_TEXT]
        for at in (0, 4):
            context.decode(text[context.sync(text) :])
            for token in range(4):
                context.decode(ids[_TEXT + at + token : _TEXT + at + token + 1])
            text = np.concatenate((text, ids[_TEXT + at : _TEXT + at + 2], ids[-1:]))
            if not _near(model, context, context.decode(text[context.sync(text) :])):
                return False
    return True


def _behind_the_window(model: Model, ids: Ids) -> bool:
    """Roll back to where a sliding window has nothing any more."""
    if not (window := model.window):
        return True
    n = cells(window + _POSITIONS) + window
    if n * model.n_params > _MOST_WORK:
        return True
    with Context(model, ContextSpec(n_ctx=n, n_batch=_POSITIONS)) as context:
        context.decode(np.resize(ids, n))
        context.rollback(window)
        return _near(model, context, context.decode(ids[-2:]))


def _beside_others(model: Model, ids: Ids) -> bool:
    """Roll back a sequence after a batch of two others, for whose recurrent states its own has to make room."""
    spec = ContextSpec(n_ctx=_POSITIONS, n_seq=3, n_batch=_ROWS, unified=False, rolls_back=True)
    with Context(model, spec) as context:
        if not context.spec.snapshots:
            return True
        for seq in (0, 2, 1):
            context.decode(ids[_TEXT * seq : _TEXT * seq + 4], seq=seq)
        context.decode_rows((SeqRows(0, ids[:1]), SeqRows(1, ids[1:2])))
        context.rollback(3, seq=2)
        return _near(model, context, context.decode(ids[-1:], seq=2), seq=2)


def _in_one_batch(model: Model, ids: Ids) -> bool:
    """Verify a draft: each row of a batch behind a text has logits of its own."""
    with Context(model, ContextSpec(n_ctx=_POSITIONS, n_batch=_ROWS)) as context:
        context.decode(ids[:_TEXT])
        return _near(model, context, context.decode(ids[_TEXT : _TEXT + 5], outputs=5))


def _in_branches(model: Model, ids: Ids) -> bool:
    """Continue a text in two ways in one batch, then the second one after a rollback, and the first one."""
    with Context(model, ContextSpec(n_ctx=_POSITIONS, n_seq=2, n_batch=_ROWS)) as context:
        context.decode(ids[:_TEXT])
        context.branch(0, 1)
        tails = (SeqRows(0, ids[_TEXT : _TEXT + 2]), SeqRows(1, ids[_TEXT + 2 : _TEXT + 4]))
        found = [view.copy() for view in context.decode_rows(tails)]
        if not all(_near(model, context, found[seq], seq) for seq in (0, 1)):
            return False
        context.rollback(_TEXT + 1, 1)
        return all(_near(model, context, context.decode(ids[-2:], seq=seq), seq) for seq in (1, 0))


def _speculated(model: Model, ids: Ids) -> bool:
    """Draft from the model's states, reject the draft, and predict again."""
    text = np.concatenate((ids[: _TEXT + 2], ids[-2:]))
    with Context(model, ContextSpec(n_ctx=_POSITIONS, n_batch=_ROWS, rolls_back=True, speculates=True)) as context:
        if context.speculator is None:
            return True
        context.decode(ids[:_TEXT])
        if context.speculator.predict(ids[: _TEXT + 1]) is None:
            return False
        context.speculator.follow(int(ids[_TEXT + 1]))
        context.decode(ids[_TEXT : _TEXT + 4], outputs=4)
        context.rollback(_TEXT + 2)
        context.decode(text[_TEXT + 2 : -1])
        found = context.speculator.predict(text)
        with Context(model, ContextSpec(n_ctx=_POSITIONS, speculates=True)) as fresh:
            fresh.decode(text[:-1])
            expected = fresh.speculator.predict(text) if fresh.speculator is not None else None
        if found is None or expected is None:
            return False
        return _within_rounding(model, context, found, expected, text)


def _near(model: Model, context: Context, logits: Floats, seq: int = 0) -> bool:
    """Return whether a fresh context, decoding one by one what `context` holds, has `logits` for the last ids."""
    ids, n = context.cached(seq), len(logits)
    found = logits.copy()
    with Context(model, ContextSpec(n_ctx=max(_POSITIONS, len(ids)))) as fresh:
        expected = fresh.decode(ids[: len(ids) - n + 1])
        for row in range(n):
            end = len(ids) - n + row + 1
            if row:
                expected = fresh.decode(ids[end - 1 : end])
            if not _within_rounding(model, context, found[row], expected[0], ids[:end]):
                return False
    return True


def _within_rounding(model: Model, context: Context, found: Floats, expected: Floats, text: Ids) -> bool:
    """Return whether two rows of logits behind `text` are as near to each other as rounding leaves them."""
    known = expected > -np.inf  # a head that knows fewer tokens gives the rest -inf
    if not np.array_equal(known, found > -np.inf):
        return False
    share = _difference(found[known], expected[known])
    if context.spec.exact:
        return share <= _EXACT
    return share <= _NEAR or share <= _SPREAD * _noise(model, text)


def _noise(model: Model, text: Ids) -> float:
    """Return the share of the largest logit by which rounding moves the logits behind `text`.

    Decodes token by token in fresh contexts, without a rollback or a shared batch: once with keys and values in float32
    and without flash attention. In a quantised model the least difference may change the rounding of one layer after
    the other. The end of a long text is enough.
    """
    text, rows = text[-_POSITIONS:], []
    for exact in (False, True):
        with Context(model, ContextSpec(n_ctx=_POSITIONS, exact=exact)) as fresh:
            rows.append([fresh.decode(text[at : at + 1])[0].copy() for at in range(len(text))][-1])
    return _difference(*rows)


def _difference(found: Floats, expected: Floats) -> float:
    """Return the largest difference of two rows, as a share of the largest logit."""
    return float(np.abs(found - expected).max()) / max(float(np.abs(expected).max()), 1e-30)


def functions(report: Report) -> Functions:
    """Return the function that tries a model."""
    return {"try_model": partial(_try_model, report)}


def _try_model(
    report: Report, _data: memoryview, path: str, eagle3: str, size: int, hardware: dict[str, Any],
    ways: dict[str, bool],
) -> list[str]:  # fmt: skip
    """Load a model, decode some rows, and return the failures of `self_test`.

    `eagle3` is the path of an EAGLE-3 head or "", `size` the bytes of all files. `ways`: `text_only` for the vocabulary
    alone, `mtp` to try the MTP layer, too, `embeds` for a model that embeds, `tests` for the self-test.
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
    spec = LoadSpec(chosen, text_only=ways["text_only"], speculates=ways["mtp"] or head is not None, eagle3=head)
    try:
        with Model.load(Path(path), spec, progress=report, faults=()) as model:
            if model.has_vocabulary:
                _ = model.vocabulary
                model.tokenize("A word,\n2 words.", special=True)
            if not ways["text_only"]:
                _decode(model, ways["embeds"])
            tests = ways["tests"] and not (ways["text_only"] or ways["embeds"])
            return self_test(model) if tests and model.has_vocabulary else []
    except (EdgeError, MemoryError):
        raise
    except Exception as error:
        raise EngineFailed(f"The trial of {path} failed: {error!r}.", AGAIN) from error


def _decode(model: Model, embeds: bool) -> None:
    """Decode several rows together, then one alone, with and without flash attention."""
    ids = np.arange(_TEXT, dtype=np.int32) % max(1, model.n_vocab)
    if embeds:
        from edgellm.engine.embedding.embedder import Embedder

        with Embedder(model, positions=_POSITIONS) as embedder:
            embedder.embed(ids)
        return
    if not model.has_vocabulary:
        block = Block(model, ContextSpec(_POSITIONS, n_batch=_ROWS), head=True)
        for start, n in ((0, _TEXT), (_TEXT, 1)):
            block.forward(np.zeros((n, model.n_embd), dtype=np.float32), start=start, outputs=1)
        return
    for flash in (None, False):
        with Context(model, ContextSpec(n_ctx=_POSITIONS, n_batch=_ROWS, flash=flash)) as context:
            context.decode(ids)
            context.decode(ids[:1])
            if not context.spec.flash:
                return
