"""What all packages share: ranges of layers, and errors that keep what they say."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import VerifierBusy
from edgellm.layer_range import LayerRange, chain


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=12), st.integers(0, 7), st.integers(1, 8))
def test_a_chain_is_as_short_as_can_be(found: list[tuple[int, int]], start: int, count: int) -> None:
    ranges, layers = [LayerRange(at, at + n) for at, n in found], LayerRange(start, start + count)

    def least(at: int) -> float:
        if at == layers.stop:
            return 0
        return 1 + min((least(one.stop) for one in ranges if one.start == at and one.stop <= layers.stop), default=99)

    made = chain(ranges, layers)
    assert set(made) <= set(ranges)
    assert len(made) == (least(start) if least(start) < 99 else 0)
    if made:
        assert [layer for one in made for layer in one] == list(layers)


def test_an_error_is_the_same_where_another_process_raises_it() -> None:
    error = VerifierBusy("The verifier is busy.", "Try again.", 3.0)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is VerifierBusy
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
