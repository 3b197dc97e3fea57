"""The two array types of the engine, and a function on ids that is used everywhere."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]


def common_prefix(a: Ids, b: Ids) -> int:
    """Return how many tokens `a` (n,) and `b` (m,) share from the start."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:  # the common case among many sessions, and the cheap one
        return 0
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
