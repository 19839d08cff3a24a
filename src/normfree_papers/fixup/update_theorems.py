"""The theorems of `fixup` on updates: the sum over branches, and the scalar branch.

Reference: Zhang, Dauphin, Ma 2019, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normfree import theory
from normfree.diagnostics.updates import measure_updates
from normfree.models import build
from normfree.plan import Layer
from normfree_papers.claims.claim import Cost, Measurement, Settings, claim, expect
from normfree_papers.claims.depth_curves import chart, exponent, means

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

    streams, inputs, layers = [x0], [], []
    for weights in branches:
        inner, seen, masked = streams[-1], [], []
        for weight in weights:
            seen.append(inner)
            pre = weight @ inner
            masked.append(active(pre) @ weight)
            inner = torch.relu(pre)
        inputs.append(seen)
        layers.append(masked)
        streams.append(streams[-1] + inner)
    # The last block is linear: F^(1-) is its input and F^(1+) the identity.
    total = streams[-1].square().sum() * torch.eye(last.shape[0], dtype=x0.dtype)
    to_output = last  # ∂f/∂x_l transposed, from the last block back
    for seen, masked in zip(reversed(inputs), reversed(layers), strict=True):
        jacobian = torch.eye(size, dtype=x0.dtype)
        for i in reversed(range(len(masked))):
            # ∂x_l/∂pre-activation of layer i: its own ReLU, and the layers that follow.
            following = jacobian @ active(masked[i] @ seen[i])
            through = to_output @ following
            total = total + seen[i].square().sum() * through @ through.mT
            jacobian = jacobian @ masked[i]
        to_output = to_output @ (torch.eye(size, dtype=x0.dtype) + jacobian)
    return -total @ gradient


def _network(L: int, m: int, seed: int) -> tuple[Tensor, list[list[Tensor]], Tensor]:
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


def library_deviation(L: int, m: int, seed: int) -> float:
    """Relative distance of ‖Δf‖/η, as `measure_updates` measures it for a step of all weights, from ‖ΣΣ J ∂ℓ/∂z‖.

    A layer with input a and Jacobian P from its output to the logits has J = ‖a‖² P Pᵀ; its bias adds P Pᵀ.
    """
    g = torch.Generator().manual_seed(seed)
    method = "fixup:bias=false,multiplier=false,zero_last=false,zero_classifier=false,scalar_lr=1"
    shape: dict[str, Any] = {"form": "pre", "size": 1, "in_channels": 24, "dtype": torch.float64}
    model = build(f"resmlp-{L}-24-{m}", method, generator=g, **shape)
    x, y = torch.randn(1, 24, generator=g, dtype=torch.float64), torch.tensor([seed % 10])
    sizes, outputs = [], []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(float(inputs[0].detach().square().sum()) + (getattr(module, "bias", None) is not None))
        outputs.append(output)

    hooks = [model.get_submodule(layer.name).register_forward_hook(note) for layer in model.plan.layers()]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    rows = [torch.autograd.grad(logit, outputs, retain_graph=True) for logit in logits[0]]
    total = torch.zeros(logits.shape[1], logits.shape[1], dtype=torch.float64)
    for size, column in zip(sizes, zip(*rows, strict=True), strict=True):
        jacobian = torch.cat(column)
        total += size * jacobian @ jacobian.mT
    slope = logits[0].detach().softmax(0) - nn.functional.one_hot(y[0], logits.shape[1])
    expected = float((total @ slope).norm())
    found = measure_updates(model, x, y, which="all", rates=(1e-8, 1e-7), classifier="keep", share_limit=0)
    return abs(found.per_unit / expected - 1)


@claim(
    id="fixup/thm3",
    where="Theorem 3",
    statement="One gradient step changes the network by -η ΣΣ J ∂ℓ/∂z with positive semi-definite J, so the branches "
    "move it in one direction and add up.",
    paper_value="Δf = -η Σ_l Σ_i J_l^i ∂ℓ/∂z + O(η²)",
    how="Networks of the theorem's form in float64: the step by automatic differentiation beside every J_l^i computed "
    "from its definition; and residual MLPs of the library, measured by measure_updates.",
    cost=Cost(quick_seconds=1, full_seconds=5),
    seeds=5,
    quick_seeds=3,
    precision="float64",
    version=2,
    checks=(
        expect("deviation at η = 1e-8", paper=0.0, high=1e-5).derived(
            "relative distance between the measured change and the formula",
            why="O(η) of the change: 1e-8 times a curvature of order 100, and rounding of 1e-16/1e-8",
            exact=True,
        ),
        expect("exponent of the deviation", paper=1.0, low=0.9, high=1.1).derived(
            "the remainder of Δf/η is O(η)",
            why="the remainder is O(η²) in Δf as long as no unit switches, so from η = 1e-7 to 1e-5; at 1e-3 some do; "
            "O(√η) or O(η²) would be 0.5 or 2",
        ),
        expect("deviation of the library's measurement", paper=0.0, high=1e-4).derived(
            "the same for ‖Δf‖ of one step as `measure_updates` has it, on residual MLPs of the library",
            why="O(η) at η = 1e-8 times a curvature of order 100, with room for a hundred times that",
            exact=True,
        ),
        expect("deviation without the ReLUs' masks", low=0.1).derived(
            "the formula without the diagonal matrices of active units is wrong (the control)",
            why="half of all units are off, so a product without masks is off by a factor, not by rounding",
            exact=True,
        ),
    ),
)
def thm3(settings: Settings) -> Measurement:
    """One step of a network beside the sum of its J ∂ℓ/∂z. Reference: fixup, appendix B.1, Theorem 3, equation 12."""
    rates = tuple(10.0**-k for k in range(3, 9))
    shapes = ((3, 2), (10, 2), (6, 3)) if settings.quick else ((3, 2), (10, 2), (30, 2), (6, 3), (20, 3))

    def measured(seed: int) -> tuple[dict[str, float], dict[tuple[int, int], list[float]]]:
        curves: dict[tuple[int, int], list[float]] = {}
        for L, m in shapes:
            x, branches, last = _network(L, m, seed)
            deviations = curves[L, m] = []
            for rate in rates:
                change, gradient = _step(x, branches, last, seed % 10, rate)
                expected = _predicted(x, branches, last, gradient)
                deviations.append(float((change - expected).norm() / expected.norm()))
        unmasked = _predicted(x, branches, last, gradient, masks=False)
        slopes = [exponent(rates[2:5], curve[2:5]) for curve in curves.values()]
        numbers = {
            "deviation at η = 1e-8": max(curve[-1] for curve in curves.values()),
            "exponent of the deviation": math.fsum(slopes) / len(slopes),
            "deviation of the library's measurement": max(library_deviation(L, m, seed) for L, m in shapes),
            "deviation without the ReLUs' masks": float((change - unmasked).norm() / change.norm()),
        }
        return numbers, curves

    numbers, curves = settings.over_seeds(measured)
    return Measurement(
        values=numbers,
        panels=(
            chart(
                "distance of Δf/η from the formula",
                {f"{L} branches of {m} layers": means(of)[::-1] for (L, m), of in curves.items()},
                "relative to ‖Δf‖/η",
                "learning rate η",
                x=rates[::-1],
                log_x=True,
            ),
        ),
    )


# Theorem 4: the update of a scalar branch

_LAYERS = (2, 3, 4, 5)
_BRANCHES = (10, 100, 1000)  # of the library's networks


def _over_he(model: nn.Module, layer: Layer) -> float:
    """The mean square of a layer's weights, relative to that of He's weights, 2/fan_out."""
    weight = model.get_submodule(layer.name).weight
    assert isinstance(weight, Tensor)
    fan_out = weight.numel() // weight.shape[1]
    return float(weight.detach().double().square().mean()) * fan_out / 2


def layer_factors(L: int, m: int, width: int, seed: int) -> list[float]:
    """The factors a_1 … a_m of the library's Fixup: root mean squares of its weights over those of He's weights.

    They average over all L branches of a residual MLP, so that the standard error is 1/√(2·L·width²).
    """
    generator = torch.Generator().manual_seed(seed)
    model = build(f"resmlp-{L}-{width}-{m}", "fixup", form="pre", size=1, in_channels=8, generator=generator)
    rows = [[_over_he(model, layer) for layer in branch.layers] for branch in model.plan.branches]
    return [math.sqrt(sum(column) / L) for column in zip(*rows, strict=True)]


def bottleneck_factor(seed: int) -> float:
    """√L·a_1·a_2 of the library's Fixup in ResNet-50, whose layers change the width: a_i relative to He fan-out."""
    model = build("resnet50", "fixup", generator=torch.Generator().manual_seed(seed))
    squares = [math.prod(_over_he(model, layer) for layer in branch.layers[:-1]) for branch in model.plan.branches]
    return math.sqrt(len(squares)) * sum(map(math.sqrt, squares)) / len(squares)


