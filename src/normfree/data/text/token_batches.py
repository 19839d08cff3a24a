"""Batches of translation pairs in a few fixed shapes: a pure function of seed, epoch and step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from normfree.data.draws import Purpose, key, order
from normfree.data.text.length_shapes import nested_shapes
from normfree.data.text.token_pairs import TokenLines, TokenPairs
from normfree.models.special_tokens import END, PAD, START

SHAPES, PADDING = 24, 0.095


class TokenBatch(NamedTuple):
    """What a step of translation takes; all int64, PAD behind the ends.

    `source` (N, S) is a sentence and END, `target_in` (N, T) is START and its translation, `target_out` (N, T) the
    translation and END: position t of the first predicts position t of the second. `tokens`, without dimensions, is
    the number of real tokens of `target_out` over all ranks, by which the summed loss is divided.
    """

    source: Tensor
    target_in: Tensor
    target_out: Tensor
    tokens: Tensor


class Shape(NamedTuple):
    """The sizes of a batch over all ranks: N rows of S source and T target tokens."""

    rows: int
    source: int
    target: int


class TokenBatches:
    """The training batches of token pairs, `tokens` or fewer on either side, padding included.

    Pairs are sorted into nested shapes by their lengths (see `nested_shapes`): the fewest whose padding is at most
    `padding`, and at most `shapes` of them. The pairs of a shape are parted into batches of one size. An epoch visits
    them in an order of its own, and its batches in another; the last batch of a shape goes on at the start of
    its order. So every pair is seen at least once an epoch, any step can be made again, and the ranks together make
    the batch that one process makes: rank r takes its part of the rows, which may be one less than another's.

    `batch` needs the step on the host, because the shape depends on it; `shape_of` and `gather` are its two halves,
    and the second compiles and can be captured in a CUDA graph, once for each shape.

    Raises `ValueError` for no pairs, a limit that the longest pair does not fit in for each rank, or numbers out of
    their ranges. It speaks of the limit as batch_size, which is the setting of a run, and of the `split` if given.
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
        widths = nested_shapes(source, target, most=shapes, padding=padding, overhead=tokens // 2)
        holds = np.stack([(source <= S) & (target <= T) for S, T in widths])
        assigned = holds.argmax(axis=0)  # the first that holds the pair
        counts = np.bincount(assigned, minlength=len(widths)).tolist()
        # Batches of one size, so that the last is not made of repeats; an overfull one would break the limit.
        repeats = [-(-count // (tokens // max(width))) for count, width in zip(counts, widths, strict=True)]
        rows = [max(-(-count // times), world) for count, times in zip(counts, repeats, strict=True)]
        self.shapes = tuple(Shape(n, *width) for n, width in zip(rows, widths, strict=True))
        self.steps, self.pairs = sum(repeats), len(pairs)
        slots = sum(count * sum(width) for count, width in zip(counts, widths, strict=True))
        self.padding = 1 - int(source.sum() + target.sum()) / slots
        places = sum(times * n for times, n in zip(repeats, rows, strict=True))
        self.repeated = 1 - self.pairs / places
        self.mean_tokens = float(target.sum()) / self.steps
        self._lay_out(pairs, assigned, counts, repeats, torch.device(device))
        self.start_epoch(0)

    def _lay_out(
        self, pairs: TokenPairs, assigned: np.ndarray, counts: list[int], repeats: list[int], device: torch.device
    ) -> None:
        """Put the ids, and where each slot of an epoch finds its pair, on the device."""
        self._source, self._target = _on(pairs.source, device), _on(pairs.target, device)
        self._assigned = torch.from_numpy(assigned).to(device)
        fill, again, firsts, kinds, begin, slot = [], [], [], [], 0, 0
        for kind, (shape, count, times) in enumerate(zip(self.shapes, counts, repeats, strict=True)):
            places = torch.arange(times * shape.rows)
            fill.append(begin + places % count)
            again.append(places >= count)
            firsts += [slot + time * shape.rows for time in range(times)]
            kinds += [kind] * times
            begin, slot = begin + count, slot + times * shape.rows
        self._fill, self._repeats = torch.cat(fill).to(device), torch.cat(again).to(device)
        self._all_firsts, self._all_kinds = torch.tensor(firsts), torch.tensor(kinds)
        self._positions = [torch.arange(shape.rows, device=device) for shape in self.shapes]
        self._own = [positions.tensor_split(self.world)[self.rank] for positions in self._positions]
        # As many more as the largest batch has rows: a capture reads every shape from the place of the first batch.
        most = max(shape.rows for shape in self.shapes)
        self._rows = torch.zeros(len(self._fill) + most, dtype=torch.int64, device=device)
        self._firsts = torch.zeros_like(self._all_firsts, device=device)
        self._kinds: list[int] = []

    def start_epoch(self, epoch: int) -> None:
        """Write the order of an epoch where `gather`, captured or not, reads it."""
        visits = order(self.seed, epoch, self.pairs, self._rows.device)
        sorted_visits = visits[torch.argsort(self._assigned[visits], stable=True)]
        self._rows[: len(self._fill)] = sorted_visits[self._fill]
        batches = torch.argsort(key(self.seed, Purpose.BATCH_ORDER, epoch, torch.arange(self.steps)), stable=True)
        self._firsts.copy_(self._all_firsts[batches])
        self._kinds = self._all_kinds[batches].tolist()

    def shape_of(self, step: int) -> int:
        """Which of `shapes` the batch of a step of the epoch has."""
        if not 0 <= step < self.steps:
            raise ValueError(f"expected a step of 0 to {self.steps - 1}, got {step}; start the next epoch")
        return self._kinds[step]

    def batch(self, step: Tensor | int) -> TokenBatch:
        """This rank's part of the batch of a step of the epoch."""
        number = int(step)
        return self.gather(self.shape_of(number), torch.tensor(number, device=self._rows.device))

    def gather(self, shape: int, step: Tensor) -> TokenBatch:
        """The batch of a step that has this shape; `step` is an int64 without dimensions on the device.

        Waits for nothing on the host.
        """
        first = self._firsts[step.view(1)]  # an index without dimensions would be read on the host
        return self._made(shape, self._rows[first + self._own[shape]], self._rows[first + self._positions[shape]])

    def once(self) -> Iterator[TokenBatch]:
        """Every pair once, in the same shapes, for a loss over all of them; in no order that means anything.

        What fills the last batch of a shape has PAD for its target, and is not counted in `tokens`.
        """
        rows = torch.argsort(self._assigned, stable=True)[self._fill]
        for first, kind in zip(self._all_firsts.tolist(), self._all_kinds.tolist(), strict=True):
            everyone, own = first + self._positions[kind], first + self._own[kind]
            batch = self._made(kind, rows[own], rows[everyone][~self._repeats[everyone]])
            yield batch._replace(target_out=batch.target_out.masked_fill(self._repeats[own, None], PAD))

    def _made(self, shape: int, own: Tensor, counted: Tensor) -> TokenBatch:
        source = _padded(self._source, own, self.shapes[shape].source)
        target_out = _padded(self._target, own, self.shapes[shape].target)
        before = target_out[:, :-1]
        starts = torch.full_like(target_out[:, :1], START)
        target_in = torch.cat([starts, before.masked_fill(before == END, PAD)], dim=1)
        offsets = self._target.offsets
        return TokenBatch(source, target_in, target_out, (offsets[counted + 1] - offsets[counted] + 1).sum())

    def __str__(self) -> str:
        """One sentence with the figures."""
        return (
            f"{self.pairs:,} pairs in {self.steps:,} batches of {len(self.shapes)} shapes, at most {self.tokens:,} "
            f"tokens on a side and {self.mean_tokens:,.0f} target tokens on average, {self.padding:.1%} padding, "
            f"{self.repeated:.1%} of the rows repeated"
        )


class _Flat(NamedTuple):
    ids: Tensor
    offsets: Tensor


def _on(lines: TokenLines, device: torch.device) -> _Flat:
    """Sentences on the device, with an id behind the last so that reading past the end needs no branch."""
    ids = torch.cat([lines.ids, torch.tensor([END], dtype=torch.int32)])
    return _Flat(ids.to(device), lines.offsets.to(device))


def _padded(lines: _Flat, rows: Tensor, width: int) -> Tensor:
    """Sentences of the rows, each followed by END, padded to a width: (rows, width) int64."""
    places = torch.arange(width, device=rows.device)
    first = lines.offsets[rows, None]
    length = lines.offsets[rows + 1, None] - first
    ids = lines.ids[(first + places).clamp(max=len(lines.ids) - 1)].to(torch.int64)
    # Filled, not chosen by `where`, which would copy the two numbers from the host and spoil a capture.
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
