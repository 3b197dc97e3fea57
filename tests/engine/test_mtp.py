"""The MTP layer predicts what llama.cpp's own second context does, whatever was rolled back before."""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Floats, Ids, Model, ModelFile, SeqRows, Stop, llama_api, mtp_obstacle
from edgellm.engine.llama_api import LlamaBatch, NativeContext, NativeSpec
from edgellm.engine.model import LoadSpec, drafter_file
from edgellm.engine.native import lib
from edgellm.engine.speculators.speculator import WINDOW, StateFunctions, StateWindow, rows_at
from edgellm.errors import ModelUnsupported, Stopped
from testkit.gguf.architectures import WITH_MTP
from tests.conftest import Architectures
from tests.engine.logits import CLOSE, difference, some_ids
from tests.engine.speculators import changed, opened, predicted, speculator

N = 48


@pytest.fixture(params=WITH_MTP)
def model(request: pytest.FixtureRequest, architectures: Architectures) -> Iterator[Model]:
    with Model.load(architectures(request.param, mtp="useful"), LoadSpec(speculates=True)) as loaded:
        yield loaded


@pytest.fixture
def hybrid(architectures: Architectures) -> Iterator[Model]:
    with Model.load(architectures("qwen35", mtp="useful"), LoadSpec(speculates=True)) as loaded:
        yield loaded


def afresh(model: Model, ids: Ids) -> Floats:
    """Return the prediction after `ids`, read in one batch by contexts of its own, as llama.cpp's server does it."""
    functions = StateFunctions.find()
    assert functions is not None
    n, width = len(ids), model.n_embd
    spec = NativeSpec(n, 1, n, threads=1, unified=True, cache_type="f32", flash=False)
    trunk = llama_api.open_context(model.owned, spec)
    second = llama_api.open_context(model.owned, replace(spec, mtp=True))
    functions.keep(trunk.pointer, True, False)
    batch = LlamaBatch(n, n)
    NativeContext(trunk, 1, model.n_vocab).decode(batch.tokens, batch.put(0, 0, 0, ids, 1))
    given = np.zeros((n, width), dtype=np.float32)
    states = rows_at(functions.states(trunk.pointer), n, width)
    given[1:] = states[:-1]
    NativeContext(second, 1, model.n_vocab).decode(batch.with_states(given), n)
    found = (ctypes.c_float * model.n_vocab).from_address(
        ctypes.cast(lib.llama_get_logits(second.pointer), ctypes.c_void_p).value or 0
    )
    return np.array(found, dtype=np.float32)


def test_it_predicts_what_a_context_of_its_own_does_after_rejected_drafts(model: Model) -> None:
    ids, other = some_ids(N, model.n_vocab), some_ids(N, model.n_vocab, seed=1)
    with opened(model) as context:
        context.decode(ids[:20])
        for at, kept in ((20, 0), (21, 2), (24, 4), (29, 1)):
            assert difference(predicted(context, ids[: at + 1]), afresh(model, ids[: at + 1])) < CLOSE
            for token in other[:3].tolist():  # drafted behind it, which leaves rows in its cache
                speculator(context).follow(token)
            chunk = np.concatenate((ids[at : at + 1 + kept], other[: 4 - kept]))
            context.decode(chunk, outputs=len(chunk))
            context.rollback(at + 1 + kept)
        assert difference(predicted(context, ids[:32]), afresh(model, ids[:32])) < CLOSE


def test_every_token_of_the_text_counts(hybrid: Model) -> None:
    ids = some_ids(N, hybrid.n_vocab)
    changed = ids.copy()
    changed[3] += 1
    with opened(hybrid) as context:
        context.decode(ids[:-1])
        first = predicted(context, ids)
        context.decode(changed[context.sync(changed[:-1]) : -1])
        assert difference(predicted(context, changed), afresh(hybrid, changed)) < CLOSE
        assert difference(first, afresh(hybrid, changed)) > CLOSE


def test_further_tokens_follow_from_its_own_states(model: Model) -> None:
    ids = some_ids(N, model.n_vocab)
    with opened(model) as context:
        context.decode(ids[:20])
        first = predicted(context, ids[:21])
        rows = [speculator(context).follow(token).copy() for token in ids[21:24].tolist()]
        assert difference(predicted(context, ids[:21]), first) < CLOSE
        again = [speculator(context).follow(token).copy() for token in ids[21:24].tolist()]
    assert all(difference(one, two) < CLOSE for one, two in zip(rows, again, strict=True))
    assert difference(rows[0], rows[1]) > CLOSE


def test_sequences_do_not_mix(hybrid: Model) -> None:
    texts = [some_ids(N, hybrid.n_vocab, seed=seed) for seed in range(3)]
    with opened(hybrid, n_seq=3, unified=False) as context:
        context.decode_rows([SeqRows(seq, text[: 10 + seq]) for seq, text in enumerate(texts)])
        for seq, text in enumerate(texts):
            n = 11 + seq
            assert difference(predicted(context, text[:n], seq), afresh(hybrid, text[:n])) < CLOSE
        context.copy_prefix(0, 2, 8)
        assert speculator(context).predict(texts[0][:9], 2) is None  # states are not copied
        context.decode(texts[0][8:12], seq=2)
        assert speculator(context).predict(texts[0][:13], 2) is not None
        context.clear(1)
        assert speculator(context).predict(texts[1][:12], 1) is None


