"""Depth: exponents, constants and expected variances of the residual rules.

Positions are counted from 1: branch ``l`` of ``L`` in the network, branch ``b`` of ``B_k`` in stage ``k``.
"""

import math
from collections.abc import Sequence

from normfree.theory.errors import require_positive, value_error


def fixup_scale(branches: int, layers: int) -> float:
    """Return the factor L^(-1/(2m-2)) on the weights of a branch of m layers, one of L branches.

    Reference: fixup, section 3, equation 5 and rule 2.

    >>> fixup_scale(branches=16, layers=2)
    0.25
    """
    require_positive(branches=branches)
    if layers < 2:
        remedy = "zero the branch's only layer or give the branch a second one: the exponent 1/(2m-2) has no value"
        raise value_error("at least 2 weight layers in a branch", layers, remedy)
    return float(branches ** (-1 / (2 * layers - 2)))


def scalar_branch_update(a: Sequence[float], x: float = 1.0) -> float:
    """Return |ΔF|/η of the first step of F(x) = (Π a_i)·x at unit output gradient: Σ_i (x·Π_{k≠i} a_k)² = F² Σ 1/a_i².

    Reference: fixup, appendix B.2, equation 17; written as products, which is equation 18 where an a_i is 0.

    >>> scalar_branch_update([0.5, 0.0])
    0.25
    """
    if not a:
        raise value_error("at least one layer", a, "pass the scale of every layer of the branch")
    return math.fsum((x * math.prod([*a[:i], *a[i + 1 :]])) ** 2 for i in range(len(a)))


def k_n(n: int) -> float:
    """Return K_n = E‖v‖²/‖u‖² of weight norm's Theorem 1: 2·S_{n-1}/S_n times ½·¾⋯(n-2)/(n-1)·π/2 or ⅔·⅘⋯(n-2)/(n-1).

    The first product is for odd n, the second for even n; S_n = 2π^((n+1)/2)/Γ((n+1)/2) is the area of Sⁿ in Rⁿ⁺¹.
    Both products are ∫ sinⁿ⁻¹ over [0, π/2] = ½√π·Γ(n/2)/Γ((n+1)/2), so K_n = 1 for every n.

    Reference: wninit, section 3, theorem 1, equation 3.
    Differs: the paper finds K_n = 1 empirically; it follows from the line above.

    >>> round(k_n(7), 12)
    1.0
    """
    if n < 2:
        raise value_error("n of at least 2", n, "Theorem 1 is stated for two or more inputs")
    log_areas = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - math.log(math.pi) / 2
    product = math.fsum(math.log1p(-1 / (j + 1)) for j in range(2 - n % 2, n - 1, 2))
    return 2 * math.exp(log_areas + product) * (math.pi / 2 if n % 2 else 1.0)


def weightnorm_norm_ratio(blocks: int) -> float:
    """Return the root mean square of ‖f(x)‖/‖x‖ over a stage of B blocks: (1 + 1/B)^(B/2), between √2 and √e.

    Reference: wninit, section 4, theorem 3, equation 7.
    """
    require_positive(blocks=blocks)
    return float((1 + 1 / blocks) ** (blocks / 2))


def nf_output_variance(stage_sizes: Sequence[int], beta: float) -> list[list[float]]:
    """Return the expected output variance 1 + b·β² of every block, by stage; it restarts at transitions.

    Reference: normdead, section 4.2 and appendix A.3.

    >>> nf_output_variance([2, 3], beta=1.0)
    [[2.0, 3.0], [2.0, 3.0, 4.0]]
    """
    return _linear_growth(stage_sizes, [1 + beta**2] * len(stage_sizes), beta**2)


def normalized_variance(
    stage_sizes: Sequence[int], slope: float = 1 - 1 / math.pi, *, first_projects: bool = True
) -> list[list[float]]:
    """Return the channel variance (b + 1)·slope of every block's output under batch norm and pre-activated transitions.

    The branch adds 2·Var ReLU = 1 - 1/π, and a projection gives as much. Without ``first_projects`` the first block
    keeps its input of variance 1, so stage 1 has 1 + b·slope.

    Reference: normdead, section 4.2, figure 4.

    >>> normalized_variance([2, 1], slope=0.5)
    [[1.0, 1.5], [1.0]]
    """
    first = 2 * slope if first_projects else 1 + slope
    return _linear_growth(stage_sizes, [first] + [2 * slope] * (len(stage_sizes) - 1), slope)


def _linear_growth(stage_sizes: Sequence[int], firsts: Sequence[float], step: float) -> list[list[float]]:
    require_positive(**{f"size of stage {k}": size for k, size in enumerate(stage_sizes, 1)})
    return [[first + b * step for b in range(size)] for first, size in zip(firsts, stage_sizes, strict=True)]
