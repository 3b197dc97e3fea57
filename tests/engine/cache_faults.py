"""Faults put into a context's caches and logits on purpose, each of which llama.cpp has had or could have."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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
    """`put` has the fault while its block runs; `found` is the trial of `self_test.TRIALS` that must fail then, with
    each of `architectures`."""

    put: Callable[[], AbstractContextManager[object]]
    found: str
    architectures: Sequence[str]


_POSITIONS = 64  # bytes at the beginning of a saved state, before its numbers


def trusting(self: KVCache, seq: int, _one: object, length: int, _now: int) -> bool:
    """Believe what llama.cpp answers."""
    return bool(lib.llama_memory_seq_rm(self._memory, seq, length, -1))


@contextmanager
def _snapshots_of_earlier_batches() -> Iterator[None]:
    """Every rollback that `llama_memory_seq_rm` accepts is believed."""

    with patch.object(KVCache, "_cut", trusting):
        yield


@contextmanager
def _behind_the_window() -> Iterator[None]:
    """A rollback behind a sliding window is believed."""
    with patch.object(KVCache, "_least", lambda _self, _seq: 0):
        yield


@contextmanager
def _not_restored() -> Iterator[None]:
    """Recurrent states are not restored but for their positions: they are those of the first text that was."""
    restored: Any = lib.llama_state_seq_set_data_ext
    first: dict[int, bytes] = {}

    def stale(context: int, state: Any, size: int, seq: int, flags: int) -> int:
        numbers = first.setdefault(size, bytes(state)[_POSITIONS:])
        mixed = (ctypes.c_uint8 * size).from_buffer_copy(bytes(state)[:_POSITIONS] + numbers)
        return int(restored(context, mixed, size, seq, flags))

    with patch.object(kv_cache, "_set_state", stale):
        yield


@contextmanager
def _moved_snapshots() -> Iterator[None]:
    """Snapshots of a state that had to make room are used."""
    with patch.object(KVCache, "begin_shared_batch", lambda _self, _seqs: None):
        yield


@contextmanager
def _not_forgotten() -> Iterator[None]:
    """What was rolled back stays in the cache."""
    with patch.object(KVCache, "truncate", lambda _self, _seq, length, _now: length):
        yield


@contextmanager
def _not_copied() -> Iterator[None]:
    """A branch has nothing of its text."""
    with patch.object(KVCache, "copy", lambda _self, _src, _dst: True):
        yield


@contextmanager
def _shared_state() -> Iterator[None]:
    """What is decoded in a branch changes the text that it came from."""
    decode_rows = Context.decode_rows

    def shared(self: Context, rows: Sequence[SeqRows]) -> list[Floats]:
        found = decode_rows(self, rows)
        if [one.seq for one in rows] == [0, 1]:
            lib.llama_memory_seq_cp(lib.llama_get_memory(self.native.owned.pointer), 1, 0, -1, -1)
        return found

    with patch.object(Context, "decode_rows", shared):
        yield


@contextmanager
def _rows_of_the_other() -> Iterator[None]:
    """Each of two sequences has the other's logits."""
    decode_rows = Context.decode_rows

    def mixed(self: Context, rows: Sequence[SeqRows]) -> list[Floats]:
        return decode_rows(self, rows)[::-1]

    with patch.object(Context, "decode_rows", mixed):
        yield


@contextmanager
def _rows_of_others() -> Iterator[None]:
    """Each row of a batch has the logits of the one before it."""
    decode = Context.decode

    def rolled(self: Context, ids: Ids, *, seq: int = 0, outputs: int = 1) -> Floats:
        return np.roll(decode(self, ids, seq=seq, outputs=outputs), 1, axis=0)

    with patch.object(Context, "decode", rolled):
        yield


@contextmanager
def _llama_cpps_own() -> Iterator[None]:
    """Nothing is changed: llama.cpp itself is wrong."""
    yield


_SNAPSHOTS = ("qwen35", "qwen35moe", "lfm2", "lfm2moe", "nemotron_h")
_WINDOWS = ("gemma2", "gemma3", "gpt-oss", "cohere2", "mimo2", "afmoe", "step35")
_CHECKPOINTS = (
    "qwen3next", "granitehybrid", "falcon-h1", "jamba", "kimi-linear", "minimax-01", "mamba", "mamba2", "rwkv6",
    "rwkv7",
)  # fmt: skip
_ALL_KINDS = (
    "llama",
    "qwen3moe",
    "deepseek2",
    "gemma3",
    "gpt-oss",
    "qwen35",
    "lfm2",
    "granitehybrid",
    "mamba2",
    "rwkv7",
)

FAULTS = {
    "snapshots of earlier batches": Fault(_snapshots_of_earlier_batches, ROLLBACK, _SNAPSHOTS),
    "rollback behind a sliding window": Fault(_behind_the_window, ROLLBACK, _WINDOWS),
    "recurrent state not restored": Fault(_not_restored, ROLLBACK, _CHECKPOINTS),
    "snapshots of a state that made room": Fault(_moved_snapshots, ROLLBACK, _SNAPSHOTS),
    "positions not forgotten": Fault(_not_forgotten, ROLLBACK, _ALL_KINDS),
    "branch not copied": Fault(_not_copied, SEQUENCES, _ALL_KINDS),
    "branches that share a state": Fault(_shared_state, SEQUENCES, _ALL_KINDS),
    "logits of another sequence": Fault(_rows_of_the_other, SEQUENCES, _ALL_KINDS),
    "several texts in one batch": Fault(_llama_cpps_own, SEQUENCES, ("plamo2",)),
    "logits of another row": Fault(_rows_of_others, ROWS, _ALL_KINDS),
}
"""The faults by name."""
