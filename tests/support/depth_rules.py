"""The residual rules in closed form: variances over depth, with which the tests compare the methods.

Positions are counted from 1: branch ``l`` of ``L`` in the network, branch ``b`` of ``B_k`` in stage ``k``. A rule maps
(l, L) to (c, a, β) of x_{l+1} = c·(a·x_l + β·f(x_l)).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from normfree.theory import FloatArray, fan_out, nf_output_variance, tap_matrix

Rule = Callable[[int, int], tuple[float, float, float]]


def plain_rule(l: int, L: int) -> tuple[float, float, float]:
    """Plain sum (1, 1, 1): the variance doubles at each branch, 2^L in all.

    Reference: robust, section 2, equation 4; normdead, section 3.2.
    """
    return 1.0, 1.0, 1.0


def sqrt_half_rule(l: int, L: int) -> tuple[float, float, float]:
    """Halved sum (√½, 1, 1): the variance stays constant.

    Reference: robust, section 3.3, IdShort; normdead, section 3.2 (Balduzzi et al. 2017).
    """
    return math.sqrt(0.5), 1.0, 1.0


def small_branch_rule(beta: float) -> Rule:
    """Small constant branch (1, 1, β), usually 0.1 to 0.3: the variance grows to (1 + β²)^L.

    Reference: normdead, section 3.2 (Szegedy et al. 2016).
    """
    return lambda l, L: (1.0, 1.0, beta)


def hanin_rule(r: float) -> Rule:
    """Geometrically fading branches (1, 1, r^l): the variance Π(1 + r^(2l)) stays below `hanin_bound`.

    Reference: normdead, section 3.2 (Hanin & Rolnick 2018).
    """
    hanin_bound(r)  # raises if the sum of the scales diverges
    return lambda l, L: (1.0, 1.0, r**l)


def shao_rule(l: int, L: int) -> tuple[float, float, float]:
    """Weighted sum (1, √(1-β²), β) with β² = 1/(l + L): the variance stays constant, and all branches weigh the same.

    Reference: normdead, section 4.1 (Shao et al. 2020).
    """
    return 1.0, math.sqrt(1 - 1 / (l + L)), math.sqrt(1 / (l + L))


def skipinit_rule(l: int, L: int) -> tuple[float, float, float]:
    """Branch that starts at zero (1, 1, 0), as in SkipInit, ReZero and Fixup: the variance stays constant.

    Reference: normdead, section 4.1 (De & Smith 2020); fixup, section 3, rule 1.
    """
    return 1.0, 1.0, 0.0


def weightnorm_rule(l: int, L: int) -> tuple[float, float, float]:
    """Equal branches (1, 1, 1/√B) in a stage of B = L branches: the variance grows to (1 + 1/B)^B.

    Reference: wninit, section 4, theorem 3.
    """
    return 1.0, 1.0, L**-0.5


def hanin_bound(r: float) -> float:
    """Return exp(r²/(1-r²)), a bound on the variance of `hanin_rule`, since Π(1 + r^(2l)) <= exp(Σ r^(2l)).

    Reference: normdead, section 3.2 (Hanin & Rolnick 2018).
    """
    if not 0 < r < 1:
        raise ValueError(f"expected 0 < r < 1, got {r}; use for example r = 0.9, so that the sum of r^l is finite")
    return math.exp(r**2 / (1 - r**2))


def variance_by_depth(rule: Rule, branches: int, start: float = 1.0, branch_gain: float = 1.0) -> FloatArray:
    """Return the second moments v_1 … v_{L+1} along the branches: v_{l+1} = c²·(a² + branch_gain·β²)·v_l.

    Holds for a branch that multiplies the second moment by branch_gain and is uncorrelated with its shortcut.

    Reference: robust, section 3.1; wninit, section 4, theorem 3.

    >>> variance_by_depth(plain_rule, 3)
    array([1., 2., 4., 8.])
    """
    if branches < 1:
        raise ValueError(f"expected branches of at least 1, got {branches}; pass branches of at least 1")
    scalars = (rule(l, branches) for l in range(1, branches + 1))
    factors = [c**2 * (a**2 + branch_gain * beta**2) for c, a, beta in scalars]
    return np.asarray(np.cumprod([start, *factors]), dtype=np.float64)


def nf_expected_variance(stage_sizes: Sequence[int], beta: float) -> list[list[float]]:
    """Return the expected input variance E[Var] of every branch, by stage; α = 1/√E[Var].

    It is 1 at the very first branch, 1 + β²·B_{k-1} at the first branch of a later stage, and else 1 + (b-1)·β².

    Reference: normdead, section 4.2 and appendix A.3 (β scales the branch and α its input; Brock swaps the names).

    >>> nf_expected_variance([2, 3], beta=1.0)
    [[1.0, 2.0], [3.0, 2.0, 3.0]]
    """
    outputs = nf_output_variance(stage_sizes, beta)
    before = [1.0, *(stage[-1] for stage in outputs)]  # a transition normalizes by the previous stage's variance
    return [[first, *stage[:-1]] for first, stage in zip(before, outputs, strict=False)]


def effective_fan_out(
    out_channels: int,
    kernel: Sequence[int],
    stride: int | Sequence[int],
    size: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    *,
    groups: int = 1,
    circular: bool = False,
) -> float:
    """Return fan-out with stride and padding, at a uniform gradient map: out_channels/groups · Π (ΣT/size) over axes.

    ``stride``, ``size`` of the input, ``padding`` and ``dilation`` are one number for all axes, or one per axis.

    Reference: none (ours); robust, section 2, equation 2 counts out_channels·k².

    >>> effective_fan_out(16, (1, 1), stride=2, size=8, padding=0)
    4.0
    """
    taps = float(fan_out(out_channels, (), groups))
    settings = (size, kernel, stride, padding, dilation)
    axes = [(setting,) * len(kernel) if isinstance(setting, int) else tuple(setting) for setting in settings]
    if any(len(axis) != len(kernel) for axis in axes):
        raise ValueError(f"expected {len(kernel)} entries, as in kernel, got {axes}; pass one number or one per axis")
    for length, *layer in zip(*axes, strict=True):
        taps *= float(tap_matrix(length, *layer, circular=circular).sum()) / length
    return taps
