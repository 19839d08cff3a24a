"""The claim of `normdead` on how NF-ResNets imitate the signal of batch norm: centred weight norm and transitions.

Reference: Hoedt, Hochreiter, Klambauer 2022, sections 4.2 and 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor, nn

from normfree.diagnostics.propagation import propagate
from normfree.methods import initialize_
from normfree.models import build
from normfree.nn.residual import Residual
from normfree.nn.weight_layers import StandardizedConv2d, StandardizedLinear, WeightNormLinear
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, claim, expect, near
from normfree_papers.claims.depth_curves import chart, means, straight_line
from normfree_papers.normdead.float64_draws import batch_norm, generator, he, normal, rounding, undisturbed

_GAMMA = (2 / (1 - 1 / math.pi)) ** 0.5  # 1/√Var ReLU(N(0, 1)), independent of `theory`
_WIDTH, _BATCH, _LAYERS, _BLOCKS = 512, 1024, 6, 8
_SLOPE = 1 - 1 / math.pi
_DROP = (2 * _SLOPE / (1 + 2 * _SLOPE) * (2 / 3) ** 2) ** (1 / 3)


def centred(inputs: int, outputs: int, gain: float, g: torch.Generator) -> StandardizedLinear:
    """A layer with centred weight norm, whose raw weights have different means and scales per neuron."""
    layer = StandardizedLinear(inputs, outputs, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_((normal((outputs, inputs), g) + normal((outputs, 1), g)) * normal((outputs, 1), g).exp())
        layer.gain.fill_(gain)
    return layer


def variance(x: Tensor) -> float:
    """Variance over the batch, mean over channels."""
    return float(x.var(0, correction=0).mean())


@torch.no_grad()
def layer_factor(make: Callable[[torch.Generator], nn.Module], seed: int) -> float:
    """The factor by which a layer after a ReLU changes the variance; geometric mean over a few layers."""
    g = generator(seed)
    x = normal((_BATCH, _WIDTH), g)
    start = variance(x)
    for _ in range(_LAYERS):
        x = make(g)(torch.relu(x))
    return float((variance(x) / start) ** (1 / _LAYERS))


_ORDERS = ("BN → ReLU, He", "ReLU → BN, He", "ReLU → BN, gain 1", "NF")


@torch.no_grad()
def order_variance(order: str, seed: int) -> list[float]:
    """Variance of x after each block x + W·(normalized and rectified x), in either order of the two."""
    g = generator(seed)
    x = normal((_BATCH, _WIDTH), g)
    found = [variance(x)]
    for b in range(_BLOCKS):
        if order == "NF":
            branch = centred(_WIDTH, _WIDTH, _GAMMA, g)(torch.relu(x / math.sqrt(1 + b)))
        else:
            entered = torch.relu(batch_norm(x)) if order.startswith("BN") else batch_norm(torch.relu(x))
            branch = he(_WIDTH, _WIDTH, 1.0 if order.endswith("1") else 2.0, g)(entered)
        x = x + branch
        found.append(variance(x))
    return found


@torch.no_grad()
def output_mean(deviations: Tensor, g: torch.Generator) -> float:
    """RMS over neurons of E[y]/σ[y], exact, after ReLU of N(0, deviations²) and centred weight norm."""
    weight = centred(len(deviations), 64, 1.0, g).effective_weight()
    means = deviations / math.sqrt(2 * math.pi)
    spread = (weight.square() @ (deviations.square() * 0.5 * (1 - 1 / math.pi))).sqrt()
    return float((weight @ means / spread).square().mean().sqrt())


@torch.no_grad()
def border_mean(g: torch.Generator) -> tuple[float, float]:
    """RMS output of a zero-padded convolution, with centred weights of norm 1, for a constant 1: border, inside."""
    conv = StandardizedConv2d(8, 16, 3, padding=1, bias=False).double()
    conv.weight.copy_(normal(conv.weight.shape, g))
    out = conv(torch.ones(1, 8, 8, 8, dtype=torch.float64))
    inside = out[..., 1:-1, 1:-1]
    border = out.square().sum() - inside.square().sum()
    return float((border / (out.numel() - inside.numel())).sqrt()), float(inside.square().mean().sqrt())


def transition_drop(settings: Settings, seed: int, *, raw: bool) -> float:
    """Variance after over before the transitions of a ResNet-18 with batch norm; geometric mean."""
    g = generator(seed)
    model = build("preact_resnet18", "batchnorm", padding_mode="circular", generator=g)
    if raw:
        for block in (m for m in model.modules() if isinstance(m, Residual)):
            block.shortcut_reads_entry = False
        initialize_(model, "batchnorm", model.plan, generator=g)  # the projections no longer read a ReLU
    x = torch.randn(4 if settings.quick else 16, 3, 32, 32, generator=g)
    sums = propagate(model.to(settings.device), x.to(settings.device)).sums
    ratios = [b.sum.variance / a.sum.variance for a, b in pairwise(sums) if a.stage != b.stage]
    return math.exp(fmean([math.log(ratio) for ratio in ratios]))


@claim(
    id="normdead/sec4_2",
    where="Section 4.2",
    statement="Centred weight norm gives every output mean 0 and constant weight variance, and rescaled keeps the "
    "variance of a ReLU layer; the pre-activation between sub-nets lowers the variance there.",
    paper_value="no numbers; each check quotes the paper",
    how="Exact means and weight statistics of centred layers, variance over chains of layers and blocks of width 512 "
    "in float64, and a ResNet-18 with batch norm whose projections read the signal before or after the pre-activation.",
    cost=Cost(quick_seconds=6, full_seconds=30),
    precision="float64; the ResNet-18 in float32",
    quick_seeds=3,
    seeds=10,
    checks=(
        *(
            rounding(name, statement)
            for name, statement in (
                ("mean of weights over rms, centred", "centred weights have mean 0, largest of all neurons"),
                (
                    "spread of weight variance, centred",
                    "centred weights have one variance, largest difference between neurons",
                ),
                ("output mean over deviation, equal inputs", "inputs of one mean give outputs of mean 0"),
                (
                    "output of a constant inside, zero padding",
                    "inputs of one mean give outputs of mean 0 in a convolution, inside its border",
                ),
            )
        ),
        expect("mean of weights over rms, weight norm", low=0.5).derived(
            "weight norm alone leaves the mean (the control)",
            why="weights were given means as large as their deviations, so that the largest of 32 neurons has a mean "
            "above half of its rms",
        ),
        expect("output mean over deviation, unequal inputs", paper=0.0, low=0.1).derived(
            "inputs of different means give outputs with a mean, in standard deviations",
            why="for deviations σ = e^(N/2) it is sd(σ)/√(2π) over √(½(1 - 1/π)·E[σ²]) = 0.32; a third of it, since 64 "
            "draws of σ vary",
            erratum="centred weights remove the mean that all inputs share; outputs have mean 0 only where all inputs "
            "have the same mean, as after ReLU of channels of equal variance",
        ),
        aside("output of a constant at the border, zero padding", paper=0.0, low=0.05).derived(
            "the mean is not 0 where zero padding cuts the weights",
            why="a third of the 72 weights of norm 1 is missing there, and the rest sum to about √(⅓·⅔) = 0.47",
        ),
        *(
            near(f"variance factor a layer, {name}", value, share=0.05, paper=paper).derived(
                statement, why="the variance of 512 neurons after 1,024 inputs is known to 2 % per layer"
            )
            for name, statement, paper, value in (
                (
                    "centred and rescaled",
                    "centred weight norm rescaled by 1/√Var ReLU keeps the variance",
                    "accounts for",
                    1.0,
                ),
                (
                    "centred",
                    "centred weight norm without the rescaling multiplies the variance by ½(1 - 1/π) per layer (the "
                    "control)",
                    None,
                    _SLOPE / 2,
                ),
            )
        ),
        near("variance after over before a transition", _DROP, share=0.05, paper="reduced after every sub-net").derived(
            "the pre-activation between sub-nets lowers the variance",
            why="from 1 + 2(1 - 1/π), and twice 3(1 - 1/π), to 2(1 - 1/π): 0.635 in the geometric mean; 5 % for widths "
            "of 64 to 512",
        ),
        expect("variance after over before a transition, raw", low=1.0).derived(
            "projections of the signal before the pre-activation do not lower the variance (the control)",
            why="a branch is added and nothing divided",
        ),
        *(
            near(f"variance a block, {order}", value, share=0.08, paper=paper).derived(
                statement,
                why=f"{value:.2f}; product of branch and shortcut adds 2·√(v/512) per block, 3 % of the slope over 8: "
                "more than two standard errors",
            )
            for order, value, statement, paper in (
                ("BN → ReLU, He", _SLOPE, "batch norm before ReLU adds 1 - 1/π per block", "curves do not overlap"),
                (
                    "ReLU → BN, He",
                    2.0,
                    "batch norm after ReLU adds 2 per block with He's weights",
                    "curves do not overlap",
                ),
                ("ReLU → BN, gain 1", 1.0, "batch norm after ReLU adds 1 per block with weights of gain 1", None),
                ("NF", 1.0, "an NF-ResNet adds 1 per block", "β²"),
            )
        ),
    ),
)
@undisturbed
def sec4_2(settings: Settings) -> Measurement:
    """Means and variances after centred weight norm and at transitions. Reference: normdead, section 4.2."""

    def measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
        g = generator(seed)
        layer = centred(64, 32, 1.0, g)
        weight = layer.effective_weight().detach()
        plain = WeightNormLinear(64, 32, bias=False).double()
        plain.weight.data.copy_(layer.weight)
        variances = weight.var(1, correction=0)
        border, inside = border_mean(g)
        curves = {order: order_variance(order, seed) for order in _ORDERS}
        numbers = {
            "mean of weights over rms, centred": _row_mean(weight),
            "mean of weights over rms, weight norm": _row_mean(plain.effective_weight().detach()),
            "spread of weight variance, centred": float((variances.max() - variances.min()) / variances.max()),
            "output mean over deviation, equal inputs": output_mean(torch.ones(64, dtype=torch.float64), g),
            "output mean over deviation, unequal inputs": output_mean((0.5 * normal((64,), g)).exp(), g),
            "output of a constant at the border, zero padding": border,
            "output of a constant inside, zero padding": inside,
            "variance factor a layer, centred and rescaled": layer_factor(
                lambda g: centred(_WIDTH, _WIDTH, _GAMMA, g), seed
            ),
            "variance factor a layer, centred": layer_factor(lambda g: centred(_WIDTH, _WIDTH, 1.0, g), seed),
            "variance after over before a transition": transition_drop(settings, seed, raw=False),
            "variance after over before a transition, raw": transition_drop(settings, seed, raw=True),
            **{f"variance a block, {order}": _slope(curve) for order, curve in curves.items()},
        }
        return numbers, curves

    numbers, curves = settings.over_seeds(measured)
    blocks = range(_BLOCKS + 1)
    return Measurement(
        values=numbers,
        panels=(
            chart(
                "variance of the sum by the order in the branch",
                {order: means(of) for order, of in curves.items()} | {"1 + b": tuple(1.0 + b for b in blocks)},
                "mean over channels",
                "block",
                log_y=False,
                x=blocks,
                note="ReLU → BN with gain 1 and NF lie on 1 + b",
            ),
        ),
        notes=(
            "section 4.3 blames the order ReLU → BN for curves that do not overlap in Figure 5; with He's weights both "
            "orders miss the NF-ResNet's 1 + b, and ReLU → BN meets it where its weights have gain 1",
            "Figure 4's caption calls its order BN → ReLU, section 4.3 that of Figure 5 ReLU → BN",
        ),
    )


def _row_mean(weight: Tensor) -> float:
    return float((weight.mean(1).abs() / weight.square().mean(1).sqrt()).max())


def _slope(heights: list[float]) -> float:
    return straight_line(range(len(heights)), heights)[0]
