"""The claims of `fixup` on networks before training: exploding variance and gradient bounds.

Reference: Zhang, Dauphin, Ma 2019, section 2, appendix A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from normfree.diagnostics.homogeneity_bounds import BlockBound, Bounds, SetBound, gradient_bounds
from normfree.diagnostics.propagation import propagate
from normfree.models import Network, build
from normfree_papers.claims.claim import Cost, Measurement, Settings, claim, expect
from normfree_papers.claims.depth_curves import (
    chart,
    decades,
    factor_per_block,
    geometric_means,
    padded_growth,
    stage_starts,
    straight_line,
    table,
)

_STAGES = (3, 4, 6, 3)  # blocks of ResNet-50
ROUNDING = "the inequality itself, for every draw; 1e-6 is left for rounding in float64"


# Section 2: the variance without normalization


@claim(
    id="fixup/sec2",
    where="Section 2",
    statement="Without normalization, the variance of a residual network doubles at every block under He's weights.",
    paper_value="Var[x_{l+1}] ≈ 2·Var[x_l], so exponential in depth",
    how="The second moment of the signal of residual MLPs and of a pre-activation ResNet-50 on N(0, 1) inputs, block "
    "by block, over several draws of the weights.",
    cost=Cost(quick_seconds=15, full_seconds=60),
    seeds=10,
    quick_seeds=5,
    precision="float64; the ResNet-50 in float32",
    departures=("the second moment in place of the variance, which sums over the draws of the weights",),
    version=2,
    checks=(
        expect("factor, residual MLP", paper=2.0, low=1.9, high=2.1).derived(
            "the second moment grows by this factor per block without border effects",
            why="2 within 5 %: at width n a block's factor varies by √(4/n) = 9 % (n = 512), which lowers the "
            "geometric mean by 2/n = 0.4 %; 30 blocks leave 1.6 % a draw",
        ),
        expect("R² of the logarithm, residual MLP", paper="exponential", low=0.99).derived(
            "the logarithm of the second moment is a straight line of depth, so growth is exponential",
            why="steps that vary by 9 % leave a walk of variance 0.03 around a line of variance 36: 0.999; linear "
            "growth over 30 blocks would give 0.85",
        ),
        expect("factor over that with zero padding, ResNet-50", paper="about 2", low=0.95, high=1.05).derived(
            "the factor in a convolutional network, over 1 + the share of taps that zero padding leaves",
            why="the branch keeps the second moment but for the taps outside of the image, which `padded_factors` "
            "counts; 5 % as for the MLP",
        ),
        expect("factor, ResNet-50 with batch norm", paper="normalization prevents it", low=1.15, high=1.26).derived(
            "with batch norm the factor of the last blocks of the longest stage is far below 2",
            why="variance (b + 1)·(1 - 1/π) grows from block 3 to 6 by 7/4, which is 1.205 per block; 5 % for four "
            "images",
        ),
    ),
)
def sec2(settings: Settings) -> Measurement:
    """Growth of the second moment over depth. Reference: fixup, section 2, first paragraph."""
    width, blocks, image = (512, 30, 16) if settings.quick else (512, 50, 32)
    stages = [stage for stage, count in enumerate(_STAGES, 1) for _ in range(count)]
    last = slice(stages.index(3) + 2, stages.index(3) + 6)  # the last blocks of the longest stage
    padded = [f for k, count in enumerate(_STAGES) for f in padded_factors(image >> k, count)]
    expected = math.exp(math.fsum(map(math.log, padded)) / len(padded))

    def measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
        g = torch.Generator().manual_seed(seed)
        mlp = build(f"resmlp-{blocks}-{width}", "he_in", form="pre", size=8, generator=g, dtype=torch.float64)
        mlp.to(settings.device)
        x = torch.randn(64, 3 * 8 * 8, generator=g, dtype=torch.float64).to(settings.device)
        curves = {"residual MLP": [norm**2 / width for norm in propagate(mlp, x).series("sum", "norm")]}
        x = torch.randn(4, 3, image, image, generator=g).to(settings.device)
        for name, method in (("ResNet-50", "he_in"), ("ResNet-50, batch norm", "batchnorm")):
            signal = propagate(build("preact_resnet50", method, generator=g, device=settings.device), x)
            pairs = zip(signal.series("sum", "mean_square"), signal.series("sum"), strict=True)
            curves[name] = [square + variance for square, variance in pairs]
        plain, deep, normed = curves.values()
        numbers = {
            "factor, residual MLP": factor_per_block(plain, [1] * blocks),
            "R² of the logarithm, residual MLP": straight_line(range(1, blocks + 1), list(map(math.log, plain)))[1],
            "factor, ResNet-50": factor_per_block(deep, stages),
            "factor over that with zero padding, ResNet-50": factor_per_block(deep, stages) / expected,
            "factor, ResNet-50 with batch norm": factor_per_block(normed[last], stages[last]),
        }
        return numbers, curves

    numbers, curves = settings.over_seeds(measured)
    plain, deep, normed = map(geometric_means, curves.values())
    return Measurement(
        values=numbers,
        panels=(
            chart(
                f"residual MLP of {blocks} blocks, width {width}",
                {"He fan-in": plain, "doubling": _doubling(plain)},
                "second moment",
            ),
            chart(
                "pre-activation ResNet-50",
                {"He fan-in": deep, "doubling": _doubling(deep), "batch norm": normed},
                "second moment",
                stages=stage_starts(stages),
            ),
        ),
        notes=(f"geometric means over {len(settings.seeds)} draws of weights and inputs",),
    )


def _doubling(curve: Sequence[float]) -> list[float]:
    """A curve that starts where this one does and doubles at every block."""
    return [curve[0] * 2.0**b for b in range(len(curve))]


def padded_factors(size: int, blocks: int) -> list[float]:
    """Factors by which blocks with one 3×3 layer multiply the second moment of a size × size image, from the second on.

    The first block of a stage is taken to leave the same second moment everywhere.
    """
    return [after / before for before, after in pairwise(padded_growth(size, blocks - 1))]


# Theorems 1 and 2: gradients are bounded from below

_GROWTH = (
    "16 to 40 layers add four blocks to each stage, which multiply the second moment by 1.84, 1.71 and 1.48 with the "
    "taps lost on 16×16, 8×8 and 4×4 images: 1.34 decades in the logits' norm, and ℓ - H grows at least as fast; a "
    "factor of two is left for 16 images"
)


def _bounds(settings: Settings, method: str, depth: int, seed: int) -> Bounds:
    """Both theorems on a wide ResNet of this depth and random labels, in float64."""
    g = torch.Generator().manual_seed(seed)
    model = build(f"wrn-{depth}-1", method, generator=g, dtype=torch.float64, device=settings.device)
    return gradient_bounds(model, *_noise(g, settings))


def _noise(g: torch.Generator, settings: Settings) -> tuple[Tensor, Tensor]:
    """Draw 16 images of 16×16 and their labels."""
    x = torch.randn(16, 3, 16, 16, generator=g, dtype=torch.float64)
    return x.to(settings.device), torch.randint(10, (16,), generator=g).to(settings.device)


def _bounds_by_depth(settings: Settings, seed: int) -> dict[int, Bounds]:
    """Both theorems without normalization, by depth."""
    depths = (16, 40) if settings.quick else (16, 40, 100, 202)
    return {depth: _bounds(settings, "he_in", depth, seed) for depth in depths}


@claim(
    id="fixup/thm1",
    where="Theorem 1",
    statement="The gradient at any block's input is at least (loss - entropy)/norm, so it explodes with the logits.",
    paper_value="‖∂ℓ/∂x_{i-1}‖ ≥ (ℓ - H(p))/‖x_{i-1}‖",
    how="Gradients at every block's input of wide ResNets (He, no normalization, N(0, 1) images, random labels, "
    "float64) beside the bound, sample by sample.",
    cost=Cost(quick_seconds=4, full_seconds=20),
    seeds=10,
    quick_seeds=5,
    precision="float64",
    checks=(
        expect("smallest gradient over bound", paper="≥ 1", low=1 - 1e-6).printed(
            "no block and no sample falls below the bound", why=ROUNDING, exact=True
        ),
        expect("largest deviation of the directional derivative", paper=0.0, high=1e-8).derived(
            "⟨∂ℓ/∂x, x⟩ equals ℓ - H(p), the identity from which the bound follows",
            why="appendix A.1, equation 6, is exact; float64 leaves 1e-12 of it after a hundred layers",
            exact=True,
        ),
        expect("decades that the bound grows from 16 to 40 layers", paper="exploding", low=1.0).derived(
            "the bound at the first block grows with depth: an exploding loss implies exploding gradients", why=_GROWTH
        ),
        expect("deviation with batch norm", paper="without any normalization", low=1e-5).derived(
            "with batch norm the network is not homogeneous and the identity breaks (the control)",
            why="a normalized network hardly changes when x is scaled, so that ⟨∂ℓ/∂x, x⟩ is near 0 and misses "
            "ℓ - H(p); a thousand times the range of the identity is no rounding",
        ),
    ),
)
def thm1(settings: Settings) -> Measurement:
    """Gradients at block inputs and their bounds. Reference: fixup, Theorem 1, equation 2; appendix A.1."""

    def measured(seed: int) -> tuple[dict[str, float], dict[int, tuple[BlockBound, ...]]]:
        found = {depth: both.blocks for depth, both in _bounds_by_depth(settings, seed).items()}
        blocks = [block for of in found.values() for block in of]
        normed = _bounds(settings, "batchnorm", 16, seed).blocks
        numbers = {
            "smallest gradient over bound": min(b.ratio for b in blocks),
            "largest deviation of the directional derivative": max(b.deviation for b in blocks),
            "decades that the bound grows from 16 to 40 layers": decades([found[16][1].bound, found[40][1].bound]),
            "deviation with batch norm": max(b.deviation for b in normed[1:-1]),
        }
        return numbers, found

    numbers, found = settings.over_seeds(measured)
    return Measurement(
        values=numbers,
        panels=tuple(
            chart(
                f"WRN-{depth}-1, {(depth - 4) // 2} blocks",
                {"measured": (b.measured for b in blocks), "bound of Theorem 1": (b.bound for b in blocks)},
                "‖∂ℓ/∂x‖, mean over samples",
                "input of stem, blocks and classifier",
            )
            for depth, (blocks, *_) in found.items()
        ),
        notes=(f"curves are those of seed {settings.seeds[0]}; 16 images of 16×16 a network",),
    )


@claim(
    id="fixup/thm2",
    where="Theorem 2",
    statement="The gradient of a positively homogeneous set of parameters is at least (loss - entropy)/norm.",
    paper_value="‖∂ℓ_{avg}/∂θ‖ ≥ G(θ), and E[G] ≥ (E[max z] - log c)/‖θ‖",
    how="Gradients of stem, classifier and every projection with a layer of its branch in wide ResNets (as for Theorem "
    "1) beside both bounds; the second over 100 draws of the classifier.",
    cost=Cost(quick_seconds=4, full_seconds=25),
    seeds=10,
    quick_seeds=5,
    precision="float64",
    checks=(
        expect("smallest gradient over bound", paper="≥ 1", low=1 - 1e-6).printed(
            "no set falls below the bound G of equation 3", why=ROUNDING, exact=True
        ),
        expect("largest deviation of the directional derivative", paper=0.0, high=1e-8).derived(
            "⟨∂ℓ/∂θ, θ⟩ equals the mean of ℓ - H(p), so the sets are homogeneous",
            why="appendix A.2, equation 8, is exact; float64 leaves 1e-12 of it after a hundred layers",
            exact=True,
        ),
        expect("E[G] over its bound", paper="≥ 1", low=1.0).printed(
            "averaged over classifiers, G is at least (E[max z] - log c)/‖θ‖, equation 4",
            why="the inequality itself: the bound drops logsumexp - max ≥ 0 and log c - H ≥ 0, so there is room",
        ),
        expect("decades that the bound grows from 16 to 40 layers", paper="exploding", low=1.0).derived(
            "the stem's bound grows with depth", why=_GROWTH
        ),
    ),
)
def thm2(settings: Settings) -> Measurement:
    """Gradients of homogeneous sets and their bounds. Reference: fixup, Theorem 2, equations 3 and 4; Figure 2."""

    def measured(seed: int) -> tuple[dict[str, float], dict[int, tuple[SetBound, ...]]]:
        found = {depth: both.sets for depth, both in _bounds_by_depth(settings, seed).items()}
        sets = [one for of in found.values() for one in of]
        numbers = {
            "smallest gradient over bound": min(s.measured / s.bound for s in sets),
            "largest deviation of the directional derivative": max(s.deviation for s in sets),
            "E[G] over its bound": _expected_over_bound(settings, seed),
            "decades that the bound grows from 16 to 40 layers": decades([found[16][0].bound, found[40][0].bound]),
        }
        return numbers, found

    numbers, found = settings.over_seeds(measured)
    shown = {depth: sets for depth, (sets, *_) in found.items()}
    rows = [
        (f"wrn-{depth}-1", s.name, f"{s.measured:.4g}", f"{s.bound:.4g}") for depth, of in shown.items() for s in of
    ]
    return Measurement(
        values=numbers,
        panels=tuple(
            chart(
                f"WRN-{depth}-1",
                {"measured": (s.measured for s in sets), "bound of Theorem 2": (s.bound for s in sets)},
                "‖∂ℓ/∂θ‖",
                "",
                names=tuple(s.name for s in sets),
            )
            for depth, sets in shown.items()
        ),
        tables=table("Gradients of homogeneous sets", ("model", "set", "gradient", "bound"), rows),
        notes=(f"curves and table are those of seed {settings.seeds[0]}",),
    )


def _expected_over_bound(settings: Settings, seed: int, draws: int = 100) -> float:
    """E[G] divided by its bound: the mean of G·‖θ‖ divided by that of max z - log c, both over draws of classifiers.

    The norm ‖θ‖ of the set cancels.
    """
    g = torch.Generator().manual_seed(seed)
    model: Network = build("wrn-40-1", "he_in", generator=g, dtype=torch.float64, device=settings.device)
    x, y = _noise(g, settings)
    with torch.no_grad():
        features = model.head(model.body(model.stem(x)))
        shape = (draws, *model.classifier.weight.shape)
        weights = torch.randn(shape, generator=g, dtype=torch.float64).to(features) / features.shape[1] ** 0.5
        z = torch.einsum("nf,dcf->dnc", features, weights)
        logs = z.log_softmax(2)
        losses = -logs.gather(2, y.expand(draws, -1).unsqueeze(2)).squeeze(2)
        gaps = losses + (logs.exp() * logs).sum(2)
        return float(gaps.mean() / (z.amax(2).mean() - math.log(z.shape[2])))