def test_nothing_is_predicted_for_a_text_that_was_not_read(hybrid: Model) -> None:
    ids = some_ids(N, hybrid.n_vocab)
    with opened(hybrid) as context:
        assert speculator(context).predict(ids[:1]) is None
        assert speculator(context).predict(ids) is None
        context.decode(ids[:8])
        assert speculator(context).predict(ids[:10]) is None
        assert speculator(context).predict(ids[:9]) is not None


def test_behind_a_long_prompt_it_reads_the_latest_states(hybrid: Model) -> None:
    n = 2 * WINDOW + 40
    ids = some_ids(n, hybrid.n_vocab)
    with opened(hybrid, n_ctx=n + 8, n_batch=256) as context:
        context.decode(ids[:-1])
        near = predicted(context, ids)
        assert np.isfinite(near).all()
        context.rollback(n - 3)
        context.decode(ids[n - 3 : -1])
        assert difference(predicted(context, ids), near) < CLOSE


def test_a_stop_ends_it(hybrid: Model) -> None:
    ids, stop = some_ids(N, hybrid.n_vocab), Stop()
    with opened(hybrid) as context:
        context.decode(ids[:8])
        context.set_cancel(stop)
        stop.set()
        with pytest.raises(Stopped):
            speculator(context).predict(ids[:9])
        context.set_cancel(None)
        assert difference(predicted(context, ids[:9]), afresh(hybrid, ids[:9])) < CLOSE


def test_without_it_the_model_is_as_before(architectures: Architectures) -> None:
    with (
        Model.load(architectures("qwen35", mtp="useful")) as model,
        Context(model, ContextSpec(n_ctx=64, speculates=True)) as context,
    ):
        assert model.speculator is None
        assert context.speculator is None


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=40))
def test_a_window_has_the_latest_states_without_a_gap(steps: list[tuple[int, int]]) -> None:
    window, known, end, clock = StateWindow(2, window=8), dict[int, float](), 0, 0.0
    for back, n in steps:
        start = max(0, end - back)
        window.truncate(start)
        known = {at: value for at, value in known.items() if at < start}
        rows = np.repeat(np.arange(clock, clock + n, dtype=np.float32)[:, None], 2, axis=1)
        window.add(start, rows)
        known |= dict(enumerate(rows[:, 0].tolist(), start))
        end, clock = start + n, clock + n
        assert window.end == end
        assert window.end - window.first >= min(n, 8)
        for part in (0, 1):
            assert window.of(window.first, end)[:, part].tolist() == [known[at] for at in range(window.first, end)]


# --- where a speculator is supported ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_MTP)
def test_it_computes_no_text_and_is_not_counted(architectures: Architectures, name: str) -> None:
    plain = ModelFile.open(architectures(name)).header
    header = ModelFile.open(architectures(name, mtp="useful")).header
    assert not mtp_obstacle(header)
    assert mtp_obstacle(plain)
    assert header.attention_layers == plain.attention_layers
    assert header.recurrent_state_bytes == plain.recurrent_state_bytes


def test_each_reason_against_it(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    header = ModelFile.open(architectures("qwen35", mtp="useful")).header
    other = replace(header, metadata={"general.architecture": "mimo2", "mimo2.nextn_predict_layers": 1})
    assert "not tried with mimo2" in mtp_obstacle(other)
    assert "the file has 2" in mtp_obstacle(changed(header, nextn_predict_layers=2))
    assert "lacks blk.4.nextn.hnorm" in mtp_obstacle(changed(header, "blk.4.nextn.hnorm.weight"))
    monkeypatch.setattr(StateFunctions, "find", lambda: None)
    assert "does not export" in mtp_obstacle(header)


@pytest.mark.parametrize("architecture", ["eagle3", "dflash", "gemma4-assistant"])
def test_a_drafter_for_another_model_is_refused_by_name_before_loading(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "head.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.block_count", 1)
    writer.add_tensor("fc.weight", np.zeros((4, 4), dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    kind = drafter_file(ModelFile.open(path).header)
    assert kind
    with pytest.raises(ModelUnsupported, match=re.escape(f"head.gguf is {kind}")):
        Model.load(path)


def test_an_mtp_layer_in_a_file_of_its_own_is_no_model(architectures: Architectures) -> None:
    header = ModelFile.open(architectures("qwen35", mtp="useful")).header
    assert drafter_file(header) == ""
    alone = tuple(tensor for tensor in header.tensors if not tensor.name.startswith(("blk.0", "blk.1", "blk.2")))
    assert drafter_file(replace(header, tensors=alone)).startswith("an MTP layer")
