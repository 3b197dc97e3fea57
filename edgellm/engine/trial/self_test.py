"""Whether a model's cache gives back what was rolled back and branched: some twenty tokens, against fresh contexts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.engine.context import Context, SeqRows
from edgellm.engine.model import Model
from edgellm.engine.trial.probe import MTP
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import EngineFailed

ROLLBACK, SEQUENCES = "rollback", "sequences"
TRIALS = (ROLLBACK, SEQUENCES, MTP)
"""After a rollback; of several sequences in one batch, branches among them; by an MTP layer after a rejected draft."""
_TEXT = 14  # tokens
_POSITIONS, _ROWS = 64, 16
_NEAR = 0.02  # of the largest logit: other batch sizes move logits by a thousandth, wrong states by a tenth


def self_test(model: Model, seed: int = 0) -> list[str]:
    """Return which of `TRIALS` leave a model's cache in a state that differs from a fresh context's; in order.

    `seed` chooses the tokens.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, model.n_vocab, 3 * _TEXT).astype(np.int32)
    trials = {ROLLBACK: (_after_a_batch, _after_single_tokens), SEQUENCES: (_in_branches,), MTP: (_by_mtp,)}
    return [name for name, parts in trials.items() if not all(_passes(part, model, ids) for part in parts)]


def _passes(trial: Callable[[Model, Ids], bool], model: Model, ids: Ids) -> bool:
    try:
        return trial(model, ids)
    except EngineFailed:  # llama.cpp refuses a batch that does not follow what it has
        return False


def _after_a_batch(model: Model, ids: Ids) -> bool:
    """Roll back a part of a batch, all of one, and more."""
    with Context(model, n_ctx=_POSITIONS, n_batch=_ROWS, rolls_back=True) as context:
        context.decode(ids[:_TEXT])
        for dropped, again in ((3, 2), (5, 3), (9, 2)):
            context.decode(ids[_TEXT : _TEXT + 5], outputs=5)
            context.rollback(context.length() - dropped)
            if not _near(model, context, context.decode(ids[-again:])):
                return False
    return True


def _after_single_tokens(model: Model, ids: Ids) -> bool:
    """Reject a draft that was decoded token by token, twice."""
    with Context(model, n_ctx=_POSITIONS, n_batch=_ROWS) as context:
        text = ids[:_TEXT]
        for at in (0, 4):
            context.decode(text[context.sync(text) :])
            for token in range(4):
                context.decode(ids[_TEXT + at + token : _TEXT + at + token + 1])
            text = np.concatenate((text, ids[_TEXT + at : _TEXT + at + 2], ids[-1:]))
            if not _near(model, context, context.decode(text[context.sync(text) :])):
                return False
    return True


def _in_branches(model: Model, ids: Ids) -> bool:
    """Continue a text in two ways in one batch, and the second one after a rollback."""
    with Context(model, n_ctx=_POSITIONS, n_seq=2, n_batch=_ROWS) as context:
        context.decode(ids[:_TEXT])
        context.branch(0, 1)
        tails = (SeqRows(0, ids[_TEXT : _TEXT + 2]), SeqRows(1, ids[_TEXT + 2 : _TEXT + 4]))
        found = [view.copy() for view in context.decode_rows(tails)]
        if not all(_near(model, context, found[seq], seq) for seq in (0, 1)):
            return False
        context.rollback(_TEXT + 1, 1)
        return _near(model, context, context.decode(ids[-2:], seq=1), seq=1)


def _by_mtp(model: Model, ids: Ids) -> bool:
    """Draft with the MTP layer, reject the draft, and predict again."""
    text = np.concatenate((ids[: _TEXT + 2], ids[-2:]))
    with Context(model, n_ctx=_POSITIONS, n_batch=_ROWS, rolls_back=True, mtp=True) as context:
        if context.mtp is None:
            return True
        context.decode(ids[:_TEXT])
        if context.mtp.predict(ids[: _TEXT + 1]) is None:
            return False
        context.mtp.follow(int(ids[_TEXT + 1]))
        context.decode(ids[_TEXT : _TEXT + 4], outputs=4)
        context.rollback(_TEXT + 2)
        context.decode(text[_TEXT + 2 : -1])
        found = context.mtp.predict(text)
        with Context(model, n_ctx=_POSITIONS, mtp=True) as fresh:
            fresh.decode(text[:-1])
            expected = fresh.mtp.predict(text) if fresh.mtp is not None else None
        return found is not None and expected is not None and _close(found, expected)


def _near(model: Model, context: Context, logits: Floats, seq: int = 0) -> bool:
    """Return whether a fresh context has the last row of `logits` after what `context` holds."""
    with Context(model, n_ctx=_POSITIONS) as fresh:
        expected = fresh.decode(context.cached(seq))[0]
        return _close(logits[-1], expected)


def _close(found: Floats, expected: Floats) -> bool:
    return float(np.abs(found - expected).max()) <= _NEAR * float(np.abs(expected).max())
