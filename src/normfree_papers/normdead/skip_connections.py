"""The claims of `normdead` on skip connections: mean, variance and gradients of sums, concatenations and gates.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from normfree.models import build
from normfree.models.nonresidual import Concatenate, Highway
from normfree.nn.residual import Residual
from normfree.report.panels import Panel
from normfree_papers.claims.claim import Cost, Measurement, Settings, claim, expect, near
from normfree_papers.claims.depth_curves import chart, means
from normfree_papers.normdead.float64_draws import generator, he, normal, undisturbed

# Section 3.2, first half: the same transform f(x) = ReLU(Wx) under three kinds of skip connection

_BLOCKS, _WIDTH, _GROWTH, _BATCH = 12, 512, 64, 256
_KINDS = ("sum", "concatenation", "gate")
Moments = tuple[list[float], list[float]]  # means and mean squares, from the input on


def _block(kind: str, width: int, g: torch.Generator) -> nn.Module:
    """A skip connection around ReLU(Wx), which keeps the mean square; the gate of a highway has unit gain."""
    outputs = _GROWTH if kind == "concatenation" else width
    transform = nn.Sequential(he(width, outputs, 2.0, g), nn.ReLU())
    if kind == "sum":
        return Residual(transform)
    return Concatenate(transform) if kind == "concatenation" else Highway(he(width, width, 1.0, g), transform)


@torch.no_grad()
def chained(kind: str, x: Tensor, g: torch.Generator) -> tuple[Moments, list[float]]:
    """Moments of all numbers after each block, and for sums the correlation of transform and input."""
    found: Moments = ([float(x.mean())], [float(x.square().mean())])
    correlations = []
    for _ in range(_BLOCKS):
        block = _block(kind, x.shape[1], g)
        out = block(x)
        if kind == "sum":
            correlations.append(float(torch.corrcoef(torch.stack([x.flatten(), (out - x).flatten()]))[0, 1]))
        x = out
        found[0].append(float(x.mean()))
        found[1].append(float(x.square().mean()))
    return found, correlations


def expected(kind: str, m: float, q: float) -> Moments:
    """The moments of `chained` in closed form, from an input of mean m and mean square q.

    ReLU(Wx) has mean √(q/π) and mean square q, and is independent of x and of the gate.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    found: Moments = ([m], [q])
    for _ in range(_BLOCKS):
        f = math.sqrt(q / math.pi)
        if kind == "sum":
            m, q = m + f, 2 * q + 2 * m * f
        elif kind == "gate":
            gate = 1 / (1 + np.exp(1 - math.sqrt(q) * nodes))
            opened, squared, mixed = (float(weights @ v) for v in (gate, gate**2, gate * (1 - gate)))
            closed = 1 - opened - mixed  # E(1 - T)²
            m, q = opened * f + (1 - opened) * m, (squared + closed) * q + 2 * mixed * m * f
        found[0].append(m)
        found[1].append(q)
    return found


@torch.no_grad()
def dense_stage(settings: Settings, seed: int) -> list[float]:
    """Mean square after each layer of a DenseNet's first stage relative to its stem, with circular padding."""
    g = generator(seed)
    model = build("dense-40-12", "he_in", padding_mode="circular", generator=g).to(settings.device)
    x = model.stem(torch.randn(8 if settings.quick else 32, 3, 32, 32, generator=g).to(settings.device))
    found = [float(x.square().mean())]
    stage: nn.Module = model.body[0]
    for layer in stage.children():
        if not isinstance(layer, Concatenate):
            break
        x = layer(x)
        found.append(float(x.square().mean()))
    return [value / found[0] for value in found]


