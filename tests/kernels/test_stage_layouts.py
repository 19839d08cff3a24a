"""Layouts of the stage kernels against brute force, on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normfree.kernels import NEUTRAL, SCALARS, SHAPES
from normfree.kernels.tiling import Tiling, choose_tiling
from stage_layouts import (
    byte_offset,
    fragment_index,
    owned_elements,
    pack_weights,
    partial_numbers,
    share_of,
    shifts_of,
    swizzled,
)

WIDTHS = sorted({channels for channels, _ in SHAPES})
TILINGS = [
    choose_tiling(channels, size, "post", images=images, multiprocessors=132)
    for channels, size in SHAPES
    for images in (1, 128)
] + [
    choose_tiling(*shape, "post", images=128, multiprocessors=132, wgmma=True)
    for shape in ((32, 16), (64, 8), (64, 16))
]


@pytest.mark.parametrize("channels", WIDTHS)
@pytest.mark.parametrize("matrices", [False, True])
def test_packed_weights_are_a_permutation(channels: int, matrices: bool) -> None:
    assert sorted(fragment_index(channels, matrices=matrices).tolist()) == list(range(9 * channels**2))


def _tile(packed: Tensor, channels: int, matrices: bool, dx: int, k: int, dy: int, pair: int, tile: int) -> Tensor:
    """The 16 × 8 matrix B that a warp multiplies by, from the registers of its lanes (PTX: mma.m16n8k16)."""
    pairs = channels // 16
    if matrices:  # 8 × 8 matrices of rows of 8 inputs (PTX: wgmma, no swizzle)
        rows = packed.view(3, pairs, 3, pairs, 2, 2, 8, 8)[dx, k, dy, pair, tile]
        return rows.transpose(1, 2).reshape(16, 8)
    lanes = packed.view(3, pairs, 3, pairs, 32, 2, 2, 2)[dx, k, dy, pair, :, tile]
    matrix = torch.zeros(16, 8)
    for lane, half, number in itertools.product(range(32), range(2), range(2)):
        matrix[lane % 4 * 2 + number + 8 * half, lane // 4] = lanes[lane, half, number]
    return matrix


@pytest.mark.parametrize("channels", [16, 32])
@pytest.mark.parametrize("matrices", [False, True])
def test_a_convolution_by_fragments_is_a_convolution(channels: int, matrices: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(1, channels, channels, 3, 3).bfloat16().float()
    image = torch.randn(1, channels, 4, 16)
    forward, backward = (p[0].float() for p in pack_weights(weight, matrices=matrices))
    padded = F.pad(image, (1, 1, 1, 1))[0].permute(1, 2, 0)
    for packed, expected in (
        (forward, F.conv2d(image, weight[0], padding=1)),
        (backward, F.conv_transpose2d(image, weight[0], padding=1)),
    ):
        out = torch.zeros(4, 16, channels)
        for y, dx, k, dy, pair in itertools.product(
            range(4), range(3), range(channels // 16), range(3), range(channels // 16)
        ):
            a = padded[y + dy, dx : dx + 16, 16 * k : 16 * k + 16]
            for tile in (0, 1):
                product = a @ _tile(packed, channels, matrices, dx, k, dy, pair, tile)
                for t, number in itertools.product(range(4), range(2)):  # a thread's two columns of this tile
                    out[y, :, 16 * pair + 4 * t + 2 * tile + number] += product[:, 2 * t + number]
        torch.testing.assert_close(out.permute(2, 0, 1)[None], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda p: f"{p.channels}x{p.size}/{p.split}{'w' * p.wgmma}")
def test_offsets_are_a_bijection(tiling: Tiling) -> None:
    chunks = tiling.channels // 8
    places = {
        byte_offset(row, column, chunk, tiling.channels, tiling.pitch)
        for row in range(tiling.rows + 2)
        for column in range(tiling.pitch)
        for chunk in range(chunks)
    }
    assert places == set(range(0, tiling.buffer_bytes, 16))


@pytest.mark.parametrize("channels", WIDTHS)
def test_matrix_loads_have_no_bank_conflict(channels: int) -> None:
    """Eight neighbouring pixels, from any column, are eight different groups of four banks."""
    for column, chunk in itertools.product(range(32), range(channels // 8)):
        groups = {byte_offset(0, column + i, chunk, channels, 40) // 16 % 8 for i in range(8)}
        assert len(groups) == 8


@pytest.mark.parametrize("channels", WIDTHS)
def test_swizzle_stays_in_its_pixel(channels: int) -> None:
    chunks = range(channels // 8)
    for column in range(40):
        assert sorted(swizzled(column, chunk, channels) for chunk in chunks) == list(chunks)


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda p: f"{p.channels}x{p.size}/{p.split}{'w' * p.wgmma}")
def test_threads_own_each_element_once(tiling: Tiling) -> None:
    owned = torch.cat([owned_elements(tiling, rank) for rank in range(tiling.split)])
    assert sorted(owned.flatten().tolist()) == list(range(tiling.size**2 * tiling.channels))


@pytest.mark.parametrize(("convolutions", "images", "workers"), [(36, 128, 132), (2, 1, 132), (2000, 7, 33), (3, 5, 1)])
def test_shares_cover_the_list_and_partial_sums_are_apart(convolutions: int, images: int, workers: int) -> None:
    items = [i for worker in range(workers) for i in share_of(convolutions * images, worker, workers)]
    assert items == list(range(convolutions * images))
    numbers = partial_numbers(convolutions, images, workers)
    assert len(set(numbers.values())) == len(numbers)
    assert max(numbers.values()) < convolutions + workers
    assert {convolution for _, convolution in numbers} == set(range(convolutions))


def test_shift_and_border_stand_for_a_bias_before_a_convolution() -> None:
    torch.manual_seed(0)
    weights = torch.randn(2, 16, 16, 3, 3).bfloat16().float()
    scalars = torch.tensor(NEUTRAL)[None] + torch.rand(1, len(SCALARS))
    biases = torch.randn(1, 2, 16)
    s = dict(zip(SCALARS, scalars[0], strict=True))
    x = torch.randn(2, 16, 8, 8)
    shifts = shifts_of(weights, scalars, biases)
    for which, name in enumerate(("bias_before_conv1", "bias_before_conv2")):
        expected = F.conv2d(x + s[name], weights[which], biases[0, which], padding=1)
        got = F.conv2d(F.pad(x, (1, 1, 1, 1), value=-float(s[name])), weights[which])
        if which == 0:
            got, expected = got + shifts[0, :, None, None], expected + s["bias_after_conv1"]
        else:
            got, expected = s["beta"] * got + shifts[1, :, None, None], s["beta"] * expected + s["delta"]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
