"""Batches of translation pairs in a few fixed shapes: a pure function of seed, epoch and step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from normfree.data.counter_rng import Purpose, epoch_order, key
from normfree.data.text.tokens import TokenLines, TokenPairs
from normfree.nn.attention import END, PAD, START

SHAPES, PADDING = 24, 0.095
_GRID = 320  # different lengths; longer sentences are rounded up to a coarser grid
_NEVER = 1 << 60  # more than any cost, and far from the end of int64


class PairBatch(NamedTuple):
    """The batch of a translation step, int64, padded with PAD.

    Position t of `target_in` predicts position t of `target_out`.

    Attributes:
        source: (N, S), a sentence and END.
        target_in: (N, T), START and the translation.
        target_out: (N, T), the translation and END.
        tokens: the number of real tokens of `target_out` over all ranks, a scalar; the summed loss is divided by it.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor
    tokens: Tensor


class PaddedShape(NamedTuple):
    """The sizes of a batch over all ranks: N rows of S source and T target tokens."""

    rows: int
    source: int
    target: int


class PairBatches:
    """The training batches of token pairs, in a few padded shapes.

    `padded_shapes` chooses the shapes by the lengths of the pairs, and the pairs of each shape are divided into batches
    of equal size. An epoch visits the pairs of a shape in an order of its own, and the batches in another; the last
    batch of a shape continues at the start of its order. So every pair is seen at least once per epoch, any step can
    be made again, and the ranks together make the batch that one process makes. A rank may have one row less than
    another.

    `batch` needs the step on the host, because the shape depends on it. Its two halves are `shape_of` and `gather`; a
    CUDA graph can capture `gather`, once for each shape.

    Args:
        pairs: the tokenized sentences and translations.
        tokens: the maximum number of tokens of a batch on either side, with padding, over all ranks; errors call it
            batch_size, the setting of a run.
        shapes: the maximum number of shapes.
        padding: no more shapes are added once the share of padding is at most this.
        seed: the seed of the orders.
        device: where the pairs lie and the batches are made.
        rank: the rank of this process.
        world: the number of processes.
        split: the name of the split in errors.

    Attributes:
        shapes: the shapes of the batches.
        steps: the number of batches of an epoch.
        pairs: the number of pairs.
        padding: the share of PAD in the slots of all pairs.
        mean_tokens: the mean number of target tokens of a batch.

    Raises:
        ValueError: for no pairs, fewer tokens than the longest sentence needs on each rank, or a number outside its
            range.
    """

    capturable = False  # as a whole; `gather` is

    def __init__(
        self,
        pairs: TokenPairs,
        *,
        tokens: int = 4000,
        shapes: int = SHAPES,
        padding: float = PADDING,
        seed: int = 0,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        split: str = "",
    ) -> None:
        _check(pairs, tokens, shapes, padding, rank, world, split)
        self.tokens, self.seed, self.rank, self.world = tokens, seed, rank, world
        source, target = (side.lengths.cpu().numpy() + 1 for side in (pairs.source, pairs.target))
        widths = padded_shapes(source, target, most=shapes, padding=padding, overhead=tokens // 2)
        fits = np.stack([(source <= S) & (target <= T) for S, T in widths])
        assigned = fits.argmax(axis=0)  # the first shape in which the pair fits
        counts = np.bincount(assigned, minlength=len(widths)).tolist()
        # Batches of equal size, so that the last does not consist of repeats; none may exceed the limit.
        batches = [-(-count // (tokens // max(width))) for count, width in zip(counts, widths, strict=True)]
        rows = [max(-(-count // number), world) for count, number in zip(counts, batches, strict=True)]
        self.shapes = tuple(PaddedShape(n, *width) for n, width in zip(rows, widths, strict=True))
        self.steps, self.pairs = sum(batches), len(pairs)
        slots = sum(count * sum(width) for count, width in zip(counts, widths, strict=True))
        self.padding = 1 - int(source.sum() + target.sum()) / slots
        self.mean_tokens = float(target.sum()) / self.steps
        self._lay_out(pairs, assigned, counts, batches, torch.device(device))
        self.start_epoch(0)

    def _lay_out(
        self, pairs: TokenPairs, assigned: np.ndarray, counts: list[int], batches: list[int], device: torch.device
    ) -> None:
        """Put the ids on the device, and for each slot of an epoch the place of its pair in the order by shape."""
        self._source, self._target = _on(pairs.source, device), _on(pairs.target, device)
        self._assigned = torch.from_numpy(assigned).to(device)
        pair_places, is_repeat, first_slots, shape_ids = [], [], [], []
        pairs_before = slots_before = 0
        for shape_id, (shape, count, number) in enumerate(zip(self.shapes, counts, batches, strict=True)):
            slots = torch.arange(number * shape.rows)
            pair_places.append(pairs_before + slots % count)
            is_repeat.append(slots >= count)
            first_slots += [slots_before + batch * shape.rows for batch in range(number)]
            shape_ids += [shape_id] * number
            pairs_before += count
            slots_before += len(slots)
        self._pair_places, self._is_repeat = torch.cat(pair_places).to(device), torch.cat(is_repeat).to(device)
        self._all_first_slots, self._all_shape_ids = torch.tensor(first_slots), torch.tensor(shape_ids)
        self._positions = [torch.arange(shape.rows, device=device) for shape in self.shapes]
        self._own = [positions.tensor_split(self.world)[self.rank] for positions in self._positions]
        # Longer by the rows of the largest batch: a capture runs every shape at index 0, so the
        # array must be long enough for each.
        most = max(shape.rows for shape in self.shapes)
        self._rows = torch.zeros(len(self._pair_places) + most, dtype=torch.int64, device=device)
        self._first_slots = torch.zeros_like(self._all_first_slots, device=device)
        self._shape_ids: list[int] = []

    def start_epoch(self, epoch: int) -> None:
        """Write the order of an epoch into the tensors that `gather`, captured or not, reads."""
        order = epoch_order(self.seed, epoch, self.pairs, self._rows.device)
        by_shape = order[torch.argsort(self._assigned[order], stable=True)]
        self._rows[: len(self._pair_places)] = by_shape[self._pair_places]
        batches = torch.argsort(key(self.seed, Purpose.BATCH_ORDER, epoch, torch.arange(self.steps)), stable=True)
        self._first_slots.copy_(self._all_first_slots[batches])
        self._shape_ids = self._all_shape_ids[batches].tolist()

    def shape_of(self, step: int) -> int:
        """The index in `shapes` of the shape of a step's batch.

        Raises:
            ValueError: for a step outside the epoch.
        """
        if not 0 <= step < self.steps:
            raise ValueError(f"expected a step of 0 to {self.steps - 1}, got {step}; start the next epoch")
        return self._shape_ids[step]

    def batch(self, step: Tensor | int) -> PairBatch:
        """This rank's part of the batch of a step of the epoch."""
        number = int(step)
        return self.gather(self.shape_of(number), torch.tensor(number, device=self._rows.device))

    def gather(self, shape: int, step: Tensor) -> PairBatch:
        """This rank's part of the batch of a step, without waiting for the host.

        Args:
            shape: `shape_of(step)`.
            step: an int64 scalar on the device.
        """
        first = self._first_slots[step.view(1)]  # a scalar index would be read on the host
        return self._make(shape, self._rows[first + self._own[shape]], self._rows[first + self._positions[shape]])

    def once(self) -> Iterator[PairBatch]:
        """Every pair once, in the same shapes and an arbitrary order, for a loss over all of them.

        The pairs that fill the last batch of a shape have PAD as their target, and `tokens` does not count them.
        """
        rows = torch.argsort(self._assigned, stable=True)[self._pair_places]
        for first, shape in zip(self._all_first_slots.tolist(), self._all_shape_ids.tolist(), strict=True):
            everyone, own = first + self._positions[shape], first + self._own[shape]
            batch = self._make(shape, rows[own], rows[everyone][~self._is_repeat[everyone]])
            yield batch._replace(target_out=batch.target_out.masked_fill(self._is_repeat[own, None], PAD))

    def _make(self, shape: int, own: Tensor, counted: Tensor) -> PairBatch:
        source = _padded(self._source, own, self.shapes[shape].source)
        target_out = _padded(self._target, own, self.shapes[shape].target)
        before = target_out[:, :-1]
        starts = torch.full_like(target_out[:, :1], START)
        target_in = torch.cat([starts, before.masked_fill(before == END, PAD)], dim=1)
        offsets = self._target.offsets
        return PairBatch(source, target_in, target_out, (offsets[counted + 1] - offsets[counted] + 1).sum())


class _DeviceLines(NamedTuple):
    ids: Tensor
    offsets: Tensor


def _on(lines: TokenLines, device: torch.device) -> _DeviceLines:
    """Sentences on the device, with one id after the last, so that reading past the end needs no branch."""
    ids = torch.cat([lines.ids, torch.tensor([END], dtype=torch.int32)])
    return _DeviceLines(ids.to(device), lines.offsets.to(device))


def _padded(lines: _DeviceLines, rows: Tensor, width: int) -> Tensor:
    """The sentences of the rows, each followed by END, padded to a width: int64 (rows, width)."""
    places = torch.arange(width, device=rows.device)
    first = lines.offsets[rows, None]
    length = lines.offsets[rows + 1, None] - first
    ids = lines.ids[(first + places).clamp(max=len(lines.ids) - 1)].to(torch.int64)
    # `torch.where` would copy the two numbers from the host and spoil a capture.
    return ids.masked_fill(places == length, END).masked_fill(places > length, PAD)


def _check(pairs: TokenPairs, tokens: int, shapes: int, padding: float, rank: int, world: int, split: str) -> None:
    if len(pairs) == 0:
        raise ValueError("expected at least one pair to make batches of, got none; check the files")
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"expected a rank of 0 to {world - 1} of {world}, got {rank}; check the launcher")
    if shapes < 1 or not 0 <= padding < 1:
        raise ValueError(f"expected at least one shape and a padding in [0, 1), got {shapes} and {padding}")
    longest = 1 + max(int(side.lengths.max()) for side in (pairs.source, pairs.target))
    if tokens < longest * world:
        ranks = f" for each of {world} ranks" if world > 1 else ""
        where = f" of the {split} split" if split else ""
        raise ValueError(
            f"expected room for the longest sentence of {longest} tokens{ranks} in a batch{where}, got batch_size="
            f"{tokens}; raise batch_size, or prepare the data again without longer sentences"
        )


def padded_shapes(
    source: np.ndarray, target: np.ndarray, *, most: int, padding: float, overhead: int = 0
) -> list[tuple[int, int]]:
    """The shapes (S_1, T_1) ≤ (S_2, T_2) ≤ … with the least padding; a pair is padded to the first in which it fits.

    With C(S, T) the number of pairs of lengths s ≤ S and t ≤ T, the slots of the best k shapes that end at (S, T) are

        f_k(S, T) = min over S' ≤ S, T' ≤ T of  f_{k-1}(S', T') + (S + T)·(C(S, T) - C(S', T')),   f_0(0, 0) = 0

    in exact integers, and so the same on every machine. With S + T held fixed, the minimum over a rectangle is a
    running minimum, so each k costs one pass over the grid for each sum of lengths.

    Args:
        source: the lengths (n,) of the sentences, 1 or more, with END.
        target: the lengths (n,) of the translations.
        most: the maximum number of shapes.
        padding: no more shapes are added once the share of padding is at most this.
        overhead: each shape must save more slots than this, so that a small set has few shapes.

    >>> padded_shapes(np.array([2, 2, 9]), np.array([3, 3, 8]), most=4, padding=0.0)
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
        costs.append(_next_cost(costs[-1], counts, sums))
        slots = int(costs[-1][-1, -1])
        if int(costs[-2][-1, -1]) - slots <= overhead and len(costs) > 2:
            costs.pop()
            break
        if slots - real <= padding * slots:
            break
    return _best_shapes(costs, counts, sums, axes)


def _next_cost(cost: np.ndarray, counts: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """f_k from f_{k-1}."""
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


def _best_shapes(
    costs: list[np.ndarray], counts: np.ndarray, sums: np.ndarray, axes: list[np.ndarray]
) -> list[tuple[int, int]]:
    """Trace the shapes back from the least cost of all pairs, smallest first, without those that hold no pair."""
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
