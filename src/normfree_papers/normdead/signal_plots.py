"""The claims of `normdead` on networks before training: the signal propagation plots of Figures 4 and 5.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 4.2; the network is that of appendix A.3, a pre-activation
ResNet-50 with the 7×7 stem and max pooling of ImageNet, on white noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch

from normfree import theory
from normfree.diagnostics.propagation import propagate
from normfree.diagnostics.signals import Signal
from normfree.models import build
from normfree.models.base import Padding
from normfree.report.panels import Panel
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, claim, expect, near
from normfree_papers.claims.depth_curves import (
    chart,
    factor_per_block,
    means,
    padded_growth,
    stage_starts,
    straight_line,
)

_STAGES = (3, 4, 6, 3)
_SLOPE = 1 - 1 / math.pi


def _images(settings: Settings) -> tuple[int, int]:
    """The number of images and their size."""
    return (4, 96) if settings.quick else (8, 224)


def bordered_growth(size: int) -> list[float]:
    """The mean square after each block x + f(x) whose f keeps it, but for taps missing at a zero-padded border.

    Each stage starts from a flat map of half the size of the one before; f has one 3×3 convolution.
    """
    return [square for stage, blocks in enumerate(_STAGES) for square in padded_growth(size >> stage, blocks)[1:]]


def _signal(settings: Settings, method: str, padding: Padding, seed: int) -> Signal:
    """The signal of the paper's network on white noise; as in its listing, the stem has He's gain of 2, too."""
    batch, size = _images(settings)
    g = torch.Generator().manual_seed(seed)
    model = build("resnet50", method, form="pre", padding_mode=padding, generator=g)
    if "nf:" not in method:
        with torch.no_grad():
            model.get_submodule("stem.conv").weight.mul_(math.sqrt(2))  # type: ignore[operator]
    x = torch.randn(batch, 3, size, size, generator=g)
    return propagate(model.to(settings.device), x.to(settings.device))


def _measure(
    settings: Settings, runs: Mapping[str, tuple[str, Padding]]
) -> tuple[dict[str, dict[str, list[list[float]]]], list[int]]:
    """The curves of variance, squared mean and branch of every run, one per seed, and the stage of every block."""
    signals = settings.over_seeds_of(runs, lambda name, seed: _signal(settings, *runs[name], seed))
    parts = {"variance": ("sum", "variance"), "mean": ("sum", "mean_square"), "branch": ("branch", "variance")}
    found = {
        name: {key: [signal.series(*part) for signal in of] for key, part in parts.items()}
        for name, of in signals.items()
    }
    return found, [s.stage for s in next(iter(signals.values()))[0].sums]


def _setting(settings: Settings) -> str:
    batch, size = _images(settings)
    return f"{batch} images of N(0, 1) noise, {size}×{size} (the paper: 1,000 of 224×224); seeds {list(settings.seeds)}"


@claim(
    id="normdead/fig4",
    where="Figure 4",
    statement="Batch norm turns the exponential growth of a ResNet's variance into a linear one that restarts at every "
    "transition.",
    paper_value="a plot: exponential without, linear with batch norm, drops after each of 3, 4, 6 and 3 blocks",
    how="Channel-averaged squared mean and variance after each sum, and variance of each branch, in a pre-activation "
    "ResNet-50 with and without batch norm on white noise.",
    cost=Cost(quick_seconds=9, full_seconds=85),
    seeds=10,
    quick_seeds=3,
    version=2,
    departures=("8 images in place of 1,000",),
    checks=(
        expect("factor a block over 2 less the border, without", paper="exponential", low=0.9, high=1.1).derived(
            "without batch norm the variance doubles at every block, but for the loss at zero-padded borders",
            why="x + f(x) with Var[f(x)] = Var[x], less the taps that are missing at the border of each map; 10 %: "
            "a layer of 64 channels varies by √(5/64) = 28 % in one place, and 12 factors are averaged",
        ),
        near("slope with batch norm", _SLOPE, share=0.05).derived(
            "variance that a block adds inside a stage",
            why="2·Var[ReLU] of a normalized signal is 1 - 1/π; 64 × 256 weights leave √(2/64/256) = 1 %, so 5 % are "
            "five standard errors",
        ),
        expect("smallest R² with batch norm", paper="linear", low=0.99).reading(
            "a straight line explains the growth inside each stage",
            why="our reading of the word 'linear': 99 % of the growth; less refutes it, as doubling would, with 0.96 "
            "in a stage of three blocks and 0.82 in one of six",
        ),
        near("restart with batch norm", 2 * _SLOPE, share=0.05, paper="reduced after every sub-net").derived(
            "variance after the first block of stages 2 to 4",
            why="2·(1 - 1/π): a projection and a branch of the pre-activated signal; 5 %, as for the slope",
        ),
        near("branch variance with batch norm", _SLOPE, share=0.05, paper="steady").derived(
            "mean variance of the branches, which batch norm inside them keeps steady",
            why="2·Var[ReLU] of a normalized signal; 5 %, as for the slope",
        ),
    ),
)
def fig4(settings: Settings) -> Measurement:
    """Mean and variance over depth with and without batch norm. Reference: normdead, section 4.2, Figure 4."""
    runs: dict[str, tuple[str, Padding]] = {
        "without batch norm": ("he_in", "zeros"),
        "batch norm": ("batchnorm", "zeros"),
    }
    found, stages = _measure(settings, runs)
    plain, normed = found["without batch norm"], found["batch norm"]
    lines = [_lines(curve, stages) for curve in normed["variance"]]
    starts = [i - 1 for i in stage_starts(stages)]
    bordered = bordered_growth(_images(settings)[1] // 4)
    values = {
        "factor a block over 2 less the border, without": [
            factor_per_block(curve, stages) / factor_per_block(bordered, stages) for curve in plain["variance"]
        ],
        "slope with batch norm": [fmean([slope for slope, _ in line]) for line in lines],
        "smallest R² with batch norm": [min(share for _, share in line) for line in lines],
        "restart with batch norm": [fmean([curve[i] for i in starts]) for curve in normed["variance"]],
        "branch variance with batch norm": [fmean(curve) for curve in normed["branch"]],
    }
    expected = tuple(v for stage in theory.normalized_variance(_STAGES) for v in stage)
    return Measurement(
        values=values,
        panels=(
            chart(
                "with and without batch norm",
                {
                    f"{symbol}, {name}": means(found[name][key])
                    for name in runs
                    for symbol, key in (("σ²", "variance"), ("μ²", "mean"))
                },
                "of the sum, mean over channels",
                stages=stage_starts(stages),
            ),
            chart(
                "batch norm alone",
                {
                    "σ², batch norm": means(normed["variance"]),
                    "μ², batch norm": means(normed["mean"]),
                    "σ² of the branch, batch norm": means(normed["branch"]),
                    "(b + 1)·(1 - 1/π)": expected,
                },
                "mean over channels",
                log_y=False,
                stages=stage_starts(stages),
            ),
        ),
        notes=(_setting(settings),),
    )


def _lines(curve: Sequence[float], stages: Sequence[int]) -> list[tuple[float, float]]:
    """Slope and R² of the best line through each stage."""
    found = []
    for stage in sorted(set(stages)):
        heights = [v for v, s in zip(curve, stages, strict=True) if s == stage]
        found.append(straight_line(range(len(heights)), heights))
    return found


@claim(
    id="normdead/fig5",
    where="Figure 5",
    statement="An NF-ResNet imitates the variance of a ResNet with batch norm; centred weight standardization also "
    "steadies its branches and removes its mean.",
    paper_value="two plots: variance alike, squared mean and branches unlike (left), both corrected (right)",
    how="As Figure 4, for NF-ResNet-50 with β = 1 under He's weights and under scaled weight standardization, beside "
    "batch norm.",
    cost=Cost(quick_seconds=18, full_seconds=120),
    seeds=10,
    quick_seeds=3,
    departures=("8 images in place of 1,000",),
    checks=(
        expect("variance against batch norm, nf_he", paper="pretty accurate", high=2.0).reading(
            "largest factor, over all blocks, between the variances of NF (He) and batch norm",
            why="our reading of the word 'pretty accurately': half to double at every block; more refutes it",
        ),
        expect("squared mean against batch norm, nf_he", paper="looks nothing like", low=3.0).reading(
            "largest factor, over all blocks, between the squared means of NF (He) and batch norm",
            why="our reading of the word 'nothing like': a factor of three or more at some block; less refutes it",
        ),
        expect("branch variance, largest over smallest, nf_he", paper="not particularly steady", low=1.5).reading(
            "the branches of NF (He) are not steady",
            why="our reading of the word 'not steady': a factor of 1.5 or more between blocks; less refutes it",
        ),
        expect("branch variance, largest over smallest, nf", paper="resolved", high=1.2).reading(
            "the branches of NF with standardized weights are steady, without the border",
            why="our reading of the word 'resolved': at most a factor of 1.2 between blocks; more refutes it",
        ),
        expect("variance over expectation, largest, nf", paper="1 + b·β²", high=1.1).derived(
            "the variance of NF with standardized weights is at most the expected 1 + b, without the border",
            why="1 + b·β²; the product of branch and shortcut moves the sum by 2·√b/(1 + b)/√256 = 6 % at most",
        ),
        expect("variance over expectation, smallest, nf", paper="1 + b·β²", low=0.9).derived(
            "the variance of NF with standardized weights is at least the expected 1 + b, without the border",
            why="1 + b·β²; the product of branch and shortcut moves the sum by 2·√b/(1 + b)/√256 = 6 % at most",
        ),
        expect("squared mean over variance, nf", paper="zero mean", high=0.05).reading(
            "NF with standardized weights has mean 0: largest share of the squared mean over all blocks",
            why="our reading of the word 'zero mean': at most a twentieth of the variance; more refutes it",
        ),
        expect("squared mean over variance, nf_he", paper="looks nothing like", low=1.0).reading(
            "under He's weights the squared mean outweighs the variance (the control)",
            why="our reading of the word 'nothing like': the squared mean is larger than the variance at some block; "
            "less refutes it",
        ),
        aside(
            "variance over expectation with zero padding, nf", paper="curves do not overlap", high=1.0, scale="full"
        ).derived(
            "with the zero padding of the figure the variance stays below the expectation, at worst by",
            why="missing taps can only take variance away; 1 or more refutes it",
        ),
    ),
)
def fig5(settings: Settings) -> Measurement:
    """Mean and variance over depth of NF-ResNets and of batch norm.

    Reference: normdead, section 4.2, Figure 5; appendix A.2 and A.3.
    """
    runs: dict[str, tuple[str, Padding]] = {
        "batch norm": ("batchnorm", "zeros"),
        "NF, He": ("nf_he:beta=1", "zeros"),
        "NF, standardized": ("nf:beta=1", "zeros"),
        "NF, standardized, no border": ("nf:beta=1", "circular"),
    }
    found, stages = _measure(settings, runs)
    normed, he = found["batch norm"], found["NF, He"]
    scaled, free = found["NF, standardized"], found["NF, standardized, no border"]
    expected = [v for stage in theory.nf_output_variance(_STAGES, 1.0) for v in stage]
    every = [expected] * len(settings.seeds)
    values = {
        "variance against batch norm, nf_he": _apart(he["variance"], normed["variance"]),
        "squared mean against batch norm, nf_he": _apart(he["mean"], normed["mean"]),
        "branch variance, largest over smallest, nf_he": [max(c) / min(c) for c in he["branch"]],
        "branch variance, largest over smallest, nf": [max(c) / min(c) for c in free["branch"]],
        "variance over expectation, largest, nf": _extreme(max, free["variance"], every),
        "variance over expectation, smallest, nf": _extreme(min, free["variance"], every),
        "squared mean over variance, nf": _extreme(max, free["mean"], free["variance"]),
        "squared mean over variance, nf_he": _extreme(max, he["mean"], he["variance"]),
        "variance over expectation with zero padding, nf": _extreme(min, scaled["variance"], every),
    }

    def panel(title: str, names: Sequence[str], key: str, exact: Sequence[float] = (), note: str = "") -> Panel:
        curves = {name: means(found[name][key]) for name in names} | ({"1 + b": tuple(exact)} if exact else {})
        return chart(title, curves, "mean over channels", log_y=False, stages=stage_starts(stages), note=note)

    names = ("batch norm", "NF, He", "NF, standardized")
    return Measurement(
        values=values,
        panels=(
            panel("variance of the sum", names, "variance", expected),
            panel("squared mean of the sum", names, "mean"),
            panel("variance of the branch", (*names, "NF, standardized, no border"), "branch"),
            panel(
                "variance of the sum without the border",
                ("NF, standardized, no border",),
                "variance",
                expected,
                "circular padding in place of zeros",
            ),
        ),
        notes=(
            _setting(settings),
            "without biases the He network is positively homogeneous, so its curves scale with the stem: with a stem "
            "of gain 1 in place of the listing's 2 all its variances are half as large",
        ),
    )


def _apart(curves: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> list[float]:
    """The largest factor between two curves, for every seed."""
    return list(map(max, _extreme(max, curves, others), _extreme(max, others, curves)))


def _extreme(
    of: Callable[[list[float]], float], curves: Sequence[Sequence[float]], others: Sequence[Sequence[float]]
) -> list[float]:
    """The largest or smallest ratio of two curves, for every seed."""
    pairs = zip(curves, others, strict=True)
    return [of([a / b for a, b in zip(curve, other, strict=True)]) for curve, other in pairs]
