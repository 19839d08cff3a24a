"""The residual equation written with plain PyTorch in float64, as an oracle for the stage kernels.

It shares no code or formula with them: biases are added before `conv2d`, and autograd makes the gradients. With
`rounding` it rounds to bfloat16 where the kernels do, so that ReLUs switch at the same places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normfree.kernels import NEUTRAL, SCALARS


class _RoundValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(torch.bfloat16).to(gradient.dtype)


class Case(NamedTuple):
    """Inputs of a stage and the gradient at its output."""

    x: Tensor
    weights: Tensor
    scalars: Tensor
    biases: Tensor | None
    gradient: Tensor


class Result(NamedTuple):
    """Output and gradients of a stage."""

    out: Tensor
    x: Tensor
    weights: Tensor
    scalars: Tensor
    biases: Tensor | None


def make_case(
    channels: int,
    size: int,
    *,
    images: int,
    blocks: int,
    wide: bool = False,
    biases: bool = True,
    scale: float = 0.5,
    neutral: tuple[str, ...] = (),
    seed: int = 0,
    device: str = "cuda",
) -> Case:
    """Random inputs; every scalar differs from its neutral value unless it is named in `neutral`."""
    draw = torch.Generator("cpu").manual_seed(seed)
    kind = torch.float32 if wide else torch.bfloat16
    x = torch.randn(images, channels, size, size, generator=draw).to(kind).to(memory_format=torch.channels_last)
    gradient = torch.randn(images, channels, size, size, generator=draw).to(kind)
    weights = torch.randn(blocks, 2, channels, channels, 3, 3, generator=draw) * (scale * (2 / (9 * channels)) ** 0.5)
    scalars = torch.tensor(NEUTRAL) + 0.3 * (torch.rand(blocks, len(SCALARS), generator=draw) - 0.5)
    for name in neutral:
        scalars[:, SCALARS.index(name)] = NEUTRAL[SCALARS.index(name)]
    per_channel = 0.2 * torch.randn(blocks, 2, channels, generator=draw) if biases else None
    tensors = (x, weights, scalars, per_channel, gradient)
    return Case(*(None if t is None else t.to(device) for t in tensors))  # type: ignore[arg-type]


def run_oracle(case: Case, form: str, *, rounding: bool) -> Result:
    """Output and gradients by plain PyTorch in float64."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in case[:4]]
    x0, weights, scalars, biases = leaves
    assert x0 is not None
    assert weights is not None
    assert scalars is not None
    x = equation(x0, weights, scalars, biases, form=form, rounding=rounding, wide=case.x.dtype == torch.float32)
    x.backward(case.gradient.double())
    gradients = [None if t is None else t.grad for t in leaves]
    return Result(x.detach(), *gradients)  # type: ignore[arg-type]


def equation(
    x: Tensor,
    weights: Tensor,
    scalars: Tensor,
    biases: Tensor | None,
    *,
    form: str,
    rounding: bool = False,
    wide: bool = True,
    **_: object,
) -> Tensor:
    """The stage by plain PyTorch; other arguments of the operator change nothing here."""
    value = _RoundValue.apply if rounding else lambda t: t
    backward = _RoundGradient.apply if rounding else lambda t: t
    low = value(weights)
    for b in range(weights.shape[0]):
        s = dict(zip(SCALARS, scalars[b], strict=True))
        bias = (None, None) if biases is None else (biases[b, 0], biases[b, 1])
        v = value(x)
        v = s["alpha"] * v + s["entry_bias"]
        v = value(s["entry_gain"] * (F.relu(v) if form == "pre" else v))
        z = F.conv2d(v + s["bias_before_conv1"], low[b, 0], bias[0], padding=1) + s["bias_after_conv1"]
        r = value(s["inner_gain"] * F.relu(backward(z)))
        y = F.conv2d(r + s["bias_before_conv2"], low[b, 1], bias[1], padding=1)
        t = s["a"] * x + backward(s["beta"] * y + s["delta"])
        x = s["c"] * (t if wide else backward(t))
        x = s["exit_gain"] * F.relu(x) if form == "post" else x
        x = x if wide else value(x)
    return x


def distance(got: Tensor, expected: Tensor) -> float:
    """‖got - expected‖ / ‖expected‖."""
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-30))