def _others(factors: Sequence[float]) -> float:
    """The product of all factors but the smallest."""
    return math.prod(sorted(factors)[1:])


@claim(
    id="fixup/thm4",
    where="Theorem 4",
    statement="A scalar branch a_1 ⋯ a_m x moves by Θ(η/L) in a step exactly when the product of all but its smallest "
    "factor is Θ(1/√L), as it is in the library's Fixup.",
    paper_value="ΔF = Θ(η/L) ⟺ (Π_{k≠j} a_k) x = Θ(1/√L)",
    how="L·|ΔF|/η of scalar branches for L from 10 to 10⁶ by an actual step, for factors that satisfy the condition "
    "and for factors that do not; and the factors of the weights that method fixup gives to residual MLPs of 10 to "
    "1,000 branches.",
    cost=Cost(quick_seconds=4, full_seconds=20),
    seeds=5,
    quick_seeds=3,
    precision="float64; the library's weights float32",
    version=2,
    checks=(
        *(
            check
            for m in _LAYERS
            for check in (
                expect(f"exponent of the other factors, m = {m}", paper=-0.5, low=-0.51, high=-0.49).derived(
                    f"the product of all but the smallest factor of the library's Fixup falls as 1/√L, {m} layers",
                    why="the theorem's condition; factors of 10·32² weights have standard errors of 0.7 %, which is "
                    "at most 0.003 in the exponent from 10 to 1,000 branches",
                ),
                expect(f"L·|ΔF|/η of the library's factors, m = {m}", paper="Θ(1)", low=0.95, high=1.05).derived(
                    "a scalar branch with these factors moves by η/L at every depth, the mean over depths",
                    why="equation 17 with the last factor 0: L·(Π_{k≠m} a_k)² = 1, twice the errors of m - 1 factors",
                ),
            )
        ),
        expect("√L times the other factors, ResNet-50", paper="Θ(1)", low=0.97, high=1.03).derived(
            "the same in ResNet-50, whose layers change the width: the factors are relative to He fan-out",
            why="rule 2 on He's weights, fan-out as in the authors' code; 4,096 weights or more a layer leave 1 %; "
            "fan-in would give about 0.5, since the first layer divides the width by four",
        ),
        expect("spread where the condition holds", paper="Θ(1)", high=5.001).derived(
            "L·|ΔF|/η, largest over smallest of all L and m, all factors `fixup_scale` or the last one 0",
            why="equation 19: between 1 and m times the same number, m at most 5; a thousandth for the step's η",
            exact=True,
        ),
        expect("exponent where factors are 1", paper="Θ(L)", low=0.99, high=1.01).derived(
            "with all factors 1 the same number grows in proportion to L (the control)",
            why="|ΔF|/η is m for every L, so L·|ΔF|/η is m·L",
            exact=True,
        ),
        expect("exponent where factors are too small", paper="less than Θ(1)", low=-1.01, high=-0.99).derived(
            "with `fixup_scale` squared, the branch moves too little (the other direction)",
            why="the product of m - 1 factors is then 1/L, its square 1/L², and L times that 1/L",
            exact=True,
        ),
        expect("deviation of the step from equation 17", paper=0.0, high=1e-4).derived(
            "the actual step agrees with F² Σ 1/a_i² to first order", why="η = 1e-6 leaves terms of order η", exact=True
        ),
    ),
)
def thm4(settings: Settings) -> Measurement:
    """How far a step moves a scalar branch, over L. Reference: fixup, appendix B.2, Theorem 4, equations 15 to 21."""
    depths = tuple(10**k for k in range(1, 7))
    rate = 1e-6
    good: dict[str, list[float]] = {}
    off: list[float] = []
    large: list[list[float]] = []
    small: list[list[float]] = []
    for m in _LAYERS:
        rows: tuple[list[float], ...] = ([], [], [], [])
        for L in depths:
            a = theory.fixup_scale(L, m)
            for row, factors in zip(rows, ([a] * m, [a] * (m - 1) + [0.0], [1.0] * m, [a * a] * m), strict=True):
                measured = _scalar_step(factors, rate) / rate
                row.append(L * measured)
                off.append(abs(measured / theory.scalar_branch_update(factors) - 1))
        good[f"all {m} factors equal"], good[f"last of {m} factors 0"] = rows[0], rows[1]
        large.append(rows[2])
        small.append(rows[3])
    numbers = [value for curve in good.values() for value in curve]
    curves = {**good, "all 1 (control)": large[0], "too small (control)": small[0]}
    exact = {
        "spread where the condition holds": max(numbers) / min(numbers),
        "exponent where factors are 1": sum(exponent(depths, c) for c in large) / len(large),
        "exponent where factors are too small": sum(exponent(depths, c) for c in small) / len(small),
        "deviation of the step from equation 17": max(off),
    }

    def of_weights(seed: int) -> tuple[dict[str, float], dict[str, float]]:
        drawn = {"√L times the other factors, ResNet-50": bottleneck_factor(seed)}
        for m in _LAYERS:
            found = {L: layer_factors(L, m, 32, seed) for L in _BRANCHES[: 2 if settings.quick else 3]}
            moves = [L * _scalar_step(factors, rate) / rate for L, factors in found.items()]
            slope = exponent(list(found), [_others(factors) for factors in found.values()])
            drawn[f"exponent of the other factors, m = {m}"] = slope
            drawn[f"L·|ΔF|/η of the library's factors, m = {m}"] = sum(moves) / len(moves)
        return drawn, {}

    return Measurement(
        values={**exact, **settings.over_seeds(of_weights)[0]},
        panels=(chart("how far a scalar branch moves", curves, "L · |ΔF|/η", "branches L", x=depths, log_x=True),),
    )


def _scalar_step(factors: Sequence[float], rate: float) -> float:
    """|ΔF| of one actual step of F = Π a_i at x = 1 with ∂ℓ/∂F = 1."""
    given = list(factors)
    gradients = [math.prod(given[:i] + given[i + 1 :]) for i in range(len(given))]
    return abs(math.prod(a - rate * g for a, g in zip(given, gradients, strict=True)) - math.prod(given))
