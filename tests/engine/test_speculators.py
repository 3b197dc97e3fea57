"""An MTP layer and an EAGLE-3 head predict what a second context of llama.cpp's does that reads everything at once,
whatever was rolled back before."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Capture, Context, ContextSpec, Floats, Ids, Model, ModelFile, SeqRows, Stop, llama_api
from edgellm.engine.gguf.header import GgufArray, GgufHeader
from edgellm.engine.gguf.writer import token_texts
from edgellm.engine.hardware import ON_PROCESSOR
from edgellm.engine.llama_api import LlamaBatch, NativeContext, NativeSpec
from edgellm.engine.model import LoadSpec, drafter_kind, mtp_obstacle
from edgellm.engine.speculators.eagle3 import LAST_OUTPUT, VERIFIERS, check_eagle3, misfit, target_layers
from edgellm.engine.speculators.speculator import WINDOW, Speculator, StateWindow, rows_at, state_functions
from edgellm.errors import ModelUnsupported, Stopped
from testkit.gguf.architectures import WITH_MTP
from testkit.gguf.reader import read_gguf
from tests.conftest import Architectures, Heads
from tests.engine.headers import file, string, u32
from tests.engine.logits import CLOSE, difference, some_ids

N = 48


def opened(model: Model, n_ctx: int = 128, **options: Any) -> Context:
    return Context(model, ContextSpec(n_ctx=n_ctx, threads=1, speculates=True, rolls_back=True, **options))


def speculator(context: Context) -> Speculator:
    assert context.speculator is not None
    return context.speculator


def predicted(context: Context, ids: Ids, seq: int = 0) -> Floats:
    row = speculator(context).predict(ids, seq)
    assert row is not None
    return row.copy()


def changed(header: GgufHeader, without: str = "", **metadata: object) -> GgufHeader:
    """Return a header with other hyperparameters, `__` for a dot in their names, and without a tensor."""
    more = {f"{header.architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    tensors = tuple(tensor for tensor in header.tensors if tensor.name != without)
    return replace(header, metadata={**header.metadata, **more}, tensors=tensors)


KINDS: list[dict[str, Any]] = [
    {"useful": False},
    {"useful": False, "own": True, "norms": True},
    {"useful": False, "own": True, "width": 32, "layers": (0, 1, 3)},
]
"""EAGLE-3 heads: with embeddings and LM head of the verifier, with its own, and a narrow one."""


@pytest.fixture(params=[*WITH_MTP, *KINDS], ids=str)
def model(request: pytest.FixtureRequest, architectures: Architectures, heads: Heads) -> Iterator[Model]:
    """A model with an MTP layer, or with a head."""
    if isinstance(kind := request.param, str):
        path, head = architectures(kind, mtp="useful"), None
    else:
        path, head = architectures("llama"), ModelFile.open(heads("llama", **kind))
    with Model.load(path, LoadSpec(speculates=True, eagle3=head)) as loaded:
        yield loaded


@pytest.fixture
def hybrid(architectures: Architectures) -> Iterator[Model]:
    with Model.load(architectures("qwen35", mtp="useful"), LoadSpec(speculates=True)) as loaded:
        yield loaded


def afresh(model: Model, ids: Ids) -> Floats:
    """Return the prediction after `ids`, read in one batch by contexts of its own, as llama.cpp's server does it."""
    functions, head = state_functions(), model.spec.eagle3
    assert functions is not None
    n = len(ids)
    spec = NativeSpec(n, 1, n, threads=1, unified=True, cache_type="f32", flash=False)
    trunk, batch = llama_api.open_context(model.owned, spec), LlamaBatch(n, n)
    layers = () if head is None else target_layers(head.header)
    for layer in layers:
        functions.keep_inputs(trunk.pointer, layer, True)
    functions.keep(trunk.pointer, True, False)
    NativeContext(trunk, 1, model.n_vocab).decode(batch.tokens, batch.put(0, 0, 0, ids, 1))
    if head is None:
        own = llama_api.open_context(model.owned, replace(spec, mtp=True))
        states = rows_at(functions.states(trunk.pointer), n, model.n_embd)
    else:
        own = llama_api.open_context(llama_api.load_model(head.path, ON_PROCESSOR), spec, beside=trunk)
        inputs = np.hstack([rows_at(functions.inputs(trunk.pointer, layer), n, model.n_embd) for layer in layers])
        functions.keep(own.pointer, True, True)
        batch.put(0, 0, 0, ids, n)
        NativeContext(own, 1, model.n_vocab).encode(batch.embeddings(inputs), n)
        states = rows_at(functions.states(own.pointer), n, head.header.number("embedding_length"))
    first = int(head is not None)  # an MTP layer has a row for a text's first token, too
    given = np.concatenate((np.zeros_like(states[: 1 - first]), states[:-1]))
    rows, context = batch.put(0, 0, first, ids[first:], n - first), NativeContext(own, 1, model.n_vocab)
    context.decode(batch.with_states(given), rows)
    return context.rows(rows)[-1].copy()


