"""Faults put into a context's caches and logits on purpose, each of which llama.cpp has had or could have."""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from edgellm.engine import Context, Floats, Ids, SeqRows
from edgellm.engine.kv import kv_cache
from edgellm.engine.kv.kv_cache import KVCache
from edgellm.engine.native import lib
from edgellm.engine.trial.self_test import ROLLBACK, ROWS, SEQUENCES


@dataclass(frozen=True, slots=True)
class Fault:
    """`put` has the fault while its block runs; `found` is the trial of `self_test` that must fail then, with
    each of `architectures`."""

    put: Callable[[], AbstractContextManager[object]]
    found: str
    architectures: Sequence[str]


_POSITIONS = 64  # bytes at the beginning of a saved state, before its numbers


def trusting(self: KVCache, seq: int, _one: object, length: int, _now: int) -> bool:
    """Believe what llama.cpp answers."""
    return bool(lib.llama_memory_seq_rm(self._memory, seq, length, -1))


def _not_restored() -> AbstractContextManager[object]:
    """Recurrent states are not restored but for their positions: they are those of the first text that was."""
    restored: Any = lib.llama_state_seq_set_data_ext
    first: dict[int, bytes] = {}

    def stale(context: int, state: Any, size: int, seq: int, flags: int) -> int:
        numbers = first.setdefault(size, bytes(state)[_POSITIONS:])
        mixed = (ctypes.c_uint8 * size).from_buffer_copy(bytes(state)[:_POSITIONS] + numbers)
        return int(restored(context, mixed, size, seq, flags))

    return patch.object(kv_cache, "_set_state", stale)


def _shared_state() -> AbstractContextManager[object]:
    """What is decoded in a branch changes the text that it came from."""
    decode_rows = Context.decode_rows

    def shared(self: Context, rows: Sequence[SeqRows]) -> list[Floats]:
        found = decode_rows(self, rows)
        if [one.seq for one in rows] == [0, 1]:
            lib.llama_memory_seq_cp(lib.llama_get_memory(self.native.owned.pointer), 1, 0, -1, -1)
        return found

    return patch.object(Context, "decode_rows", shared)


def _rows_of_the_other() -> AbstractContextManager[object]:
    """Each of two sequences has the other's logits."""
    decode_rows = Context.decode_rows
    return patch.object(Context, "decode_rows", lambda self, rows: decode_rows(self, rows)[::-1])


def _rows_of_others() -> AbstractContextManager[object]:
    """Each row of a batch has the logits of the one before it."""
    decode = Context.decode

    def rolled(self: Context, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        return np.roll(decode(self, ids, seq=seq, outputs=outputs), 1, axis=0)

    return patch.object(Context, "decode", rolled)


def _with(name: str, function: Callable[..., object]) -> Callable[[], AbstractContextManager[object]]:
    """A cache with another method."""
    return partial(patch.object, KVCache, name, function)


_SNAPSHOTS = ("qwen35", "qwen35moe", "lfm2", "lfm2moe", "nemotron_h")
_WINDOWS = ("gemma2", "gemma3", "gpt-oss", "cohere2", "mimo2", "afmoe", "step35")
_CHECKPOINTS = (
    "qwen3next", "granitehybrid", "falcon-h1", "jamba", "kimi-linear", "minimax-01", "mamba", "mamba2", "rwkv6",
    "rwkv7",
)  # fmt: skip
_ALL_KINDS = (
    "llama", "qwen3moe", "deepseek2", "gemma3", "gpt-oss", "qwen35", "lfm2", "granitehybrid", "mamba2", "rwkv7",
)  # fmt: skip

FAULTS = {
    "snapshots of earlier batches": Fault(_with("_cut", trusting), ROLLBACK, _SNAPSHOTS),
    "rollback behind a sliding window": Fault(_with("_least", lambda *_: 0), ROLLBACK, _WINDOWS),
    "recurrent state not restored": Fault(_not_restored, ROLLBACK, _CHECKPOINTS),
    "snapshots of a state that made room": Fault(_with("begin_shared_batch", lambda *_: None), ROLLBACK, _SNAPSHOTS),
    "positions not forgotten": Fault(_with("truncate", lambda *given: given[2]), ROLLBACK, _ALL_KINDS),
    "branch not copied": Fault(_with("copy", lambda *_: True), SEQUENCES, _ALL_KINDS),
    "branches that share a state": Fault(_shared_state, SEQUENCES, _ALL_KINDS),
    "logits of another sequence": Fault(_rows_of_the_other, SEQUENCES, _ALL_KINDS),
    "several texts in one batch": Fault(nullcontext, SEQUENCES, ("plamo2",)),
    "logits of another row": Fault(_rows_of_others, ROWS, _ALL_KINDS),
}
"""The faults by name."""
