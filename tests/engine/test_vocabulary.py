"""Fingerprints and differences of vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Message, Model, Vocabulary, VocabularyMatch
from edgellm.engine.gguf.reader import check_gguf
from edgellm.engine.vocabulary import Entry

UNUSED, NORMAL, CONTROL, DEFINED = 2, 4, 8, 16

tokens = st.lists(st.tuples(st.binary(max_size=4), st.sampled_from([4, CONTROL, 32])), min_size=1, max_size=700)


def made(entries: list[tuple[bytes, int]]) -> Vocabulary:
    return Vocabulary.of([piece for piece, _ in entries], bytes(kind for _, kind in entries))


@given(tokens, st.data())
def test_a_changed_token_is_found(entries: list[tuple[bytes, int]], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(entries) - 1))
    piece, kind = entries[at]
    other = [*entries]
    other[at] = (piece + b"x", kind)
    one, two = made(entries), made(other)
    assert one.fingerprint != two.fingerprint
    found = None if kind == CONTROL else at
    assert one.match(two).different == two.match(one).different == found
    needed = Vocabulary.of(one.pieces, one.kinds, frozenset([at]))
    assert needed.match(two).different == two.match(needed).different == at


@given(tokens)
def test_equal_vocabularies_are_equal(entries: list[tuple[bytes, int]]) -> None:
    one, two = made(entries), made(entries)
    assert one == two
    assert one.match(two) == VocabularyMatch(one.size)


def test_a_shorter_vocabulary_differs_where_it_ends() -> None:
    entries = [(b"%d" % i, 4) for i in range(600)]
    long, short = made(entries), made(entries[:512])
    assert long.match(short) == short.match(long) == VocabularyMatch(512, 512)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"[PAD300]", DEFINED), (b"", UNUSED)),  # two versions of a converter
        ((b"[PAD300]", UNUSED), (b"<|object_ref_start|>", CONTROL)),
        ((b"<unused7>", NORMAL), (b"<table>", DEFINED)),
        ((b"<|extra_3|>", CONTROL), (b"<|vision|>", CONTROL)),
        ((b"same", NORMAL), (b"same", DEFINED)),
    ],
)
def test_unused_tokens_may_differ_unless_a_conversation_needs_them(one: Entry, other: Entry) -> None:
    entries = [(b"%d" % i, NORMAL) for i in range(300)]
    ours, theirs = made([*entries, one]), made([*entries, other, (b"[PAD301]", UNUSED)])
    for first, second in ((ours, theirs), (theirs, ours)):
        assert first.match(second) == VocabularyMatch(301)
    needed = Vocabulary.of(theirs.pieces, theirs.kinds, frozenset([300]))
    assert ours.match(needed).different == needed.match(ours).different == (None if one[0] == other[0] else 300)


def test_what_a_conversation_needs_is_found_in_the_model(draft_model: Model) -> None:
    vocabulary = draft_model.vocabulary
    controls = {i for i, kind in enumerate(vocabulary.kinds) if kind & CONTROL}
    assert {i for i in controls if draft_model.is_eog(i)} <= vocabulary.required <= controls
    prompt = draft_model.chat_prompt([Message("user", "hello")]).tolist()
    assert controls & set(prompt) <= vocabulary.required


def test_the_bundled_pair_shares_one(draft_model: Model, verifier_model: Model) -> None:
    draft, verifier = draft_model.vocabulary, verifier_model.vocabulary
    assert draft.fingerprint == verifier.fingerprint
    assert draft.size == draft_model.n_vocab
    hidden = [i for i in range(draft.size) if draft_model.piece(i) == b""]
    assert hidden
    assert all(draft.pieces[i] for i in hidden)  # control tokens have a name there


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.chat_template"])
def test_a_tokenizer_is_another_where_any_of_it_differs(
    draft_path: Path, verifier_model: Model, draft_model: Model, tmp_path: Path, key: str
) -> None:
    changed, data = tmp_path / "changed.gguf", bytearray(draft_path.read_bytes())
    at = check_gguf(draft_path).value_offsets[key]
    if key == "tokenizer.chat_template":
        data[at + 8] ^= 1
    elif key == "tokenizer.ggml.tokens":
        last = data.index(b"tokenizer.ggml.token_type") - 9  # of the last token's text
        data[last] ^= 1
    else:
        data[at + 12 + 4 * 2000] = 4  # user-defined
    changed.write_bytes(data)
    assert draft_model.has_tokenizer_of(verifier_model)
    with Model.load(changed, faults=()) as other:
        assert not other.has_tokenizer_of(verifier_model)
