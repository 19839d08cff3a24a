"""The theorems of `wninit`: the norms after weight-normalized layers and residual stages.

Reference: Arpit, Campos, Bengio 2019, sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from normfree import discover, theory
from normfree.methods import initialize_
from normfree.models import build
from normfree.nn.weight_layers import WeightNormLinear
from normfree_papers.claims.claim import Check, Claim, Cost, Measurement, Settings, claim, expect
from normfree_papers.claims.depth_curves import chart, table
from normfree_papers.claims.registry import register
from normfree_papers.wninit.networks import feed_forward

Direction = Literal["forward", "backward"]


# Theorems 1 and 2: one layer

_SHAPES = ((100, 100), (200, 100), (100, 200), (300, 50))  # inputs n, outputs m
_VECTORS = 20
_DIRECTIONS = {"orthogonal": "orthogonal", "isotropic": "gaussian"}
_LAYER = "{}, {} → {}"  # the name of a row: kind and shape of the matrix


def layer_weights(method: str, n: int, m: int, g: torch.Generator) -> Iterator[Tensor]:
    """Yield weights of a layer from n inputs to m outputs before a ReLU, each a new draw by a method of the library."""
    model = feed_forward((n, m))
    plan = discover(model, torch.zeros(2, n))
    layer = model[0]
    assert isinstance(layer, WeightNormLinear)
    while True:
        initialize_(model, method, plan, generator=g)
        yield layer.effective_weight().detach()


def _layer_ratios(
    settings: Settings, lengths: str, ratios: Callable[[Tensor, torch.Generator], Tensor]
) -> dict[str, list[list[float]]]:
    """‖v‖²/‖u‖² of many matrices with `_VECTORS` vectors each, by kind and shape of matrix, one list per seed."""

    def drawn(row: tuple[str, int, int], seed: int) -> list[float]:
        kind, n, m = row
        g = torch.Generator().manual_seed(seed)
        weights = layer_weights(f"wn:directions={_DIRECTIONS[kind]},g={lengths}", n, m, g)
        matrices = islice(weights, 100 if settings.quick else 300)
        return torch.cat([ratios(weight.to(settings.device), g) for weight in matrices]).tolist()

    rows = [(kind, n, m) for kind in _DIRECTIONS for n, m in _SHAPES]
    found = settings.over_seeds_of(rows, drawn, _LAYER)
    return {_LAYER.format(*row): draws for row, draws in found.items()}


def _layer_measurement(found: dict[str, list[list[float]]]) -> Measurement:
    centre = {name: [math.fsum(draws) / len(draws) for draws in seeds] for name, seeds in found.items()}
    spread = {name: torch.tensor(seeds).std(dim=1).tolist() for name, seeds in found.items()}
    values: dict[str, list[float]] = {f"E‖v‖²/‖u‖², {name}": numbers for name, numbers in centre.items()}
    shapes = tuple(f"{n} → {m}" for n, m in _SHAPES)
    ratios = [
        [a / b for a, b in zip(spread[f"orthogonal, {shape}"], spread[f"isotropic, {shape}"], strict=True)]
        for shape in shapes
    ]
    values["spread of orthogonal over isotropic"] = [max(of) for of in zip(*ratios, strict=True)]
    columns = ("matrix, n → m", "mean of ‖v‖²/‖u‖²", "standard deviation of a draw")
    rows = ((name, f"{fmean(centre[name]):.4f}", f"{fmean(spread[name]):.4f}") for name in found)
    return Measurement(
        values=values,
        panels=tuple(
            chart(
                title,
                {kind: [fmean(of[f"{kind}, {shape}"]) for shape in shapes] for kind in _DIRECTIONS},
                label,
                "shape",
                log_y=log,
                note=note,
                names=shapes,
            )
            for title, of, label, log, note in (
                # A logarithmic axis spans at least a decade: noise in the fourth digit does not look large.
                ("mean over draws", centre, "‖v‖²/‖u‖²", True, "1 means that the norm is kept"),
                ("standard deviation of a draw", spread, "of ‖v‖²/‖u‖²", False, "lower is better"),
            )
        ),
        tables=table("One layer", columns, rows),
    )


def _layer_checks(extra: tuple[Check, ...]) -> tuple[Check, ...]:
    return (
        *extra,
        *(
            expect(f"E‖v‖²/‖u‖², {kind}, {n} → {m}", paper=1.0, low=0.97, high=1.03).derived(
                f"the mean square is kept by {kind} directions, {n} inputs to {m} outputs",
                why="a draw varies by √(5/50) = 32 % at most, so 2,000 a seed leave 0.7 %: four standard errors",
            )
            for kind in _DIRECTIONS
            for n, m in _SHAPES
        ),
    )


@claim(
    id="wninit/thm1",
    where="Theorem 1",
    statement="A weight-normalized layer with g = √(2n/m) and ReLU keeps the expected squared norm: K_n = 1.",
    paper_value="K_n = 1 for all integers n > 1, found empirically",
    how="K_n by its formula for n = 2 to 2,000, and the mean of ‖v‖²/‖u‖² over layers that method wn draws with "
    "orthogonal and with Gaussian directions.",
    cost=Cost(quick_seconds=8, full_seconds=50),
    seeds=5,
    quick_seeds=3,
    version=2,
    checks=_layer_checks(
        (
            expect("largest |K_n - 1|", paper=0.0, high=1e-11).derived(
                "the constant is 1",
                why="rounding of log Γ(1,000) = 5,905 in float64; S_n is the area of Sⁿ in Rⁿ⁺¹, the other convention "
                "gives 0.64 at n = 2",
                exact=True,
            ),
        )
    ),
)
def thm1(settings: Settings) -> Measurement:
    """K_n and the layer that it describes. Reference: wninit, section 3, Theorem 1, equation 3."""

    def one(weight: Tensor, g: torch.Generator) -> Tensor:
        n = weight.shape[1]
        u = torch.randn(n, _VECTORS, generator=g).to(weight)
        v = torch.relu(weight @ u)
        return v.square().sum(0) / u.square().sum(0)

    measured = _layer_measurement(_layer_ratios(settings, "forward", one))
    constants = [abs(theory.k_n(n) - 1) for n in range(2, 2001)]
    return Measurement(
        values={**measured.values, "largest |K_n - 1|": max(constants)},
        panels=measured.panels,
        tables=measured.tables,
        notes=("K_n = 1 can be proved: both products are ∫ sinⁿ⁻¹ over [0, π/2]",),
    )


@claim(
    id="wninit/thm2",
    where="Theorem 2",
    statement="Backward, a weight-normalized layer with g = √2 keeps the expected squared norm of a gradient.",
    paper_value="E‖√2·z ⊙ (R̂ᵀu)‖² = ‖u‖², strictly better for orthogonal matrices",
    how="The mean of ‖v‖²/‖u‖² over layers that method wn:g=backward draws with orthogonal and with Gaussian "
    "directions, and over z, with independent fair coin flips as coordinates.",
    cost=Cost(quick_seconds=8, full_seconds=50),
    seeds=5,
    quick_seeds=3,
    version=2,
    checks=_layer_checks(
        (
            expect("spread of orthogonal over isotropic", paper="strictly better", high=1.0).printed(
                "the result varies less for orthogonal matrices, in the worst of the shapes",
                why="the sentence after Theorem 2: 'strictly better for orthogonal weight matrices'",
            ),
        )
    ),
)
def thm2(settings: Settings) -> Measurement:
    """A gradient through one layer. Reference: wninit, section 3, Theorem 2."""

    def one(weight: Tensor, g: torch.Generator) -> Tensor:
        m, n = weight.shape
        u = torch.randn(m, _VECTORS, generator=g).to(weight)
        z = torch.randint(2, (n, _VECTORS), generator=g).to(weight)
        v = z * (weight.T @ u)
        return v.square().sum(0) / u.square().sum(0)

    return _layer_measurement(_layer_ratios(settings, "backward", one))


# Theorems 3 and 4: a stage of B blocks

_STAGES = {10: 128, 100: 128, 1000: 96}  # the width by the number of blocks
_ERROR = (
    "⟨h, F⟩ adds 4/n to the relative variance of a square, n ≥ 96; with 64 inputs and 20 seeds that leaves 0.3 % "
    "(inputs independent) to 2.3 % (all alike)"
)


def _norm_ratios(direction: Direction, blocks: int, seed: int, device: str) -> list[float]:
    """‖output‖/‖input‖ of a residual MLP over all its blocks for 64 inputs; backward, that of their gradients."""
    g, width = torch.Generator().manual_seed(seed), _STAGES[blocks]
    model = build(f"resmlp-{blocks}-{width}", "wn", size=1, in_channels=width, generator=g).to(device)
    model.requires_grad_(False)
    x = torch.randn(64, width, generator=g).to(device).requires_grad_()
    y = model.body(x)
    before, after = x, y
    if direction == "backward":
        before = torch.randn(y.shape, generator=g).to(y)
        (after,) = torch.autograd.grad(y, x, before)
    ratios: list[float] = (after.norm(dim=1) / before.norm(dim=1)).tolist()
    return ratios


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(fmean([value**2 for value in values]))


def _stage_theorem(direction: Direction, settings: Settings) -> Measurement:
    """Norm ratios over a stage. Reference: wninit, section 4, Theorems 3 and 4, equations 7 and 8."""
    found = settings.over_seeds_of(
        _STAGES, lambda blocks, seed: _norm_ratios(direction, blocks, seed, settings.device), "{} blocks"
    )
    values: dict[str, list[float]] = {}
    rows, singles = [], []
    for blocks, ratios in found.items():
        expected = theory.weightnorm_norm_ratio(blocks)
        per_seed = values[f"norm ratio, {blocks} blocks"] = [_root_mean_square(r) for r in ratios]
        values[f"over (1 + 1/B)^(B/2), {blocks} blocks"] = [r / expected for r in per_seed]
        flat = sorted(r for one in ratios for r in one)
        singles.append((flat[0], flat[-1]))
        rows.append(
            (str(blocks), f"{_root_mean_square(flat):.4f}", f"{expected:.4f}", f"{flat[0]:.3f} to {flat[-1]:.3f}")
        )
    columns = ("blocks", "measured", "(1 + 1/B)^(B/2)", "single inputs")
    curves = {
        "measured": [fmean(values[f"norm ratio, {blocks} blocks"]) for blocks in _STAGES],
        "(1 + 1/B)^(B/2)": [theory.weightnorm_norm_ratio(blocks) for blocks in _STAGES],
        "√2": [math.sqrt(2)] * len(_STAGES),
        "√e": [math.sqrt(math.e)] * len(_STAGES),
        "smallest single input": [low for low, _ in singles],
        "largest single input": [high for _, high in singles],
    }
    what = "activations" if direction == "forward" else "gradients"
    return Measurement(
        values=values,
        panels=(
            chart(
                f"norm of the {what} over a stage",
                curves,
                "last over first" if direction == "forward" else "first over last",
                "blocks",
                x=_STAGES,
                log_x=True,
                log_y=False,
            ),
        ),
        tables=table(f"Norm ratio of {what}", columns, rows),
        notes=(
            "the expectation lies at the upper edge of [√2, √e], so single inputs leave the interval on both sides",
        ),
    )


for _number, _direction, _what in (("3", "forward", "activations"), ("4", "backward", "gradients")):
    register(
        Claim(
            id=f"wninit/thm{_number}",
            where=f"Theorem {_number}",
            statement=f"With branches scaled by 1/√B, the norm of {_what} changes over B blocks by a factor between √2 "
            "and √e, whatever B.",
            paper_value="c ∈ [√2, √e] = [1.414, 1.649]",
            how=f"Root mean square ratio of norms of {_what} over residual MLPs of 10, 100 and 1,000 weight-normalized "
            "blocks, 64 inputs per seed.",
            cost=Cost(quick_seconds=21, full_seconds=40),
            seeds=20,
            quick_seeds=10,
            measure=partial(_stage_theorem, _direction),  # type: ignore[arg-type]
            checks=tuple(
                check
                for _blocks in _STAGES
                for check in (
                    expect(
                        f"norm ratio, {_blocks} blocks",
                        paper="√2 to √e",
                        low=math.sqrt(2) * 0.97,
                        high=math.sqrt(math.e) * 1.03,
                    ).derived(
                        f"c over {_blocks} blocks",
                        why="the interval itself; the expectation (1 + 1/B)^(B/2) lies at its upper edge, so that 3 % "
                        f"are left for the sampling error: {_ERROR}",
                    ),
                    expect(f"over (1 + 1/B)^(B/2), {_blocks} blocks", low=0.97, high=1.03).derived(
                        f"c over {_blocks} blocks, over its exact expectation",
                        why=f"1 + 1/B per block in the square; {_ERROR}",
                    ),
                )
            ),
        ),
    )
