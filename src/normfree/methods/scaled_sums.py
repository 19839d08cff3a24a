"""Residual sums scaled by fixed or learnable numbers: √½, a small β, Hanin's r^l, Shao's, SkipInit and ReZero."""

from __future__ import annotations

from dataclasses import dataclass, replace

from normfree.methods.initialize import InitContext
from normfree.methods.method import RESIDUAL_SUMS, SQRT_HALF, Law, Method, Rule, register
from normfree.methods.plain import he_fan_in_
from normfree.plan import Position


@register
def sqrt_half() -> Method:
    """x' = √½ · (x + f(x)).

    Reference: fixup, section 4.1, baseline 1; normdead, section 3.2; Balduzzi 2017.
    """
    return Method(
        name="sqrt_half",
        summary="halve the variance at every sum: it is preserved, but the shortcut fades with depth",
        paper="fixup, normdead",
        reference="normdead, equation 5 with α = √½",
        h="identity",
        weights="plain; He fan-in",
        rule=Rule(c=SQRT_HALF),
        initializer=he_fan_in_,
        skips=RESIDUAL_SUMS,
    )


@register
def small_branch(*, beta: float = 0.2) -> Method:
    """x' = x + β·f(x) with one small β for all.

    Reference: normdead, section 3.2 (β in [0.1, 0.3]; the source, Szegedy 2016, keeps batch norm).
    """
    if not beta > 0:
        raise ValueError(f"expected option 'beta' of method 'small_branch' to be positive, got {beta:g}")
    return replace(
        sqrt_half(),
        name="small_branch",
        summary="one small factor on every branch: growth is slower, and still exponential",
        paper="normdead",
        reference="normdead, section 3.2; Szegedy 2016",
        rule=Rule(beta=Law(beta, text=f"{beta:g}")),
    )


@dataclass(frozen=True)
class GeometricSeries:
    """The law r^l of the branch's index l."""

    r: float

    def __call__(self, position: Position) -> float:
        return float(self.r**position.index)


@register
def hanin(*, r: float = 0.9) -> Method:
    """x' = x + r^l·f(x): the sum of the factors converges, so the variance stays bounded.

    Reference: normdead, section 3.2; Hanin & Rolnick 2018, theorem 6.
    """
    if not 0 < r < 1:
        raise ValueError(f"expected option 'r' of method 'hanin' between 0 and 1, got {r:g}")
    return replace(
        sqrt_half(),
        name="hanin",
        summary="branches weighted by a geometric series: the variance is bounded, not preserved",
        paper="normdead",
        reference="normdead, section 3.2; Hanin & Rolnick 2018",
        rule=Rule(beta=Law(GeometricSeries(r), text=f"{r:g}^l")),
    )


def _shao_beta(position: Position) -> float:
    return float((position.index + position.total) ** -0.5)


def _shao_shortcut(position: Position) -> float:
    return float((1 - _shao_beta(position) ** 2) ** 0.5)


@register
def shao() -> Method:
    """x' = √(1-β²)·x + β·f(x), β² = 1/(l + L): every branch has the same weight at the output.

    Reference: normdead, section 4.1; Shao 2020.
    """
    return replace(
        sqrt_half(),
        name="shao",
        summary="shortcut and branch weighted so that the variance is kept and every branch counts the same",
        paper="normdead",
        reference="normdead, section 4.1; Shao 2020",
        h="√(1-β²)·x",
        rule=Rule(a=Law(_shao_shortcut, text="√(1-β²)"), beta=Law(_shao_beta, text="1/√(l + L)")),
    )


@register
def skipinit() -> Method:
    """x' = x + β·f(x) with β learnable, from 0.

    Reference: normdead, section 4.1; De & Smith 2020.
    """
    return replace(
        sqrt_half(),
        name="skipinit",
        summary="a learnable factor on every branch that starts at 0: the network starts as its shortcut",
        paper="normdead",
        reference="normdead, section 4.1; De & Smith 2020",
        rule=Rule(beta=Law(0.0, learnable=True)),
    )


def _default_(ctx: InitContext) -> None:
    for layer in ctx.plan.layers():
        ctx.default_(layer)


@register
def rezero() -> Method:
    """`skipinit` with the framework's default weights.

    Reference: robust, section 1; Bachlechner 2020, equation 3.
    """
    return replace(
        skipinit(),
        name="rezero",
        summary="as skipinit, with the framework's default weights",
        paper="robust",
        reference="robust, section 1; Bachlechner 2020",
        weights="plain; framework default",
        initializer=_default_,
    )