def far(found: Floats, expected: Floats) -> float:
    """Return the largest difference of logits; a head may know fewer tokens than its verifier."""
    known = np.isfinite(expected)
    assert np.array_equal(known, np.isfinite(found))
    return difference(found[known], expected[known])


def test_it_predicts_what_a_context_of_its_own_does_after_rejected_drafts(model: Model) -> None:
    ids, other = some_ids(N, model.n_vocab), some_ids(N, model.n_vocab, seed=1)
    with opened(model) as context:
        context.decode(ids[:20])
        for at, kept in ((20, 0), (21, 2), (24, 4), (29, 1)):
            assert far(predicted(context, ids[: at + 1]), afresh(model, ids[: at + 1])) < CLOSE
            for token in other[:3].tolist():  # drafted behind it, which leaves rows in its cache
                speculator(context).follow(token)
            chunk = np.concatenate((ids[at : at + 1 + kept], other[: 4 - kept]))
            context.decode(chunk, outputs=len(chunk))
            context.rollback(at + 1 + kept)
        assert far(predicted(context, ids[:32]), afresh(model, ids[:32])) < CLOSE


def test_further_tokens_follow_from_its_own_states(model: Model) -> None:
    ids = some_ids(N, model.n_vocab)
    with opened(model) as context:
        context.decode(ids[:20])
        first = predicted(context, ids[:21])
        rows = [speculator(context).follow(token).copy() for token in ids[21:24].tolist()]
        assert far(predicted(context, ids[:21]), first) < CLOSE
        again = [speculator(context).follow(token).copy() for token in ids[21:24].tolist()]
    assert all(far(one, two) < CLOSE for one, two in zip(rows, again, strict=True))
    assert far(rows[0], rows[1]) > CLOSE


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
    monkeypatch.setattr("edgellm.engine.speculators.mtp.state_functions", lambda: None)
    assert "does not export" in mtp_obstacle(header)


@pytest.mark.parametrize("architecture", ["eagle3", "dflash", "gemma4-assistant"])
def test_a_drafter_for_another_model_is_refused_by_name_before_loading(tmp_path: Path, architecture: str) -> None:
    path, name = tmp_path / "head.gguf", architecture.encode()
    path.write_bytes(file([string(b"general.architecture", name), u32(name + b".block_count", 1)]))
    kind = drafter_kind(ModelFile.open(path).header)
    assert kind
    with pytest.raises(ModelUnsupported, match=re.escape(f"head.gguf is {kind}")):
        Model.load(path)


def test_an_mtp_layer_in_a_file_of_its_own_is_no_model(architectures: Architectures) -> None:
    header = ModelFile.open(architectures("qwen35", mtp="useful")).header
    assert drafter_kind(header) == ""
    alone = tuple(tensor for tensor in header.tensors if not tensor.name.startswith(("blk.0", "blk.1", "blk.2")))
    assert drafter_kind(replace(header, tensors=alone)).startswith("an MTP layer")


# --- EAGLE-3 heads ----------------------------------------------------------------------------------------------------


