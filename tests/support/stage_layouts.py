"""The layouts of the stage kernels as plain functions: swizzle, order of packed weights, shares of the work.

The kernels have the same maps in CUDA (`cuda/layout.cuh`, `cuda/pack.cuh`, `cuda/gradients.cuh` in
`src/normfree/kernels`). The tests compare them with these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normfree.kernels.tiling import SCALARS, Tiling


def swizzled(column: int, chunk: int, channels: int) -> int:
    """Where a chunk of 8 channels lies inside its pixel, so that 8 neighbouring pixels use 8 bank groups.

    >>> [swizzled(column, 0, 64) for column in range(8)]
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    chunks = channels // 8
    mask = min(chunks, 8) - 1
    return chunk ^ (column // max(1, 8 // chunks) & mask)


def byte_offset(row: int, column: int, chunk: int, channels: int, pitch: int) -> int:
    """The place of a chunk in an image buffer; row and column count from the border."""
    return ((row * pitch + column) * (channels // 8) + swizzled(column, chunk, channels)) * 16


def fragment_index(channels: int, *, matrices: bool = False) -> Tensor:
    """For each number of a packed weight, its place in the flat weight (tap, input, output).

    The order is dx, 16 inputs, dy, 16 outputs; of each 16 × 16 piece, the registers of the 32 lanes, or with `matrices`
    for `wgmma` the 8 × 8 matrices (8 outputs, 8 inputs, output, input).
    """
    pairs = channels // 16
    if matrices:
        tile, half, g, k = torch.meshgrid(*(torch.arange(n) for n in (2, 2, 8, 8)), indexing="ij")
        inputs, outputs = half * 8 + k, 4 * (g // 2) + 2 * tile + g % 2
    else:
        lane, tile, half, number = torch.meshgrid(*(torch.arange(n) for n in (32, 2, 2, 2)), indexing="ij")
        g = lane // 4
        inputs, outputs = lane % 4 * 2 + 8 * half + number, 4 * (g // 2) + 2 * tile + g % 2
    dx, k16, dy, pair = (
        axis.reshape(-1, 1) for axis in torch.meshgrid(*(torch.arange(n) for n in (3, pairs, 3, pairs)), indexing="ij")
    )
    inputs, outputs = k16 * 16 + inputs.reshape(1, -1), pair * 16 + outputs.reshape(1, -1)
    return (((dy * 3 + dx) * channels + inputs) * channels + outputs).reshape(-1)


def pack_weights(weights: Tensor, *, matrices: bool = False) -> tuple[Tensor, Tensor]:
    """Weights (K, C, C, 3, 3) in the order of the forward and of the backward kernel, (K, 9·C²) in bfloat16 each.

    The backward kernel convolves with inputs and outputs swapped and the kernel flipped.
    """
    count, channels = weights.shape[:2]
    order = fragment_index(channels, matrices=matrices).to(weights.device)
    low = weights.to(torch.bfloat16)
    forward = low.permute(0, 3, 4, 2, 1).reshape(count, -1)
    backward = low.flip(3, 4).permute(0, 3, 4, 1, 2).reshape(count, -1)
    return forward[:, order].contiguous(), backward[:, order].contiguous()


def shifts_of(weights: Tensor, scalars: Tensor, biases: Tensor | None) -> Tensor:
    """The offset per channel added after each convolution, (2B, C) in float32.

    The image buffers hold the signal without the bias b that stands before a convolution, and -b on the border; then
    b times the sum of the weights after the convolution makes it exact.
    """
    count, channels = weights.shape[:2]
    sums = weights.to(torch.bfloat16).float().flatten(2).sum(2)
    s = {name: scalars[:, i, None].float() for i, name in enumerate(SCALARS)}
    bias = sums.new_zeros(count, channels) if biases is None else biases.reshape(count, channels).float()
    first = bias[0::2] + s["bias_after_conv1"] + s["bias_before_conv1"] * sums[0::2]
    second = s["beta"] * (bias[1::2] + s["bias_before_conv2"] * sums[1::2]) + s["delta"]
    return torch.stack((first, second), 1).reshape(count, channels)


def share_of(items: int, worker: int, workers: int) -> range:
    """The items of the weight gradients that a thread block takes."""
    return range(items * worker // workers, items * (worker + 1) // workers)


def partial_numbers(convolutions: int, per_convolution: int, workers: int) -> dict[tuple[int, int], int]:
    """The number of the partial sum for each pair (thread block, convolution) that meets."""
    pairs = {}
    for worker in range(workers):
        share = share_of(convolutions * per_convolution, worker, workers)
        if len(share):
            for convolution in range(share[0] // per_convolution, share[-1] // per_convolution + 1):
                pairs[worker, convolution] = worker + convolution
    return pairs


def tile_width(tiling: Tiling) -> int:
    """Pixels of a tile side by side; a tile has 16 pixels."""
    return 8 if tiling.wgmma else min(tiling.size, 16)


def warp_place(tiling: Tiling, warp: int) -> tuple[int, int, int]:
    """First row, column segment and group of output channels of a warp."""
    groups = tiling.channels // 8 // tiling.tiles[1]
    if tiling.wgmma:
        place, group = divmod(warp // 4, groups)
        return place // (tiling.size // 8) * 8 + warp % 4 * 2, place % (tiling.size // 8), group
    segments, tile_rows = tiling.size // tile_width(tiling), 16 // tile_width(tiling)
    place, group = divmod(warp, groups)
    return place // segments * tiling.tiles[0] * tile_rows, place % segments, group


def owned_elements(tiling: Tiling, rank: int = 0) -> Tensor:
    """The elements of an image, channels last, that each thread of a thread block owns: (threads, elements)."""
    tiles_m, tiles_n = tiling.tiles
    tile_rows = 16 // tile_width(tiling)
    rows = []
    for thread in range(tiling.threads):
        warp, lane = divmod(thread, 32)
        row, segment, wn = warp_place(tiling, warp)
        for m in range(tiles_m):
            for q in range(tiles_n // 2):
                for h in (0, 1):
                    y = rank * tiling.rows + row + m * tile_rows + (h if tile_rows == 2 else 0)
                    x = segment * tile_width(tiling) + lane // 4 + (0 if tile_rows == 2 else 8 * h)
                    channel = wn * tiles_n * 8 + q * 16 + lane % 4 * 4
                    rows.append([(y * tiling.size + x) * tiling.channels + channel + i for i in range(4)])
    return torch.tensor(rows).view(tiling.threads, -1)
