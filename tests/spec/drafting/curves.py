"""Cost curves that tests share."""

import itertools

from hypothesis import strategies as st

from edgellm.spec.drafting.cost_curve import KNOTS, CostCurve

curves = st.lists(st.floats(0.0, 3.0), min_size=len(KNOTS) - 1, max_size=len(KNOTS) - 1).map(
    lambda more: CostCurve(KNOTS, tuple(itertools.accumulate([1.0, *more])))
)
