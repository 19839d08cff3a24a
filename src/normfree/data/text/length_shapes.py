"""The few shapes to which pairs of sentences are padded, chosen so that the padding is as little as it can be."""

from __future__ import annotations

import numpy as np

_GRID = 320  # lengths that are told apart; longer sentences are rounded up to a coarser grid
_NEVER = 1 << 60  # more than any cost, and far from the end of int64


def nested_shapes(
    source: np.ndarray, target: np.ndarray, *, most: int, padding: float, overhead: int = 0
) -> list[tuple[int, int]]:
    """Shapes (S_1, T_1) ≤ (S_2, T_2) ≤ … of least padding; a pair is padded to the first that holds it.

    With C(S, T) the number of pairs of lengths s ≤ S and t ≤ T, the slots of the best k shapes that end at (S, T) are

        f_k(S, T) = min over S' ≤ S, T' ≤ T of  f_{k-1}(S', T') + (S + T)·(C(S, T) - C(S', T')),   f_0(0, 0) = 0

    exact, in integers, and so the same on every machine. The minimum over a rectangle is a running minimum once S + T
    is held fixed, so that k costs one pass over the grid for each sum of lengths.

    There are no more shapes than `most`; no more than it takes to bring the padded share of the slots to `padding`;
    and each of them saves more than `overhead` slots, so that a small set has few.

    Shapes: `source` and `target` are (n,) lengths of 1 or more, ends counted.

    >>> nested_shapes(np.array([2, 2, 9]), np.array([3, 3, 8]), most=4, padding=0.0)
    [(2, 3), (9, 8)]
    """
    scales = [-(-int(lengths.max()) // _GRID) for lengths in (source, target)]
    # Cell i of an axis holds the lengths up to i·scale; the last one stands for the longest sentence itself.
    axes = [
        np.minimum(np.arange(-(-int(lengths.max()) // scale) + 1) * scale, int(lengths.max()))
        for lengths, scale in zip((source, target), scales, strict=True)
    ]
    cells = [-(-lengths // scale) for lengths, scale in zip((source, target), scales, strict=True)]
    counts = np.zeros((len(axes[0]), len(axes[1])), dtype=np.int64)
    np.add.at(counts, (cells[0], cells[1]), 1)
    counts = counts.cumsum(0).cumsum(1)
    sums = np.add.outer(axes[0], axes[1])
    real = int(source.sum() + target.sum())
    first = np.full_like(counts, _NEVER)
    first[0, 0] = 0
    costs = [first]
    while len(costs) <= most:
        costs.append(_one_more(costs[-1], counts, sums))
        slots = int(costs[-1][-1, -1])
        if int(costs[-2][-1, -1]) - slots <= overhead and len(costs) > 2:
            costs.pop()
            break
        if slots - real <= padding * slots:
            break
    return _path(costs, counts, sums, axes)


def _one_more(cost: np.ndarray, counts: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """f_k of f_{k-1}."""
    best = np.full_like(cost, _NEVER)
    order = np.argsort(sums, axis=None, kind="stable")
    starts = np.flatnonzero(np.diff(sums.ravel()[order], prepend=-1))
    for cells in np.split(order, starts[1:]):
        rows, columns = np.divmod(cells, counts.shape[1])
        width = int(sums[rows[0], columns[0]])
        part = (slice(0, int(rows.max()) + 1), slice(0, int(columns.max()) + 1))
        least = cost[part] - width * counts[part]
        np.minimum.accumulate(least, axis=0, out=least)
        np.minimum.accumulate(least, axis=1, out=least)
        best[rows, columns] = least[rows, columns] + width * counts[rows, columns]
    return np.where(best > _NEVER // 2, _NEVER, best)


def _path(
    costs: list[np.ndarray], counts: np.ndarray, sums: np.ndarray, axes: list[np.ndarray]
) -> list[tuple[int, int]]:
    """The shapes on the way to the least cost of all pairs, from the smallest; those that hold no pair are left out."""
    row, column = counts.shape[0] - 1, counts.shape[1] - 1
    shapes = []
    for cost in reversed(costs[:-1]):
        part = (slice(0, row + 1), slice(0, column + 1))
        least = cost[part] - int(sums[row, column]) * counts[part]
        above, left = divmod(int(least.argmin()), column + 1)
        if counts[row, column] > counts[above, left]:
            shapes.append((int(axes[0][row]), int(axes[1][column])))
        row, column = above, left
    return shapes[::-1]
