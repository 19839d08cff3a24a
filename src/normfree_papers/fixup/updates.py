"""The claims of `fixup` on updates: the change that one step of gradient descent makes to a network.

Reference: Zhang, Dauphin, Ma 2019, section 3, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from normfree.diagnostics.updates import Updates, measure_updates
from normfree.models import build
from normfree.report.panels import Panel
from normfree_papers.claims.claim import Cost, Measurement, Settings, claim, expect
from normfree_papers.claims.depth_curves import chart, exponent, means

# Equation 5: the size of an update


_LAYERS = (2, 3)
Curves = dict[str, list[list[float]]]  # by name, one per seed
_SCALARS = 1e6  # the rate of the scalars over that of the weights, at which the scalars alone change the output


def _update(
    settings: Settings, L: int, m: int, method: str, seed: int, which: str, rates: tuple[float, float] = (1e-6, 1e-4)
) -> Updates:
    """Measure one step of a residual MLP of L branches of m layers; stem, classifier and data do not depend on L."""
    width = 256 if settings.quick else 64  # the shorter range of depths needs a smaller sampling error
    model = build(
        f"resmlp-{L}-{width}-{m}",
        method,
        form="pre",
        size=4,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
        device=settings.device,
    )
    g = torch.Generator().manual_seed(1000 + seed)
    x, y = torch.randn(64, 48, generator=g, dtype=torch.float64), torch.randint(10, (64,), generator=g)
    x, y = x.to(settings.device), y.to(settings.device)
    return measure_updates(model, x, y, which=which, rates=rates, generator=g, share_limit=0)  # type: ignore[arg-type]


@claim(
    id="fixup/eq5",
    where="Equation 5",
    statement="Branches scaled by L^(-1/(2m-2)) let one SGD step change the network by Θ(η) at any depth; the scalar "
    "biases, which the analysis leaves out, change it by Θ(ηL).",
    paper_value="‖Δf‖ = Θ(η), independent of L; nothing on the biases",
    how="One gradient step of residual MLPs of 10 to 1,000 branches in float64, with a random classifier N(0, "
    "1/fan_in), because no gradient passes the zero one.",
    cost=Cost(quick_seconds=45, full_seconds=300),
    quick_seeds=3,
    precision="float64",
    departures=("a random classifier in place of zeros, which pass no gradient in the first step",),
    version=2,
    checks=(
        *(
            check
            for m in _LAYERS
            for check in (
                expect(f"exponent in L, m = {m}", paper=0.0, low=-0.1, high=0.1).derived(
                    f"‖Δf‖/η of branch weights is Θ(1) in depth, {m} layers a branch",
                    why="equation 5: L branches of η/L each, whose mean varies by √(5(m - 1)/(nL)) at width n = 64, so "
                    "that the slope varies by 0.02; m in place of m - 1 in the exponent would give 1/m",
                ),
                expect(f"exponent without the scaling, m = {m}", paper=1.0, low=0.9, high=1.1).derived(
                    "without the factor the update grows in proportion to depth (the control)",
                    why="appendix B.1: proportional to L; the slope varies as above",
                ),
                expect(f"exponent in η, m = {m}", paper=1.0, low=0.99, high=1.01).derived(
                    "the update is proportional to η",
                    why="first order: the next term is η = 1e-4 times a curvature of order 1 to 100",
                ),
                expect(f"exponent of the biases, m = {m}", low=0.99, high=1.01).derived(
                    "the scalars of all branches move together and change the output in proportion to depth",
                    why="all branches start at 0, so that the last bias of each adds the same vector to the stream: L "
                    "times that of one; the weights' share at this rate of the scalars is below 1e-5",
                ),
            )
        ),
    ),
)
def eq5(settings: Settings) -> Measurement:
    """The first update over depth. Reference: fixup, section 3, equation 5; appendix B, Theorems 3 and 4."""

    def measured(m: int, seed: int, L: int) -> dict[str, float]:
        plain = _update(settings, L, m, "fixup", seed, "branch weights")
        unscaled = f"fixup:scale={L ** (1 / (2 * m - 2))!r}"
        return {
            "Fixup weights": plain.per_unit,
            "weights without L-scaling": _update(settings, L, m, unscaled, seed, "branch weights").per_unit,
            "scalars at η": _of_scalars(settings, L, m, seed),
            "slope": plain.slope,
        }

    depths, values, panels = _depths(settings), {}, []
    for m, curves in _over_depth(settings, measured).items():
        slopes = curves.pop("slope")
        exponents = {name: [exponent(depths, curve) for curve in of] for name, of in curves.items()}
        values[f"exponent in L, m = {m}"] = exponents["Fixup weights"]
        values[f"exponent without the scaling, m = {m}"] = exponents["weights without L-scaling"]
        values[f"exponent in η, m = {m}"] = [math.fsum(of) / len(of) for of in slopes]
        values[f"exponent of the biases, m = {m}"] = exponents["scalars at η"]
        panels.append(_panel(m, depths, curves))
    return Measurement(
        values=values,
        panels=tuple(panels),
        notes=("the scalars' curve is for the full rate; the recipe's tenth divides it by ten at every depth",),
    )


def _depths(settings: Settings) -> tuple[int, ...]:
    return (10, 30, 100) if settings.quick else (10, 30, 100, 300, 1000)


def _over_depth(settings: Settings, measured: Callable[[int, int, int], dict[str, float]]) -> dict[int, Curves]:
    """The numbers that a function of m, seed and L returns, by m and name: one curve over the depths per seed."""
    found: dict[int, dict[str, dict[int, list[float]]]] = {}
    axes = (_LAYERS, settings.seeds, _depths(settings))
    for m, seed, L in settings.each("{2} branches of {0} layers, seed {1}", *axes):
        for name, number in measured(m, seed, L).items():
            found.setdefault(m, {}).setdefault(name, {}).setdefault(seed, []).append(number)
    return {m: {name: list(of.values()) for name, of in curves.items()} for m, curves in found.items()}


def _panel(m: int, depths: Sequence[int], curves: Curves) -> Panel:
    averages = {name: means(of) for name, of in curves.items()}
    label = "‖Δf‖/η, root mean square over inputs"
    return chart(f"{m} layers a branch", averages, label, "branches", x=depths, log_x=True)


def _of_scalars(settings: Settings, L: int, m: int, seed: int) -> float:
    """‖Δf‖/η of the scalars in the branches alone.

    The weights learn a million times more slowly than the scalars, so that their part of the change vanishes.
    """
    rates = (1e-6 / _SCALARS, 1e-4 / _SCALARS)
    return _update(settings, L, m, f"fixup:scalar_lr={_SCALARS:g}", seed, "branches", rates).per_unit / _SCALARS


# The options after equation 5

_BOTH = {"last layers 0": "fixup", "all layers scaled": "fixup:zero_last=false"}


@claim(
    id="fixup/eq5_options",
    where="Section 3, after equation 5",
    statement="Scaling all layers of a branch by L^(-1/(2m-2)) satisfies equation 5 as well as setting the last layer "
    "to 0: one SGD step changes the network by Θ(η) either way.",
    paper_value="a_i = L^(-1/(2m-2)) for all i, or for all but a_m = 0; the update lies between 1 and m times the same "
    "number (equation 19)",
    how="One gradient step of residual MLPs of 10 to 1,000 branches, as for equation 5, with fixup:zero_last=false "
    "beside fixup.",
    cost=Cost(quick_seconds=30, full_seconds=200),
    quick_seeds=3,
    precision="float64",
    departures=("a random classifier in place of zeros, which pass no gradient in the first step",),
    checks=tuple(
        check
        for m in _LAYERS
        for check in (
            expect(f"exponent in L, all layers scaled, m = {m}", paper=0.0, low=-0.1, high=0.1).derived(
                f"with all layers scaled, ‖Δf‖/η of branch weights is Θ(1) in depth, {m} layers a branch",
                why="equation 5 with the sampling error of fixup/eq5; twice the exponent in the last layer would give "
                f"-{1 / (m - 1):g}, none 1",
            ),
            expect(f"all scaled over last 0, m = {m}", paper=f"1 to {m}", low=1.0, high=float(m) * 1.1).derived(
                "the update with all layers scaled, over that with the last ones 0, at the largest depth",
                why="equation 19: between 1 and m; a tenth for the sampling error at width 64",
            ),
        )
    ),
)
def eq5_options(settings: Settings) -> Measurement:
    """The first update with both options for the last layer. Reference: fixup, section 3, after equation 5."""

    def measured(m: int, seed: int, L: int) -> dict[str, float]:
        return {
            name: _update(settings, L, m, method, seed, "branch weights").per_unit for name, method in _BOTH.items()
        }

    depths, values, panels = _depths(settings), {}, []
    for m, curves in _over_depth(settings, measured).items():
        zero, scaled = curves.values()
        values[f"exponent in L, all layers scaled, m = {m}"] = [exponent(depths, c) for c in scaled]
        values[f"all scaled over last 0, m = {m}"] = [b[-1] / a[-1] for a, b in zip(zero, scaled, strict=True)]
        panels.append(_panel(m, depths, curves))
    return Measurement(values=values, panels=tuple(panels))
