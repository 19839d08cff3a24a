"""The claim of `normdead` on the parts of batch norm, and the parts of an NF-ResNet that replace them.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 5.2.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from normfree.models import Network, build
from normfree.nn.residual import Residual
from normfree.report import Table
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, claim, expect
from normfree_papers.claims.depth_curves import chart, means, table
from normfree_papers.normdead.float64_draws import (
    ROUNDING,
    WHY_ROUNDING,
    apart,
    generator,
    normal,
    rounding,
    undisturbed,
)
from normfree_papers.normdead.single_layer import layer_values

_FACTOR = 3.0


def _blocks(model: nn.Module) -> list[Residual]:
    return [module for module in model.modules() if isinstance(module, Residual)]


def _first_layers(model: nn.Module) -> list[nn.Conv2d]:
    """The first layer of every branch."""
    branches: list[Any] = [block.branch for block in _blocks(model)]
    return [next(module for module in branch.modules() if isinstance(module, nn.Conv2d)) for branch in branches]


@torch.no_grad()
def entered_variance(model: Network, x: Tensor) -> tuple[list[float], list[float]]:
    """Variance of every block's input before and after the factor α; mean over channels."""
    found: tuple[list[float], list[float]] = ([], [])

    def watch(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        for into, signal in zip(found, (args[0], block.alpha(args[0])), strict=True):  # type: ignore[operator]
            into.append(float(signal.var((0, 2, 3), correction=0).mean()))

    handles = [block.register_forward_pre_hook(watch) for block in _blocks(model)]
    model(x)
    for handle in handles:
        handle.remove()
    return found


# Whole networks

_MODEL, _SIZE = "wrn-16-2", 16


@torch.no_grad()
def network_values(method: str, seed: int) -> dict[str, float]:
    """Change of the last sum, and of a branch with α from the data, when inputs or weights are scaled."""
    g = generator(seed)
    model = build(_MODEL, method, padding_mode="circular", generator=g).double()
    x = normal((8, 3, _SIZE, _SIZE), g)

    def features(images: Tensor) -> Tensor:
        out: Tensor = model.body(model.stem(images))
        return out

    before = features(x)
    values = {"input": apart(features(_FACTOR * x), before)}
    block: Any = _blocks(model)[1]
    signal = model.stem(x)
    signal = signal.repeat(1, 2, 1, 1)  # the width of the second block
    inside = [block.branch(block.entry(s / s.std(correction=0))) for s in (signal, _FACTOR * signal)]
    values["branch"] = apart(inside[1], inside[0])
    for which in (0, -1):
        for block in _blocks(model):
            layers = [layer for layer in block.branch if isinstance(layer, nn.Conv2d)]
            layers[which].weight.mul_(_FACTOR)
        after = features(x)
        values["first layers" if which == 0 else "last layers"] = apart(after, before)
        before = after
    return values


@torch.no_grad()
def shifted_branches(method: str, seed: int) -> float:
    """Relative change of the last sum if the output of the first layer of every branch is shifted, channel by channel.

    The shifts are drawn from N(0, 1). In an NF-ResNet the layer's own bias is shifted. A layer before batch norm has no
    bias, so its output is shifted.
    """
    g = generator(seed)
    model = build(_MODEL, method, padding_mode="circular", generator=g).double()
    x = normal((8, 3, _SIZE, _SIZE), g)
    before = model.body(model.stem(x))
    for first in _first_layers(model):
        shift = normal((first.out_channels,), g)
        if first.bias is not None:
            first.bias.copy_(shift)
        elif method == "batchnorm":
            first.register_forward_hook(lambda _m, _a, out, shift=shift: out + shift.view(-1, 1, 1))
    return apart(model.body(model.stem(x)), before)


def gradient_means(method: str, seed: int) -> list[float]:
    """The mean over batch and positions of the gradient at the first layer of each branch, relative to its RMS."""
    g = generator(seed)
    model = build(_MODEL, method, padding_mode="circular", generator=g).double()
    kept: list[Tensor] = []
    for first in _first_layers(model):
        first.register_forward_hook(lambda _m, _a, out: kept.append(out))
    labels = torch.randint(10, (16,), generator=g)
    loss = nn.functional.cross_entropy(model(normal((16, 3, _SIZE, _SIZE), g)), labels)
    gradients = torch.autograd.grad(loss, kept)
    shares = [t.mean((0, 2, 3)).square().mean().sqrt() / t.square().mean().sqrt() for t in gradients]
    return [float(value) for value in shares]


_NETWORKS = {"batch norm": "batchnorm", "NF": "nf:beta=1", "NF, He": "nf_he:beta=1"}


@claim(
    id="normdead/sec5_2",
    where="Section 5.2",
    statement="In NF-ResNets α replaces batch norm's division, and centred weight norm its mean, scale invariance and "
    "affine part. Nothing replaces its centring of the gradient.",
    paper_value="no numbers; each check quotes the paper",
    how="Outputs and gradients of single layers with batch norm and with centred weight norm, and of networks with "
    "both, under changes of inputs, weights, gains and biases.",
    cost=Cost(quick_seconds=6, full_seconds=20),
    precision="float64; the NF-ResNet-50 in float32",
    quick_seeds=5,
    seeds=10,
    version=2,
    checks=(
        expect("largest Var[αx] less 1", paper="models the division by the standard deviation", high=0.1).derived(
            "α normalizes like a division by σ: largest |Var[αx] - 1| over the blocks of an NF-ResNet-50",
            why="1 + b·β² without a border; the product of branch and shortcut moves the sum by 2·√b/(1 + b)/√256 = 6 "
            "% at most for one position, and less for the mean over channels and positions; 10 %",
        ),
        expect(
            "largest Var[αx] less 1, β = 0.2", paper="models the division by the standard deviation", high=0.1
        ).derived(
            "the same at β = 0.2, the method's default for training",
            why="1 + b·β² without a border; the product of branch and shortcut moves the sum by 2·β/√256 = 2.5 % "
            "at most per block, and 5 blocks by 6 %; 1 + b·β in its place would leave 0.4",
        ),
        expect("largest Var[x]", low=5.0).derived(
            "the signal itself grows (the control)",
            why="1 + b before the last block of a stage of 6, less 10 %, is 5.4",
        ),
        rounding("weight scale, batch norm", "batch norm makes weights scale-invariant, neuron by neuron", "invariant"),
        rounding(
            "weight scale, centred weight norm",
            "centred weight norm makes weights scale-invariant, neuron by neuron",
            "re-introduced",
        ),
        expect("weight scale, neither", low=0.1).derived(
            "the weights of a plain layer are not scale-invariant (the control)",
            why="factors e^N differ from 1 by more than a half in the mean; a tenth is no rounding",
        ),
        rounding("input scale, batch norm", "batch norm does not notice the scale of the input", "invariant"),
        rounding(
            "output over 3 at 3 times the input, centred weight norm",
            "centred weight norm passes the input scale through",
            "the input scale-invariance is lost",
        ),
        rounding("affine scale, centred weight norm", "a gain on centred weights is the affine scale", "modelled"),
        rounding("bias before batch norm", "batch norm removes a preceding bias", "annihilated"),
        rounding("bias, centred weight norm", "centred weight norm keeps a preceding bias", "not annihilated"),
        expect("share of convolutions with a bias, NF-ResNet", paper="bias=True", low=1.0, high=1.0).printed(
            "every convolution of an NF-ResNet has a bias, as in appendix A.2", why="a count", exact=True
        ),
        expect("branch biases shifted, NF-ResNet", paper="does not annihilate", low=0.1).derived(
            "shifting the biases of every branch of an NF-ResNet by N(0, 1) changes its last sum",
            why="each shift is as large as the signal of unit variance that it is added to; a tenth is no rounding",
        ),
        expect("branch shifts before batch norm, ResNet", paper="annihilated", high=ROUNDING).derived(
            "the same shift before every batch norm of a branch changes nothing (the control)", why=WHY_ROUNDING
        ),
        rounding(
            "branch at 3 times its input, α from the data",
            "a branch with α = 1/√Var[x] of the data does not notice the scale of its input",
            "some sort",
        ),
        expect(
            "NF-ResNet at 3 times its input",
            paper="some sort of scale-invariance for the entirety of the network",
            low=1.999,
            high=2.001,
        ).derived(
            "relative change of the last sum of a network with its analytic α",
            why="with biases that start at 0 it is homogeneous: 3 times the input gives 3 times the output; float32 "
            "factors",
            erratum="α is a constant computed for inputs of unit variance, so that the network is homogeneous, not "
            "invariant; only an α taken from the data would make its branches invariant, and not its shortcuts",
        ),
        expect("NF-ResNet with all weights scaled", paper="re-introduced", high=1e-9).derived(
            "every weight layer of a branch of an NF-ResNet is scale-invariant", why="rounding over 16 layers"
        ),
        expect("ResNet with batch norm, first layers scaled", paper="invariant", high=1e-3).derived(
            "in a ResNet with batch norm, weight layers before a normalizer are scale-invariant",
            why="ε = 1e-5 over a variance of about 1, in six blocks of two layers, with room",
        ),
        aside("ResNet with batch norm, last layers scaled", low=0.1).derived(
            "the last layer of a pre-activation branch, which enters the sum, is not scale-invariant (the control)",
            why="the branch is three times as large beside its shortcut",
        ),
        rounding(
            "gradient's mean over the batch, batch norm", "batch norm centres the gradient over the batch", "centred"
        ),
        expect("gradient's mean over the batch, centred weight norm", paper="no gradient centering", low=0.05).derived(
            "centred weight norm does not centre the gradient over the batch",
            why="128 independent numbers of mean 0 would leave 1/√128 = 0.09, a centred gradient 1e-16; a twentieth of "
            "the rms is no rounding",
        ),
        expect(
            "gradient's mean over inputs, centred weight norm",
            paper="does not otherwise affect the gradients w.r.t. the inputs",
            high=ROUNDING,
        ).derived(
            "centred weight norm centres the gradient of every sample over the layer's inputs",
            why=WHY_ROUNDING,
            erratum="the rows of centred weights sum to 0, so every gradient that they send back does as well",
        ),
        expect("gradient's mean over inputs, neither", low=0.05).derived(
            "plain weights do not centre the gradient over the inputs (the control)",
            why="1/√64 = 0.12 for random weights; less than half of it",
        ),
        expect("largest mean of a gradient, ResNet with batch norm", paper="centred", high=1e-9).derived(
            "in a ResNet with batch norm, gradients are centred: mean over batch and positions over rms, largest of "
            "the branches",
            why="rounding over 16 layers",
        ),
        expect("smallest mean of a gradient, NF-ResNet", paper="no gradient centering", low=1e-4).derived(
            "in an NF-ResNet no gradient is centred (the control)",
            why="4,096 independent numbers would leave 0.016; a hundredth of it is no rounding",
        ),
    ),
)
@undisturbed
def sec5_2(settings: Settings) -> Measurement:
    """Scales, shifts and gradients under batch norm and its replacements. Reference: normdead, section 5.2."""

    def measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
        g = generator(seed)
        deep = build("preact_resnet50", "nf:beta=1", padding_mode="circular", generator=g).to(settings.device)
        images = torch.randn(8 if settings.quick else 16, 3, 32, 32, generator=g)
        before, after = entered_variance(deep, images.to(settings.device))
        trained = build("preact_resnet50", "nf", padding_mode="circular", generator=g).to(settings.device)
        small = entered_variance(trained, images.to(settings.device))[1]
        centring = {name: gradient_means(method, seed) for name, method in _NETWORKS.items()}
        normed, free = network_values("batchnorm", seed), network_values("nf:beta=1", seed)
        numbers = {
            "largest Var[αx] less 1": max(abs(value - 1) for value in after),
            "largest Var[αx] less 1, β = 0.2": max(abs(value - 1) for value in small),
            "largest Var[x]": max(before),
            **layer_values(seed),
            "branch at 3 times its input, α from the data": free["branch"],
            "NF-ResNet at 3 times its input": free["input"],
            "NF-ResNet with all weights scaled": math.hypot(free["first layers"], free["last layers"]),
            "ResNet with batch norm, first layers scaled": normed["first layers"],
            "ResNet with batch norm, last layers scaled": normed["last layers"],
            "ResNet with batch norm at 3 times its input": normed["input"],
            "branch biases shifted, NF-ResNet": shifted_branches("nf:beta=1", seed),
            "branch shifts before batch norm, ResNet": shifted_branches("batchnorm", seed),
            "largest mean of a gradient, ResNet with batch norm": max(centring["batch norm"]),
            "smallest mean of a gradient, NF-ResNet": min(centring["NF"]),
        }
        return numbers, {"Var[x]": before, "Var[αx]": after, **centring}

    numbers, curves = settings.over_seeds(measured)
    convolutions = [m for m in build(_MODEL, "nf", device="meta").modules() if isinstance(m, nn.Conv2d)]
    return Measurement(
        values={
            **numbers,
            "share of convolutions with a bias, NF-ResNet": fmean([m.bias is not None for m in convolutions]),
        },
        panels=(
            chart(
                "input of the blocks of an NF-ResNet-50",
                {name: means(curves[name]) for name in ("Var[x]", "Var[αx]")},
                "mean over channels",
                log_y=False,
            ),
            chart(
                f"what is left of the gradient's mean, {_MODEL}",
                {name: means(curves[name]) for name in _NETWORKS},
                "mean over root mean square",
                note="at the output of the first layer of every branch, which batch norm follows where there is one",
            ),
        ),
        tables=_pieces(numbers),
        notes=(
            "the regularization that the section names needs training, and is not measured here",
            "weights of the last layer of a pre-activation branch are not scale-invariant under batch norm, since no "
            "normalizer follows before the sum; under centred weight norm they are",
        ),
    )


def _pieces(values: dict[str, list[float]]) -> tuple[Table, ...]:
    def cell(name: str) -> str:
        value = sum(values[name]) / len(values[name])
        return "0" if abs(value) <= ROUNDING else f"{value:.2g}"

    def both(name: str) -> tuple[str, str]:
        return cell(f"{name}, batch norm"), cell(f"{name}, centred weight norm")

    rows = (
        ("division by σ", "α", "by definition", cell("largest Var[αx] less 1")),
        ("weights' scale", "centred weight norm", *both("weight scale")),
        ("input's scale, a layer", "nothing", *both("input scale")),
        (
            "input's scale, the network",
            "α, says the survey",
            cell("ResNet with batch norm at 3 times its input"),
            cell("NF-ResNet at 3 times its input"),
        ),
        ("affine scale", "gain on the weights", "by definition", cell("affine scale, centred weight norm")),
        ("affine shift", "the layers' own bias", "by definition", cell("bias, centred weight norm")),
        ("gradient centred over the batch", "nothing", *both("gradient's mean over the batch")),
    )
    columns = ("what batch norm does", "stands for it", "batch norm", "NF-ResNet")
    return table("Relative deviation from doing it in full", columns, rows)
