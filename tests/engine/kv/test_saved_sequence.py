"""A sequence that was saved goes on in another context as if that had read it, whatever keeps the past."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Ids, Model
from edgellm.engine.kv import sequences
from edgellm.engine.kv.saved_prompts import SavedPrompts
from tests.conftest import Architectures
from tests.engine.kv.test_kv_cache import KINDS, N_CTX, NEAR, ROWS, ids, off


def opened(model: Model, saved_prompts: SavedPrompts | None = None) -> Context:
    spec = ContextSpec(n_ctx=N_CTX, n_batch=ROWS, threads=1, rolls_back=True)
    return Context(model, spec, saved_prompts=saved_prompts)


class OneFile(SavedPrompts):
    """A prompt cache of one sequence, which counts what it is asked."""

    def __init__(self, path: Path) -> None:
        super().__init__(10**9)
        self.path, self.kept, self.kinds = path, list[Ids](), list[str]()
        self.asked: list[tuple[int, bool]] = []

    def find(self, kind: str, ids: Ids, known: int, *, whole: bool) -> Path | None:
        self.asked.append((known, whole))
        self.kinds.append(kind)
        return self.path if self.path.exists() else None

    def keep(self, kind: str, ids: Ids, size: int, write: Callable[[Path], bool], *, whole: bool) -> None:
        self.asked.append((len(ids), whole))
        self.kinds.append(kind)
        if write(self.path):
            self.kept.append(ids.copy())
            assert abs(self.path.stat().st_size - size) <= 64 + 4 * len(ids)


@pytest.fixture
def saved_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneFile:
    """An empty prompt cache, which is asked for 64 ids or more."""
    monkeypatch.setattr(sequences, "LEAST", 64)
    return OneFile(tmp_path / "sequence")


@pytest.mark.parametrize("name", KINDS)
def test_it_goes_on_in_another_context(architectures: Architectures, name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    path = tmp_path / "sequence"
    text = ids(rng, 150)
    with Model.load(architectures(name), faults=()) as model:
        with opened(model) as context:
            context.decode(text)
            assert context.save(path)
        with opened(model) as context:
            context.decode(ids(rng, 20))
            assert context.load(path) == len(text)
            assert np.array_equal(context.cached(), text)
            assert off(model, context, context.decode(ids(rng, 3))) < NEAR
            context.rollback(len(text) - 2)
            assert off(model, context, context.decode(ids(rng, 5))) < NEAR
            longer = np.concatenate((text[:100], ids(rng, 9)))
            assert off(model, context, context.decode(longer[context.sync(longer) :])) < NEAR


def test_a_changed_file_of_a_model_is_another_model(
    architectures: Architectures, saved_prompts: OneFile, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(architectures("qwen3"), path)
    for time in (1, 2):
        os.utime(path, (time, time))
        with Model.load(path, faults=()) as model, opened(model, saved_prompts) as context:
            os.utime(path)  # what is loaded stays what it was
            context.decode(ids(random.Random(0), 100))
    first, second = saved_prompts.kinds
    assert first != second
    assert first.replace("1000000000", "2000000000") == second


def test_one_of_another_kind_of_context_is_refused(architectures: Architectures, tmp_path: Path) -> None:
    path, text = tmp_path / "sequence", ids(random.Random(0), 40)
    with Model.load(architectures("qwen3"), faults=()) as model, opened(model) as context:
        context.decode(text)
        context.save(path)
        with Context(model, ContextSpec(n_ctx=20, threads=1)) as short:
            assert short.load(path) == 0
            assert not short.length()
        with Model.load(architectures("gemma3"), faults=()) as other, opened(other) as another:
            another.decode(text)
            assert another.load(path) == 0
            assert off(other, another, another.decode(text)) < NEAR


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "lfm2"])
def test_a_context_restores_the_beginning_of_what_it_is_asked_for(
    architectures: Architectures, name: str, saved_prompts: OneFile
) -> None:
    rng = random.Random(name)
    text = ids(rng, 100)
    with Model.load(architectures(name), faults=()) as model:
        with opened(model, saved_prompts) as context:
            context.decode(text[context.sync(text) :])
        assert [one.tolist() for one in saved_prompts.kept] == [text.tolist()]
        longer = np.concatenate((text, ids(rng, 30)))
        with opened(model, saved_prompts) as context:
            assert context.sync(longer) == len(text)
            assert off(model, context, context.decode(longer[len(text) :])) < NEAR
            assert context.sync(np.append(longer, np.int32(5))) == len(longer)  # little is new: nothing is looked for
        assert len(saved_prompts.asked) == 4  # twice what to restore, and twice what to keep
        assert {whole for _, whole in saved_prompts.asked} == {name != "qwen3"}
        assert len(set(saved_prompts.kinds)) == 1
        with opened(model, saved_prompts) as context:
            context.decode(text[context.sync(text[:63]) : 63])
        assert len(saved_prompts.kept) == 2  # a short one is not kept


@pytest.mark.parametrize(("name", "kept"), [("qwen3", 1), ("gemma3", 0)])
def test_a_reproducible_context_keeps_no_window(
    architectures: Architectures, name: str, kept: int, saved_prompts: OneFile
) -> None:
    """Its cells would come back in other places, where sums round otherwise."""
    text = ids(random.Random(name), 100)
    spec = ContextSpec(n_ctx=N_CTX, n_batch=ROWS, threads=1, reproducible=True)
    with (
        Model.load(architectures(name), faults=()) as model,
        Context(model, spec, saved_prompts=saved_prompts) as context,
    ):
        context.decode(text[context.sync(text) :])
    assert (len(saved_prompts.kept), len(saved_prompts.asked)) == (kept, 2 * kept)


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_of_a_state_that_cannot_be_rolled_back_at_once_the_last_checkpoint_is_kept(
    architectures: Architectures, name: str, saved_prompts: OneFile
) -> None:
    text = ids(random.Random(name), 100)
    with Model.load(architectures(name), faults=()) as model:
        with opened(model, saved_prompts) as context:
            context.decode(text[context.sync(text) :])
            context.rollback(len(text) - 2)
        assert [one.tolist() for one in saved_prompts.kept] == [text[:ROWS].tolist()]
        with opened(model, saved_prompts) as context:
            assert context.sync(np.concatenate((text[:80], text))) == ROWS
            assert off(model, context, context.decode(text[:9])) < NEAR


def test_what_was_taken_back_is_not_kept(architectures: Architectures, saved_prompts: OneFile) -> None:
    rng = random.Random(0)
    text = ids(rng, 100)
    with Model.load(architectures("qwen3"), faults=()) as model:
        with opened(model, saved_prompts) as context:
            context.decode(text[context.sync(text) :])
            saved_prompts.epoch = 1
        assert not saved_prompts.kept
        with opened(model, saved_prompts) as context:
            context.decode(text[context.sync(text) :])
            saved_prompts.epoch = 2
            text = np.concatenate((text[:80], ids(rng, 5)))
            context.decode(text[context.sync(text) :])
        assert [one.tolist() for one in saved_prompts.kept] == [text.tolist()]
