"""Statistics of tensors against numpy, on both ways to reduce them."""

import dataclasses
import math

import pytest
import torch

from normfree.diagnostics.measurement.moments import channel_moments, concatenate, moments, to_stats
from signal_oracles import (
    measured,
    reduce_as_on_gpu,
    seeded,
)


@pytest.mark.parametrize("shape", [(7,), (8, 3), (4, 5, 3), (4, 3, 5, 5), (2, 3, 4, 4, 4)])
def test_moments_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    x = seeded(*shape) * 3 + 1
    expected = measured(x if x.dim() > 1 else x.unsqueeze(1))
    assert list(dataclasses.astuple(moments(x))[:3]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("way", ["plain", "gpu"])
@pytest.mark.parametrize(("shape", "channels"), [((4, 3, 5), 1), ((4, 3, 600), 1), ((4, 5, 6, 3), 3), ((4, 5, 3), 2)])
def test_moments_are_of_the_channels_that_are_given(
    shape: tuple[int, ...], channels: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = seeded(*shape) * 3 + 1
    if way == "gpu":
        reduce_as_on_gpu(monkeypatch)
    expected = measured(x.movedim(channels, 1).flatten(2).unsqueeze(-1))
    assert list(dataclasses.astuple(moments(x, channels))[:3]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_moments_do_not_leave_the_range_before_the_signal(scale: float) -> None:
    """Squares of float32 would: they end at 1e-45 and 3e38."""
    x = seeded(4, 3, 5, 5, dtype=torch.float32) * scale
    assert list(dataclasses.astuple(moments(x))[:3]) == pytest.approx(measured(x), rel=1e-4, abs=0)
    assert x.square().mean().item() in (0.0, math.inf)


def test_moments_of_an_offset_keep_their_digits() -> None:
    """A difference of two large numbers would lose the variance."""
    x = seeded(4, 3, 8, 8, dtype=torch.float32) * 1e-3 + 100
    assert list(dataclasses.astuple(moments(x))[:3]) == pytest.approx(measured(x), rel=1e-3)
    naive = (x.square().mean((0, 2, 3)) - x.mean((0, 2, 3)).square()).mean().item()
    assert naive != pytest.approx(measured(x)[1], rel=1e-1)


SHAPES = [(7,), (8, 3), (4, 5, 3), (4, 3, 5, 5), (4, 3, 24, 24), (2, 3, 8, 8, 9), (5, 3, 24, 24), (4, 2, 32, 32)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_ways_to_reduce_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [seeded(*shape, seed=i, dtype=dtype) * 3 + i for i, shape in enumerate(SHAPES)]
    tensors.append(tensors[4].to(memory_format=torch.channels_last))
    expected = [dataclasses.astuple(moments(x))[:3] for x in tensors]
    reduce_as_on_gpu(monkeypatch)
    ways = [channel_moments(x) for x in tensors]
    assert {r.mean.dim() for r in ways} == {1, 2}  # some still wait for the batch
    for found in (to_stats(ways), [moments(x) for x in tensors]):
        for stats, numbers in zip(found, expected, strict=True):
            assert dataclasses.astuple(stats)[:3] == pytest.approx(
                numbers, rel=1e-12 if dtype == torch.float64 else 1e-5
            )


def test_tensors_of_several_types_are_finished_together() -> None:
    tensors = [seeded(4, 3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float64, torch.bfloat16)]
    assert to_stats([channel_moments(x) for x in tensors]) == [moments(x) for x in tensors]
    vectors = [torch.tensor([1.0]), torch.tensor([2.0, 3.0], dtype=torch.float64), torch.tensor([4.0])]
    assert concatenate(vectors).tolist() == [1, 2, 3, 4]
