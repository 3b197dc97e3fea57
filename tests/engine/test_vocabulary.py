"""Fingerprints and differences of vocabularies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Model, Vocabulary

tokens = st.lists(st.tuples(st.binary(max_size=4), st.sampled_from([4, 8, 32])), min_size=1, max_size=700)


def made(entries: list[tuple[bytes, int]]) -> Vocabulary:
    return Vocabulary.of([piece for piece, _ in entries], bytes(kind for _, kind in entries))


@given(tokens, st.data())
def test_a_changed_token_is_found(entries: list[tuple[bytes, int]], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(entries) - 1))
    piece, kind = entries[at]
    other = [*entries]
    other[at] = data.draw(st.sampled_from([(piece + b"x", kind), (piece, kind ^ 1)]))
    one, two = made(entries), made(other)
    assert one.fingerprint != two.fingerprint
    assert one.first_difference(two) == two.first_difference(one) == at
    assert one.first_different_block(two.block_hashes) == at // 256


@given(tokens)
def test_equal_vocabularies_are_equal(entries: list[tuple[bytes, int]]) -> None:
    one, two = made(entries), made(entries)
    assert one == two
    assert one.first_difference(two) is None
    assert one.first_different_block(two.block_hashes) is None


def test_a_shorter_vocabulary_differs_where_it_ends() -> None:
    entries = [(b"%d" % i, 4) for i in range(600)]
    long, short = made(entries), made(entries[:512])
    assert long.first_difference(short) == short.first_difference(long) == 512
    assert long.first_different_block(short.block_hashes) == 2
    assert short.first_different_block(long.block_hashes) == 2


def test_lengths_are_part_of_the_fingerprint() -> None:
    assert made([(b"ab", 4), (b"c", 4)]).fingerprint != made([(b"a", 4), (b"bc", 4)]).fingerprint


def test_the_bundled_pair_shares_one(draft_model: Model, verifier_model: Model) -> None:
    draft, verifier = draft_model.vocabulary, verifier_model.vocabulary
    assert draft.fingerprint == verifier.fingerprint
    assert draft.size == draft_model.n_vocab
    assert len(draft.block_hashes) == -(-draft.size // 256)
    hidden = [i for i in range(draft.size) if draft_model.piece(i) == b""]
    assert hidden
    assert all(draft.token_bytes(i) for i in hidden)  # control tokens have a name there