@claim(
    id="normdead/sec3_2",
    where="Section 3.2 (kinds of skip connection)",
    statement="Sums let variance and a positive mean drift; gates shift the mean much less, and concatenation changes "
    "neither if branch output and input have the same statistics.",
    paper_value="no numbers; each check quotes the paper",
    how="Mean and mean square over 12 blocks of one transform ReLU(Wx) in a sum, a concatenation and a highway gate, "
    "compared with their closed forms, and the first stage of a DenseNet.",
    cost=Cost(quick_seconds=10, full_seconds=20),
    precision="float64; the DenseNet in float32",
    quick_seeds=10,
    seeds=20,
    checks=(
        *(
            expect(f"{what} over closed form a block, sum", paper="drifting", low=0.93, high=1.07).derived(
                f"the {what} grows as the recursion says, factor per block",
                why="a block of width 512 varies by √(5/512) = 10 %, so 12 by 34 %, of which 3 seeds leave 20 %: four "
                "standard errors are 7 % per block",
            )
            for what in ("mean", "mean square")
        ),
        expect("growth of the mean, sum", paper="drifting", low=100.0).derived(
            "the mean after 12 blocks over that before",
            why="it more than doubles where it starts at √(q/π), and 1.5 per block would give 100",
        ),
        *(
            expect(f"{what} over closed form, {kind}", paper=paper, low=0.85, high=1.15).derived(
                f"the {what} after 12 blocks over its closed form", why=why
            )
            for kind, paper, why in (
                (
                    "gate",
                    "much less of a problem",
                    "1/√512 = 4 % per block, of which gates keep about seven tenths, and 3 seeds: four standard errors",
                ),
                (
                    "concatenation",
                    "does not affect",
                    "64 new features vary by 28 %, 12 times with a weight of 64 in 1,024, and 3 seeds: four standard "
                    "errors",
                ),
            )
            for what in ("mean", "mean square")
        ),
        expect("drift of the mean, gate over sum", paper="much less", high=0.5).reading(
            "|log| of the mean's factor per block, gates over sums",
            why="our reading of the word 'much less': at most half of the drift of sums; more refutes it",
        ),
        expect("mean of a concatenation of centred inputs", paper="if similar statistics", low=0.2).derived(
            "zero-mean inputs differ from the branch's output, and the mean moves (the control)",
            why="three quarters of the features are the branch's, of mean √(q/π) = 0.56: half of that",
        ),
        expect("mean square of a DenseNet's stage", paper="does not affect", low=0.85, high=1.15).reading(
            "the DenseNet keeps its mean square over 12 layers of its first stage",
            why="our reading of the word 'does not affect': within 15 % over 12 layers; more refutes it",
        ),
        expect("correlation of branch and shortcut", paper="the variance is linear", low=-0.03, high=0.03).derived(
            "at the start branch and shortcut are uncorrelated, so that variances add",
            why="1/√(512·12·3) = 0.7 %: four standard errors",
        ),
        near("variance of x - ReLU(x)", 0.5 * (1 - 1 / math.pi), share=0.01, paper="greater than 1").derived(
            "a branch that is not zero can lower the variance: f(x) = -ReLU(x) on N(0, 1)",
            why="exactly ½(1 - 1/π); a million draws leave 0.2 %",
            erratum="Var[x + f] = Var[x] + Var[f] + 2·Cov[x, f]: the output's variance must be greater only where "
            "branch and shortcut are uncorrelated, as at the start, or positively correlated",
        ),
    ),
)
@undisturbed
def sec3_2(settings: Settings) -> Measurement:
    """Moments over three kinds of skip connection, compared with closed forms. Reference: normdead, section 3.2."""
    exact = {kind: expected(kind, math.sqrt(1 / math.pi), 1.0) for kind in _KINDS}

    def measured(seed: int) -> tuple[dict[str, float], dict[str, Sequence[list[float]]]]:
        g = generator(seed)
        numbers: dict[str, float] = {}
        curves: dict[str, Sequence[list[float]]] = {}
        for kind in _KINDS:
            width = 256 if kind == "concatenation" else _WIDTH
            # As the outputs of the transform: ReLU of N(0, 2), of mean √(1/π) and mean square 1.
            moments, correlations = chained(kind, torch.relu(math.sqrt(2) * normal((_BATCH, width), g)), g)
            curves[kind] = moments
            for what, found, closed in zip(("mean", "mean square"), moments, exact[kind], strict=True):
                share = found[-1] / closed[-1]
                if kind == "sum":
                    numbers[f"{what} over closed form a block, sum"] = share ** (1 / _BLOCKS)
                else:
                    numbers[f"{what} over closed form, {kind}"] = share
            if correlations:
                numbers["correlation of branch and shortcut"] = fmean(correlations)
        growth = {kind: mean[-1] / mean[0] for kind, (mean, _) in curves.items()}
        centred = chained("concatenation", normal((_BATCH, 256), g), g)[0][0]
        x = normal((1_000_000,), g)
        stage = dense_stage(settings, seed)
        numbers |= {
            "growth of the mean, sum": growth["sum"],
            "drift of the mean, gate over sum": abs(math.log(growth["gate"]) / math.log(growth["sum"])),
            "mean of a concatenation of centred inputs": centred[-1],
            "mean square of a DenseNet's stage": stage[-1],
            "variance of x - ReLU(x)": float((x - x.relu()).var()),
        }
        return numbers, {**curves, "DenseNet, first stage": [stage]}

    numbers, curves = settings.over_seeds(measured)
    stages = {"DenseNet, first stage": means(stage for (stage,) in curves.pop("DenseNet, first stage"))}

    def drawn(which: int, title: str, extra: Mapping[str, Sequence[float]]) -> Panel:
        measured = {kind: means(moments[which] for moments in of) for kind, of in curves.items()}
        return chart(title, {**measured, **extra}, "of all numbers", "block", x=range(_BLOCKS + 1))

    def held(which: int, title: str) -> Panel:
        shares = {
            kind: means([a / b for a, b in zip(moments[which], exact[kind][which], strict=True)] for moments in of)
            for kind, of in curves.items()
        }
        return chart(title, shares, "measured over closed form", "block", log_y=False, x=range(_BLOCKS + 1))

    return Measurement(
        values=numbers,
        panels=(
            drawn(0, "mean", {}),
            drawn(1, "mean square", stages),
            held(0, "mean over its closed form"),
            held(1, "mean square over its closed form"),
        ),
        notes=(
            "inputs are ReLU of N(0, 2), the statistics of the output of the transform itself",
            "gates of bias -1 mix two signals that are not the same, so that both moments fall slowly: less of a "
            "drift than that of sums, and in the other direction",
        ),
    )


