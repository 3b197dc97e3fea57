"""The choice of the next batch, as a pure function."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgellm.serve.scheduler import Batch, Kind, Limits, Share, Want, next_batch

LIMITS = Limits(rows=128, chunk=32)

wants = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 16)), max_size=12).map(
    lambda sizes: [Want(i, unseen, drafted) for i, (unseen, drafted) in enumerate(sizes)]
)


def test_nothing_wanted_nothing_done() -> None:
    assert next_batch([], LIMITS, None) is None


def test_several_verifications_share_a_batch() -> None:
    batch = next_batch([Want(1, 1, 4), Want(2, 3, 4)], LIMITS, None)
    assert batch == Batch(Kind.VERIFY, (Share(1, 5, 5), Share(2, 7, 5)))


def test_a_long_prefix_is_prefilled_in_chunks_and_its_end_joins_the_verification() -> None:
    unseen, kinds = 70, []
    after = None
    while unseen:
        batch = next_batch([Want(1, unseen, 4)], LIMITS, after)
        assert batch is not None
        after = batch.kind
        kinds.append((batch.kind, batch.shares[0].tokens, batch.shares[0].outputs))
        unseen -= min(unseen, batch.shares[0].tokens)
    assert kinds == [(Kind.PREFILL, 32, 0), (Kind.PREFILL, 32, 0), (Kind.VERIFY, 10, 5)]


def test_prefill_goes_first_but_a_verification_waits_behind_one_chunk_only() -> None:
    both = [Want(1, 1000, 4), Want(2, 1, 4)]
    first = next_batch(both, LIMITS, None)
    assert first is not None
    assert first.kind is Kind.PREFILL
    second = next_batch(both, LIMITS, first.kind)
    assert second == Batch(Kind.VERIFY, (Share(2, 5, 5),))
    third = next_batch(both, LIMITS, second.kind)
    assert third is not None
    assert third.kind is Kind.PREFILL


def test_a_verification_bigger_than_a_batch_goes_alone() -> None:
    batch = next_batch([Want(1, 32, 256), Want(2, 1, 0)], LIMITS, None)
    assert batch == Batch(Kind.VERIFY, (Share(1, 288, 257),))


@given(wants, st.sampled_from([None, Kind.PREFILL, Kind.VERIFY]))
def test_a_batch_keeps_its_promises(waiting: list[Want], after: Kind | None) -> None:
    batch = next_batch(waiting, LIMITS, after)
    if batch is None:
        assert not waiting
        return
    by_session = {want.session: want for want in waiting}
    assert batch.shares
    assert len(batch.shares) == 1 or sum(share.tokens for share in batch.shares) <= LIMITS.rows
    for share in batch.shares:
        want = by_session.pop(share.session)  # no session twice
        if batch.kind is Kind.VERIFY:
            assert (share.tokens, share.outputs) == (want.unseen + want.drafted, want.drafted + 1)
        else:
            assert share.outputs == 0
            assert share.tokens < want.unseen  # at least one token is left, whose logits the verdict needs


@given(wants)
def test_everybody_is_served_in_the_end(waiting: list[Want]) -> None:
    left, after, passes = {want.session: want for want in waiting}, None, 0
    while left:
        batch = next_batch(list(left.values()), LIMITS, after)
        assert batch is not None
        after, passes = batch.kind, passes + 1
        for share in batch.shares:
            want = left[share.session]
            if share.outputs:
                del left[share.session]
            else:
                left[share.session] = Want(want.session, want.unseen - share.tokens, want.drafted)
        assert passes < 1000
