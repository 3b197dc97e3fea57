"""The paper's Algorithm 1 with its three slips mended; the planner is compared with it.

As printed, line 16 checks the memory of layers i to j where i + 1 to j are meant, line 6 leaves out equation 30's
check, and line 22 compares with the cost of all L layers instead of the cost of the first j.
"""

import numpy as np

from edgellm.coldstart.problem import Cut, Task, fits, makespan, streamed


def algorithm1(task: Task) -> tuple[float, Cut] | None:
    """Return the least T and its plan; None if the devices together cannot hold the layers.

    DP(S, j, d): the least time until the first j layers are done on the devices S, the last of them on d (4.1). In
    O(K^2 L^2 2^K), so for some ten devices; i and d' are looped over by numpy.
    """
    k, n = task.devices, task.layers
    own, comp = _stages(task)  # (K, L + 1, L + 1): eq. 25, 26, and infinite where eq. 28 exceeds the memory
    dp = np.full((1 << k, n + 1, k), np.inf)
    path = np.zeros((1 << k, n + 1, k, 2), dtype=np.int64)
    for d in range(k):
        dp[1 << d, 1:, d] = own[d, 0, 1:]  # eq. 30
    for s in range(1, 1 << k):
        for d in range(k):
            before = s ^ (1 << d)
            if not s >> d & 1 or not before:
                continue
            start = dp[before][:, None, :]  # indices i, d'; infinite for d' outside S'
            send = task.send[:, d]
            if task.overlap == "paper":  # eq. 29: max(load, previous finish) + comm + comp
                finish = np.maximum(own[d][:, :, None], start + comp[d][:, :, None]) + send
            else:
                finish = np.maximum(own[d][:, :, None], start + send + comp[d][:, :, None])
            choices = finish.transpose(1, 0, 2).reshape(n + 1, -1)  # indices j, (i, d')
            best = choices.argmin(1)
            dp[s, :, d] = choices[np.arange(n + 1), best]
            path[s, :, d, 0], path[s, :, d, 1] = np.divmod(best, k)
    return _best(task, dp, path)


def _best(task: Task, dp: np.ndarray, path: np.ndarray) -> tuple[float, Cut] | None:
    """Return the best of the table's last row, traced back (4.4), and the single devices, a tied head counted once."""
    n, k = task.layers, task.devices
    s, d = (int(at) for at in np.unravel_index(dp[:, n, :].argmin(), (1 << k, k)))
    found: list[tuple[float, Cut]] = []
    if np.isfinite(dp[s, n, d]):
        total, stages, j = float(dp[s, n, d]), [], n
        while s:
            i, sender = (int(at) for at in path[s, j, d]) if s != 1 << d else (0, 0)
            stages.append((d, j - i))
            s, j, d = s ^ (1 << d), i, sender
        found.append((total, tuple(reversed(stages))))
    found += [(makespan(task, cut), cut) for d in range(k) if fits(task, cut := ((d, n),))]
    return min(found, default=None)


def _stages(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return stand-alone and compute seconds of layers i to j - 1 on each device, infinite where they do not fit."""
    k, n = task.devices, task.layers
    own, comp = np.full((k, n + 1, n + 1), np.inf), np.full((k, n + 1, n + 1), np.inf)
    for d in range(k):
        for i in np.flatnonzero(task.begins[d]):
            for j in range(i + 1, n + 1):
                if task.need[i:j].sum() > task.capacity[d] * (1.0 + 1e-12):
                    break
                if not task.ends[d, j - 1]:
                    continue
                load, work = task.load[d, i:j], task.compute[d, i:j]
                comp[d, i, j] = work.sum()
                opening = float(task.opening[d])
                whole = opening + float(load.sum())
                own[d, i, j] = whole + comp[d, i, j]
                if task.overlap == "streamed":
                    own[d, i, j] = streamed(load, work, whole, task.files[i:j], opening)
    return own, comp