# Small branches and the correlation of gradients

_ANGLES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.1, math.pi / 2)
_DEEP, _SCALES, _PLANES = 24, (0.1, 0.3, 1.0), 32


def gradient_correlation(angle: float, beta: float | None, depth: int = _DEEP) -> float:
    """Expected cosine of the gradients at two inputs at an angle: a product over blocks of (1 + β²κ₀)/(1 + β²).

    κ₀ = 1 - θ/π is the share of ReLUs that agree, and `after` the cosine after them. Without skip connections (β None)
    the product is of κ₀ alone.

    Reference: normdead, section 3.2; Balduzzi 2017; the kernels are those of Cho & Saul 2009.
    """
    c, found = math.cos(angle), 1.0
    for _ in range(depth):
        theta = math.acos(min(1.0, c))
        agree, after = 1 - theta / math.pi, (math.sin(theta) + (math.pi - theta) * math.cos(theta)) / math.pi
        share = 1.0 if beta is None else beta**2 / (1 + beta**2)
        found *= 1 - share + share * agree
        c = (1 - share) * c + share * after
    return found


def measured_correlation(model: nn.Module, width: int, seed: int) -> list[float]:
    """Mean cosine of the gradients at one input and at others on a circle through it, each for a random output."""
    g = generator(seed + 100)
    planes = torch.linalg.qr(normal((_PLANES, width, 2), g)).Q
    angles = torch.tensor(_ANGLES, dtype=torch.float64)
    x = (planes @ torch.stack([angles.cos(), angles.sin()])).mT.reshape(-1, width).requires_grad_()
    out = model(x).view(_PLANES, len(_ANGLES), width)
    (gradient,) = torch.autograd.grad((out * normal((_PLANES, 1, width), g)).sum(), x)
    gradient = gradient.view(_PLANES, len(_ANGLES), width)
    return torch.cosine_similarity(gradient[:, :1], gradient, dim=2).mean(0).tolist()