def layer_inputs(model: Model, ids: Ids, layers: tuple[int, ...]) -> Floats:
    """Return the rows that enter these layers for `ids`, side by side, as a capture sees them."""
    (table,) = (tensor.data for tensor in read_gguf(model.path).tensors if tensor.name == "token_embd.weight")
    rows = []
    for layer in layers:
        capture = Capture(stop_after=layer - 1) if layer else None
        with Context(model, ContextSpec(n_ctx=len(ids), threads=1), capture=capture) as context:
            context.decode(ids)
            rows.append(table[ids] if context.captured is None else context.captured.output().copy())
    return np.concatenate(rows, axis=1)


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_the_states_are_the_inputs_of_the_layers(architectures: Architectures, name: str) -> None:
    functions, ids = state_functions(), some_ids(12)
    assert functions is not None
    with Model.load(architectures(name)) as model:
        last = model.n_layer if name in LAST_OUTPUT else model.n_layer - 1
        layers = tuple(range(1, last + 1))
        flash = Context(model, ContextSpec(n_ctx=12)).native_spec.flash
        spec = NativeSpec(12, 1, 12, threads=1, unified=True, cache_type="f32", flash=flash)
        trunk = llama_api.open_context(model.owned, spec)
        for layer in layers:
            if layer < model.n_layer:
                functions.keep_inputs(trunk.pointer, layer, True)
            else:
                functions.keep(trunk.pointer, True, False)
        batch = LlamaBatch(12, 12)
        NativeContext(trunk, 1, model.n_vocab).decode(batch.tokens, batch.put(0, 0, 0, ids, 1))
        captured = layer_inputs(model, ids, layers).reshape(12, len(layers), -1)
        for number, layer in enumerate(layers):
            inner = layer < model.n_layer
            address = functions.inputs(trunk.pointer, layer) if inner else functions.states(trunk.pointer)
            found = rows_at(address, 12, model.n_embd)
            # Of the last layer only some rows are captured.
            rows = slice(11, None) if layer == model.n_layer else slice(None)
            assert difference(found[rows], captured[rows, number]) < CLOSE, layer


def test_a_head_is_refused_before_loading_where_it_does_not_fit(
    architectures: Architectures, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, narrow = (ModelFile.open(heads("llama", **kind)) for kind in (KINDS[0], KINDS[2]))
    verifier = ModelFile.open(architectures("llama"))
    assert misfit(head.header, verifier.header) == misfit(narrow.header, verifier.header) == ""

    for one, other, why in (
        (head.header, ModelFile.open(architectures("qwen2")).header, "hands over no states of qwen2"),
        (changed(head.header, target_layers=(1, 2)), verifier.header, "it reads 2 layers with 1 of its own"),
        (changed(head.header, target_layers=(1, 2, 4)), verifier.header, "layers of the verifier those up to 3"),
        (changed(head.header, target_hidden_size=96), verifier.header, "96 numbers, and the verifier's have 64"),
        (changed(head.header, attention__key_length=8), verifier.header, "keys of 8 numbers and values of 16"),
        (changed(narrow.header, "output.weight"), verifier.header, "the verifier's LM head, whose rows have 64"),
        (changed(narrow.header, "token_embd.weight"), verifier.header, "the verifier's embeddings, whose rows have 64"),
    ):
        assert why in misfit(one, other)
    with pytest.raises(ModelUnsupported, match=r"does not fit the verifier .*: it reads states of 96 numbers"):
        check_eagle3(replace(head, header=changed(head.header, target_hidden_size=96)), verifier)
    monkeypatch.setattr("edgellm.engine.speculators.eagle3.state_functions", lambda: None)
    with pytest.raises(ModelUnsupported, match="does not export the functions"):
        Model.load(architectures("llama"), LoadSpec(speculates=True, eagle3=head))


def test_tokens_a_head_must_not_draft_are_refused(architectures: Architectures, heads: Heads, tmp_path: Path) -> None:
    verifier, good = ModelFile.open(architectures("llama")), ModelFile.open(heads("llama", **KINDS[1]))
    path, d2t = tmp_path / "wild.gguf", good.header.tensor("d2t")
    assert d2t is not None
    data = bytearray(good.path.read_bytes())
    data[d2t.offset : d2t.offset + 8] = (10**6).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ModelUnsupported, match="it drafts token 1000000, which does not exist"):
        check_eagle3(ModelFile.open(path), verifier)


def test_a_head_of_another_vocabulary_is_refused(
    architectures: Architectures, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, head = ModelFile.open(architectures("llama")), ModelFile.open(heads("llama", **KINDS[0]))

    def texts(file: ModelFile) -> Sequence[bytes]:
        return token_texts(file)[:: -1 if file is head else 1]

    monkeypatch.setattr("edgellm.engine.speculators.eagle3.token_texts", texts)
    with pytest.raises(ModelUnsupported, match="of its tokens are others, from token 0 on"):
        check_eagle3(head, verifier)
    tokens = head.header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GgufArray)
    fewer = replace(tokens, count=5)
    header = replace(head.header, metadata={**head.header.metadata, "tokenizer.ggml.tokens": fewer})
    assert misfit(header, verifier.header).startswith("its vocabulary has 5 tokens, and the verifier's ")
