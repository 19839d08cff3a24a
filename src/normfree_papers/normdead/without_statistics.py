"""The claim of `normdead` on normalizing without statistics: weight norm, spectral norm, SELU and similar methods.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 2.3.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from normfree import theory
from normfree.models import build
from normfree.nn.normalizers import SELU, NormPropReLU
from normfree.nn.weight_layers import SpectralNormLinear, WeightNormLinear
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, claim, expect, near
from normfree_papers.claims.depth_curves import chart, means
from normfree_papers.normdead.float64_draws import generator, normal, rounding, undisturbed

_DRAWS, _DEPTH, _WIDTH, _BATCH = 1_000_000, 32, 512, 256
_STARTS = {"mean 0, variance 4": (0.0, 4.0), "mean 0, variance 0.1": (0.0, 0.1), "mean 1, variance 1": (1.0, 1.0)}
_ITERATIONS = (1, 2, 3, 5, 10, 20, 50, 100)


def power_estimates(seed: int) -> list[float]:
    """The estimated over the true largest singular value, by number of power iterations."""
    layer = SpectralNormLinear(64, 48, bias=False).double().eval()
    g = generator(seed)
    with torch.no_grad():
        layer.weight.copy_(normal((48, 64), g))
        layer.left.copy_(nn.functional.normalize(normal((48,), g), dim=0))
    exact = float(torch.linalg.svdvals(layer.weight.detach())[0])
    found, done = [], 0
    for steps in _ITERATIONS:
        layer.power_iteration_(steps - done)
        done = steps
        scale = float(layer.weight.detach().norm() / layer.effective_weight().detach().norm())
        found.append(scale / exact)
    return found


@torch.no_grad()
def layer_moments(method: str, start: tuple[float, float], seed: int) -> tuple[list[float], list[float]]:
    """Mean and variance of all numbers after each activation of an MLP, for inputs of given mean and variance."""
    g = generator(seed)
    model = build(f"mlp-{_DEPTH + 1}-{_WIDTH}", method, size=1, in_channels=_WIDTH, generator=g).double()
    x = start[0] + math.sqrt(start[1]) * normal((_BATCH, _WIDTH), g)
    found: tuple[list[float], list[float]] = ([float(x.mean())], [float(x.var())])
    for module in (*model.stem.children(), *model.body.children()):
        x = module(x)
        if not isinstance(module, nn.Linear | nn.Flatten):
            found[0].append(float(x.mean()))
            found[1].append(float(x.var()))
    return found


def fixed_point(square: float, layers: int = 100) -> float:
    """The mean square after SELU and many layers with weights of mean 0 and variance 1/fan_in, by quadrature."""
    for _ in range(layers):
        square = theory.moments("selu", math.sqrt(square)).second
    return square


@claim(
    id="normdead/sec2_3_moments",
    where="Section 2.3 (without statistics)",
    statement="Weight norm gives unit rows, normalization propagation mean 0 and variance 1 after ReLU, spectral norm "
    "a largest singular value of about 1, and SELU an attracting fixed point.",
    paper_value="no numbers; each check quotes the paper",
    how="The layers' effective weights, a million draws through the activations, and MLPs of 32 layers from inputs of "
    "wrong mean and variance.",
    cost=Cost(quick_seconds=4, full_seconds=14),
    precision="float64",
    quick_seeds=3,
    seeds=10,
    checks=(
        rounding("row norm less 1, weight norm", "weight vectors have unit norm, largest difference"),
        near("mean, normalization propagation", 0.0, 0.004, paper=0.0).derived(
            "normalization propagation: after a unit row and its ReLU the mean is 0",
            why="a million draws of deviation 1: four standard errors",
        ),
        near("variance, normalization propagation", 1.0, 0.01, paper=1.0).derived(
            "normalization propagation: after a unit row and its ReLU the variance is 1",
            why="a million draws of kurtosis below 6: four standard errors",
        ),
        near("variance behind ReLU, weight norm", 0.5 * (1 - 1 / math.pi), 0.004, paper="in contrast to WN").derived(
            "weight norm alone does not account for ReLU (the control)", why="½(1 - 1/π); four standard errors"
        ),
        expect(
            "estimate over largest singular value, 100 iterations", paper="an approximation", low=0.98, high=1.02
        ).reading(
            "spectral norm divides by about the largest singular value",
            why="our reading of the word 'approximation': within two percent after 100 iterations; more refutes it",
        ),
        aside(
            "estimate over largest singular value, 1 iteration", paper="an approximation", low=0.5, high=0.98
        ).derived(
            "one iteration does not reach the largest singular value (the control)",
            why="a random start is spread over all singular vectors, so one step gives √(E[λ²]/E[λ]) of the squared "
            "singular values: 0.71 of the largest for a random 48×64 matrix (Marchenko–Pastur)",
        ),
        expect("off the fixed point after 100 layers", paper="attracting fixed points", high=1e-6).derived(
            "the mean square of SELU layers goes to 1 from 0.1 and from 4, by quadrature",
            why="the map contracts by 0.78 near 1: 0.78^100 = 2e-11 and rounding of constants",
            exact=True,
        ),
        *(
            near(f"variance after 32 SELU layers, {start}", 1.0, 0.3, paper=1.0).derived(
                f"the variance goes to 1 in a network of width 512, from {start}",
                why="√(2/512) = 6 % per layer, of which a contraction of 0.78 leaves 10 %, and 2 seeds 7 %: four "
                "standard errors",
            )
            for start in _STARTS
        ),
        expect("largest |mean| after 32 SELU layers", paper=0.0, high=0.15).derived(
            "the mean of SELU layers goes to 0 in a network of width 512",
            why="1/√512 = 4 % per layer; the largest of three starts stays below three of them with room",
        ),
        near("mean square from variance 4 over that from 0.1, ReLU", 40.0, 1e-6).derived(
            "ReLU without biases hands a scale on: no fixed point attracts (the control)",
            why="exact, since the layers are homogeneous and the draws the same; rounding",
        ),
        near("variance behind alpha dropout", 1.0, 0.01, paper="does not interfere").derived(
            "dropout made for SELU keeps variance 1", why="a million draws: four standard errors"
        ),
        near("variance behind plain dropout", 1 / 0.9, 0.01).derived(
            "plain dropout of 10 % does not (the control)", why="1/(1 - p); four standard errors"
        ),
    ),
)
@undisturbed
def sec2_3_moments(settings: Settings) -> Measurement:
    """Moments after weight and spectral norm, normalization propagation and SELU. Reference: normdead, section 2.3."""
    numbers, curves = settings.over_seeds(_measured)
    estimates = curves.pop("estimate")
    return Measurement(
        values=numbers,
        panels=(
            chart(
                "variance over an MLP",
                {name: means(of) for name, of in curves.items()},
                "of all numbers",
                "layer",
                x=range(_DEPTH + 1),
            ),
            chart(
                "spectral norm's estimate",
                {"estimate": means(estimates)},
                "over the largest singular value",
                "power iterations",
                x=_ITERATIONS,
                log_x=True,
                log_y=False,
            ),
        ),
        notes=(
            "normalization propagation is measured with rows of norm 1; the authors' network, and the method here, "
            "divide them by 1.21 for the sake of the Jacobian",
        ),
    )


def _measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The numbers of one draw, the variance after every layer of MLPs, and the estimates by power iterations."""
    g = generator(seed)
    layer = WeightNormLinear(100, 50, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(5 * normal((50, 100), g) + 1)
    rows = layer.effective_weight().detach()
    # 50 rows with 20,000 inputs each: rows of unit norm have outputs from N(0, 1).
    z = (normal((_DRAWS // 50, 100), g) @ rows.T).flatten()
    propagated = NormPropReLU()(z)
    estimates = power_estimates(seed)
    selu = {start: layer_moments("selu", moments, seed) for start, moments in _STARTS.items()}
    relu = {start: layer_moments("he_in", _STARTS[start], seed) for start in list(_STARTS)[:2]}
    squares = [variance[-1] * (1 - 1 / (_BATCH * _WIDTH)) + mean[-1] ** 2 for mean, variance in relu.values()]
    activated = SELU()(normal((_DRAWS,), g))
    torch.default_generator.manual_seed(seed + 10_000)  # dropout takes no generator
    dropped = SELU(0.1).train()(normal((_DRAWS,), g))
    plain = nn.functional.dropout(activated, 0.1)
    numbers = {
        "row norm less 1, weight norm": float((rows.norm(dim=1) - 1).abs().max()),
        "mean, normalization propagation": float(propagated.mean()),
        "variance, normalization propagation": float(propagated.var()),
        "variance behind ReLU, weight norm": float(z.relu().var()),
        "estimate over largest singular value, 100 iterations": estimates[-1],
        "estimate over largest singular value, 1 iteration": estimates[0],
        "off the fixed point after 100 layers": max(abs(fixed_point(start) - 1) for start in (0.1, 4.0)),
        **{f"variance after 32 SELU layers, {start}": variance[-1] for start, (_, variance) in selu.items()},
        "largest |mean| after 32 SELU layers": max(abs(mean[-1]) for mean, _ in selu.values()),
        "mean square from variance 4 over that from 0.1, ReLU": squares[0] / squares[1],
        "variance behind alpha dropout": float(dropped.var()),
        "variance behind plain dropout": float(plain.var()),
    }
    networks = (("SELU", selu), ("ReLU", relu))
    curves = {f"{name}, {start}": variance for name, of in networks for start, (_, variance) in of.items()}
    return numbers, {**curves, "estimate": estimates}