_AT = _ANGLES.index(0.3)
_FINITE = _DEEP * 11 / 4 / 512


@claim(
    id="normdead/sec3_2_gradients",
    where="Section 3.2 (small β)",
    statement="A small factor β on the branches keeps the gradients at nearby inputs correlated.",
    paper_value="a sentence: small values for β can help to preserve correlations between gradients",
    how="Cosine of the gradients at inputs at angles of 0 to π/2 in residual MLPs of 24 branches with β = 0.1, 0.3 and "
    "1, and in an MLP of 24 layers, compared with the closed form.",
    cost=Cost(quick_seconds=6, full_seconds=20),
    precision="float64",
    quick_seeds=3,
    seeds=10,
    version=2,
    checks=(
        *(
            expect(f"cosine less its closed form, {name}", low=-_FINITE, high=_FINITE).derived(
                f"difference of the cosine from the closed form, mean over all angles, {name}",
                why="the closed form is that of infinite width; a block with β = 1 changes inner products by 11/4/512 "
                "in the mean square, so that 24 blocks shift a cosine by 24·11/4/512 = 0.13 at most",
            )
            for name in (*(f"β = {beta:g}" for beta in _SCALES), "no skip connections")
        ),
        expect("cosine at 0.3, β = 0.1", paper="preserved", low=0.9).reading(
            "with β = 0.1 gradients at an angle of 0.3 are nearly the same",
            why="our reading of the word 'preserve': a cosine of at least 0.9; less refutes it",
        ),
        expect("cosine at 0.3, β = 0.1 less β = 1", paper="small values help", low=0.35).derived(
            "cosine of gradients at an angle of 0.3, β = 0.1 less β = 1: the small one preserves more",
            why="the closed form is 0.61; less two errors of 0.13 for finite width",
        ),
        expect("cosine at 0.3, no skip connections", high=0.3).derived(
            "without skip connections gradients at an angle of 0.3 share little (the control)",
            why="the closed form is 0.17, and an error of 0.13 for finite width",
        ),
    ),
)
@undisturbed
def sec3_2_gradients(settings: Settings) -> Measurement:
    """Correlations of gradients at inputs at an angle. Reference: normdead, section 3.2; Balduzzi 2017."""
    width = 512
    specs: dict[str, tuple[str, str, float | None]] = {
        f"β = {beta:g}": (f"resmlp-{_DEEP}-{width}", f"small_branch:beta={beta:g}", beta) for beta in _SCALES
    }
    specs["no skip connections"] = (f"mlp-{_DEEP + 2}-{width}", "he_in", None)

    def measured(name: str, seed: int) -> list[float]:
        model, method, _ = specs[name]
        network = build(model, method, size=1, in_channels=width, generator=generator(seed)).double()
        return measured_correlation(network.body, width, seed)

    found = settings.over_seeds_of(specs, measured)
    exact = {name: [gradient_correlation(a, beta) for a in _ANGLES] for name, (_, _, beta) in specs.items()}
    average = {name: means(found[name]) for name in specs}
    values = {
        f"cosine less its closed form, {name}": [fmean(curve) - fmean(exact[name]) for curve in found[name]]
        for name in specs
    }
    values["cosine at 0.3, β = 0.1"] = [curve[_AT] for curve in found["β = 0.1"]]
    values["cosine at 0.3, β = 0.1 less β = 1"] = [
        a[_AT] - b[_AT] for a, b in zip(found["β = 0.1"], found["β = 1"], strict=True)
    ]
    values["cosine at 0.3, no skip connections"] = [curve[_AT] for curve in found["no skip connections"]]
    return Measurement(
        values=values,
        panels=tuple(
            chart(
                title,
                named,
                "cosine of the gradients at two inputs",
                "angle between the inputs",
                x=_ANGLES,
                log_y=False,
            )
            for title, named in (("measured", average), ("closed form", exact))
        ),
        notes=("inputs lie on a circle around 0, since without biases a scaled input has the same gradient",),
    )
