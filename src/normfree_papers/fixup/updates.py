"""The claims of `fixup` on updates: the change that one step of gradient descent makes to a network.

Reference: Zhang, Dauphin, Ma 2019, section 3, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normfree import theory
from normfree.diagnostics.updates import Updates, measure_updates
from normfree.models import build
from normfree.report.panels import Curve, Panel
from normfree_papers.claims.claim import Cost, Measurement, Settings, expect
from normfree_papers.claims.fits import exponent, means
from normfree_papers.claims.registry import claim

# Equation 5: the size of an update


_LAYERS = (2, 3)
_WIDTH = 16


def _update(settings: Settings, L: int, m: int, method: str, seed: int, which: str) -> Updates:
    """Measure one step of a residual MLP of L branches of m layers; stem, classifier and data do not depend on L."""
    model = build(
        f"resmlp-{L}-{_WIDTH}-{m}",
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
    return measure_updates(model, x, y, which=which, rates=(1e-6, 1e-4), generator=g, share_limit=0)  # type: ignore[arg-type]


@claim(
    id="fixup/eq5",
    where="Equation 5",
    statement="Branches scaled by L^(-1/(2m-2)) let one SGD step change the network by Θ(η) at any depth; the scalar "
    "biases, which the analysis leaves out, change it by Θ(ηL).",
    paper_value="‖Δf‖ = Θ(η), independent of L; nothing on the biases",
    how="One gradient step of residual MLPs of 10 to 1,000 branches in float64, with a random classifier N(0, "
    "1/fan_in), because no gradient passes the zero one.",
    cost=Cost(quick_seconds=8, full_seconds=300),
    checks=(
        *(
            check
            for m in _LAYERS
            for check in (
                expect(f"spread over depth, m = {m}", paper="Θ(1)", high=2.0).says(
                    f"‖Δf‖/η of branch weights, largest over smallest of all depths, {m} layers a branch",
                    why="earlier measurement: within a factor of 2 from 10 to 1,000 branches",
                ),
                expect(f"exponent without the scaling, m = {m}", paper="Θ(L)", low=0.9, high=1.1).says(
                    "without the factor the update grows in proportion to depth (the control)",
                    why="appendix B.1: proportional to L; earlier measurement: slope about 1",
                ),
                expect(f"exponent in η, m = {m}", paper=1.0, low=0.99, high=1.01).says(
                    "the update is proportional to η", why="first order at η of 1e-6 to 1e-4"
                ),
                expect(f"exponent of the biases, m = {m}", low=0.9, high=1.1).says(
                    "the scalars of all branches move together and change the output in proportion to depth",
                    why="earlier measurement: Θ(ηL); at a tenth of the rate 1.6 → 18.5 from 10 to 1,000 branches",
                ),
            )
        ),
    ),
)
def eq5(settings: Settings) -> Measurement:
    """The first update over depth. Reference: fixup, section 3, equation 5; appendix B, Theorems 3 and 4."""
    depths = (10, 30, 100) if settings.quick else (10, 30, 100, 300, 1000)
    values: dict[str, list[float]] = {}
    panels = []
    total, done = len(settings.seeds) * len(_LAYERS) * len(depths), 0
    for m in _LAYERS:
        curves: dict[str, list[list[float]]] = {
            "Fixup weights": [],
            "weights without L-scaling": [],
            "scalars at η": [],
        }
        slopes = []
        for seed in settings.seeds:
            scaled, unscaled, scalars, in_rate = [], [], [], []
            for L in depths:
                settings.progress(done, total, f"{L} branches of {m} layers, seed {seed}")
                done += 1
                plain = _update(settings, L, m, "fixup", seed, "branch weights")
                scaled.append(plain.per_unit)
                in_rate.append(plain.slope)
                factor = L ** (1 / (2 * m - 2))
                unscaled.append(_update(settings, L, m, f"fixup:scale={factor!r}", seed, "branch weights").per_unit)
                scalars.append(_of_scalars(_update(settings, L, m, "fixup:scalar_lr=1", seed, "branches")))
            slopes.append(math.fsum(in_rate) / len(in_rate))
            for name, curve in zip(curves, (scaled, unscaled, scalars), strict=True):
                curves[name].append(curve)
        values[f"spread over depth, m = {m}"] = [max(c) / min(c) for c in curves["Fixup weights"]]
        values[f"exponent without the scaling, m = {m}"] = [
            exponent(depths, c) for c in curves["weights without L-scaling"]
        ]
        values[f"exponent in η, m = {m}"] = slopes
        # From the second depth on: there the many scalars in the branches outweigh the few outside them.
        values[f"exponent of the biases, m = {m}"] = [exponent(depths[1:], c[1:]) for c in curves["scalars at η"]]
        panels.append(
            Panel(
                f"{m} layers a branch",
                tuple(Curve(name, means(cs)) for name, cs in curves.items()),
                "‖Δf‖/η, root mean square over inputs",
                x_label="log10 of the number of branches",
                x=tuple(math.log10(L) for L in depths),
            )
        )
    return Measurement(
        values=values,
        panels=tuple(panels),
        notes=(
            "the scalars' share is their part of the change in the direction of the whole change of the branches, with "
            "scalars at the full rate; the recipe's tenth divides it by ten at every depth",
        ),
    )


def _of_scalars(updates: Updates) -> float:
    """The part of ‖Δf‖/η that the scalars in the branches contribute, in the direction of the whole change."""
    return updates.per_unit * math.fsum(share.scalars for share in updates.shares)


# Theorem 3: the update of a network


def _forward(x: Tensor, branches: Sequence[Sequence[Tensor]], last: Tensor) -> Tensor:
    """f(x) with f_l(x) = x + ReLU(W^(m) … ReLU(W^(1) x)) and a last linear layer, as in appendix B.1."""
    for weights in branches:
        inner = x
        for weight in weights:
            inner = torch.relu(weight @ inner)
        x = x + inner
    return last @ x


def _predicted(
    x0: Tensor, branches: Sequence[Sequence[Tensor]], last: Tensor, gradient: Tensor, *, masks: bool = True
) -> Tensor:
    """-Σ_l Σ_i J_l^i ∂ℓ/∂z of equation 12, every J_l^i from its definition by matrix products.

    masks=False is the control: it ignores the ReLU masks and must disagree.
    """
    size = x0.numel()

    def active(pre: Tensor) -> Tensor:
        return torch.diag((pre > 0).to(pre) if masks else torch.ones_like(pre))

    streams, inputs, behind = [x0], [], []
    for weights in branches:
        inner, seen, masked = streams[-1], [], []
        for weight in weights:
            seen.append(inner)
            pre = weight @ inner
            masked.append(active(pre) @ weight)
            inner = torch.relu(pre)
        inputs.append(seen)
        behind.append(masked)
        streams.append(streams[-1] + inner)
    # The last block is linear: F^(1-) is its input and F^(1+) the identity.
    total = streams[-1].square().sum() * torch.eye(last.shape[0], dtype=x0.dtype)
    to_output = last  # ∂f/∂x_l transposed, from the last block back
    for seen, masked in zip(reversed(inputs), reversed(behind), strict=True):
        jacobian = torch.eye(size, dtype=x0.dtype)
        for i in reversed(range(len(masked))):
            # ∂x_l/∂pre-activation of layer i: its own ReLU, and the layers that follow.
            following = jacobian @ active(masked[i] @ seen[i])
            through = to_output @ following
            total = total + seen[i].square().sum() * through @ through.mT
            jacobian = jacobian @ masked[i]
        to_output = to_output @ (torch.eye(size, dtype=x0.dtype) + jacobian)
    return -total @ gradient


def _network(settings: Settings, L: int, m: int, seed: int) -> tuple[Tensor, list[list[Tensor]], Tensor]:
    """Draw an input, L branches of m layers of width 24 (He, times L^(-1/(2m-2))), and a classifier."""
    g = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, variance: float) -> Tensor:
        return torch.randn(rows, columns, generator=g, dtype=torch.float64).mul_(math.sqrt(variance))

    scale = theory.fixup_scale(L, m)
    branches = [[draw(24, 24, 2 / 24) * scale for _ in range(m)] for _ in range(L)]
    return torch.randn(24, generator=g, dtype=torch.float64), branches, draw(10, 24, 1 / 24)


def _step(x: Tensor, branches: list[list[Tensor]], last: Tensor, target: int, rate: float) -> tuple[Tensor, Tensor]:
    """Δf/η of one gradient step of all weights, by automatic differentiation, and ∂ℓ/∂z."""
    weights = [w.clone().requires_grad_() for layers in branches for w in layers] + [last.clone().requires_grad_()]
    m = len(branches[0])
    grouped = [weights[i : i + m] for i in range(0, len(weights) - 1, m)]
    z = _forward(x, grouped, weights[-1])
    loss = torch.nn.functional.cross_entropy(z.unsqueeze(0), torch.tensor([target]))
    gradients = torch.autograd.grad(loss, weights)
    moved = [(w - rate * g).detach() for w, g in zip(weights, gradients, strict=True)]
    after = _forward(x, [moved[i : i + m] for i in range(0, len(moved) - 1, m)], moved[-1])
    probabilities = z.detach().softmax(0)
    probabilities[target] -= 1
    return (after - z.detach()) / rate, probabilities


@claim(
    id="fixup/thm3",
    where="Theorem 3",
    statement="One gradient step changes the network by -η ΣΣ J ∂ℓ/∂z with positive semi-definite J, so the branches "
    "move it in one direction and add up.",
    paper_value="Δf = -η Σ_l Σ_i J_l^i ∂ℓ/∂z + O(η²)",
    how="Networks of the theorem's form in float64: the step by automatic differentiation beside every J_l^i computed "
    "from its definition.",
    cost=Cost(quick_seconds=1, full_seconds=5),
    seeds=5,
    quick_seeds=2,
    checks=(
        expect("deviation at η = 1e-8", paper=0.0, high=1e-5).says(
            "relative distance between the measured change and the formula",
            why="O(η) of the change: 1e-8 times a curvature of order 100, and rounding of 1e-16/1e-8",
        ),
        expect("exponent of the deviation", paper=1.0, low=0.9, high=1.1).says(
            "the remainder of Δf/η is O(η)",
            why="the remainder is O(η²) in Δf as long as no unit switches, so from η = 1e-7 to 1e-5; at 1e-3 some do",
        ),
        expect("deviation without the ReLUs' masks", low=0.1).says(
            "the formula without the diagonal matrices of active units is wrong (the control)",
            why="half of all units are off, so a product without masks is off by a factor, not by rounding",
        ),
    ),
)
def thm3(settings: Settings) -> Measurement:
    """One step of a network beside the sum of its J ∂ℓ/∂z. Reference: fixup, appendix B.1, Theorem 3, equation 12."""
    rates = tuple(10.0**-k for k in range(3, 9))
    deviations: dict[tuple[int, int], list[list[float]]] = {}
    control: list[float] = []
    shapes = ((3, 2), (10, 2), (6, 3)) if settings.quick else ((3, 2), (10, 2), (30, 2), (6, 3), (20, 3))
    for seed in settings.each_seed():
        for L, m in shapes:
            x, branches, last = _network(settings, L, m, seed)
            curve = []
            for rate in rates:
                change, gradient = _step(x, branches, last, seed % 10, rate)
                expected = _predicted(x, branches, last, gradient)
                curve.append(float((change - expected).norm() / expected.norm()))
            deviations.setdefault((L, m), []).append(curve)
        unmasked = _predicted(x, branches, last, gradient, masks=False)
        control.append(float((change - unmasked).norm() / change.norm()))
    worst = [max(curves[s][-1] for curves in deviations.values()) for s in range(len(settings.seeds))]
    slopes = [
        math.fsum(exponent(rates[2:5], curves[s][2:5]) for curves in deviations.values()) / len(deviations)
        for s in range(len(settings.seeds))
    ]
    return Measurement(
        values={
            "deviation at η = 1e-8": worst,
            "exponent of the deviation": slopes,
            "deviation without the ReLUs' masks": control,
        },
        panels=(
            Panel(
                "distance of Δf/η from the formula",
                tuple(
                    Curve(f"{L} branches of {m} layers", tuple(sum(c) / len(c) for c in zip(*curves, strict=True)))
                    for (L, m), curves in deviations.items()
                ),
                "relative to ‖Δf‖/η",
                x_label="-log10 η",
                x=tuple(-math.log10(rate) for rate in rates),
            ),
        ),
    )


# Theorem 4: the update of a scalar branch


@claim(
    id="fixup/thm4",
    where="Theorem 4",
    statement="A scalar branch a_1 ⋯ a_m x moves by Θ(η/L) in a step exactly when the product of all but its smallest "
    "factor is Θ(1/√L).",
    paper_value="ΔF = Θ(η/L) ⟺ (Π_{k≠j} a_k) x = Θ(1/√L)",
    how="L·|ΔF|/η of scalar branches for L from 10 to 10⁶ by an actual step, for factors that satisfy the condition "
    "and for factors that do not.",
    cost=Cost(quick_seconds=1, full_seconds=1),
    seeds=1,
    quick_seeds=1,
    checks=(
        expect("spread where the condition holds", paper="Θ(1)", high=5.001).says(
            "L·|ΔF|/η, largest over smallest of all L and m, all factors L^(-1/(2m-2)) or the last one 0",
            why="equation 19: between 1 and m times the same number, m at most 5; a thousandth for the step's η",
        ),
        expect("exponent where factors are 1", paper="Θ(L)", low=0.99, high=1.01).says(
            "with all factors 1 the same number grows in proportion to L (the control)",
            why="|ΔF|/η is m for every L, so L·|ΔF|/η is m·L",
        ),
        expect("exponent where factors are too small", paper="less than Θ(1)", low=-1.01, high=-0.99).says(
            "with the factor L^(-1/(2m-2)) squared, the branch moves too little (the other direction)",
            why="the product of m - 1 factors is then 1/L, its square 1/L², and L times that 1/L",
        ),
        expect("deviation of the step from equation 17", paper=0.0, high=1e-4).says(
            "the actual step agrees with F² Σ 1/a_i² to first order", why="η = 1e-6 leaves terms of order η"
        ),
    ),
)
def thm4(settings: Settings) -> Measurement:
    """How far a step moves a scalar branch, over L. Reference: fixup, appendix B.2, Theorem 4, equations 15 to 21."""
    depths = tuple(10.0**k for k in range(1, 7))
    rate = 1e-6
    good: dict[str, list[float]] = {}
    off: list[float] = []
    large: list[list[float]] = []
    small: list[list[float]] = []
    for m in (2, 3, 4, 5):
        rows: tuple[list[float], ...] = ([], [], [], [])
        for L in depths:
            a = L ** (-1 / (2 * m - 2))
            for row, factors in zip(rows, ([a] * m, [a] * (m - 1) + [0.0], [1.0] * m, [a * a] * m), strict=True):
                measured = _scalar_step(factors, rate) / rate
                row.append(L * measured)
                off.append(abs(measured / theory.scalar_branch_update(factors) - 1))
        good[f"all {m} factors equal"], good[f"last of {m} factors 0"] = rows[0], rows[1]
        large.append(rows[2])
        small.append(rows[3])
    numbers = [value for curve in good.values() for value in curve]
    curves = {**good, "all 1 (control)": large[0], "too small (control)": small[0]}
    return Measurement(
        values={
            "spread where the condition holds": max(numbers) / min(numbers),
            "exponent where factors are 1": sum(exponent(depths, c) for c in large) / len(large),
            "exponent where factors are too small": sum(exponent(depths, c) for c in small) / len(small),
            "deviation of the step from equation 17": max(off),
        },
        panels=(
            Panel(
                "how far a scalar branch moves",
                tuple(Curve(name, tuple(curve)) for name, curve in curves.items()),
                "L · |ΔF|/η",
                x_label="log10 of L",
                x=tuple(math.log10(L) for L in depths),
            ),
        ),
    )


def _scalar_step(factors: Sequence[float], rate: float) -> float:
    """|ΔF| of one actual step of F = Π a_i at x = 1 with ∂ℓ/∂F = 1."""
    gradients = [math.prod(factors[:i] + factors[i + 1 :]) for i in range(len(factors))]  # type: ignore[operator]
    return abs(math.prod(a - rate * g for a, g in zip(factors, gradients, strict=True)) - math.prod(factors))
