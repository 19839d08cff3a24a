"""Formulas of the papers: numbers in, numbers out, without networks or tensors. Tests compare the code with them.

Fans and kernel taps of layers; gains of activations, from moments at a normal input, in closed form or by quadrature;
exponents and expected variances of the residual rules. Positions are counted from 1: branch ``l`` of ``L`` in the
network, branch ``b`` of ``B_k`` in stage ``k``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from normfree.errors import unknown_name

FloatArray = npt.NDArray[np.float64]
_Function = Callable[[FloatArray], FloatArray]
Activation = str | _Function


def _value_error(expected: str, got: object, remedy: str) -> ValueError:
    """Return the error for an invalid value."""
    return ValueError(f"expected {expected}, got {got!r}; {remedy}")


def _require_positive(**values: int) -> None:
    """Raise `ValueError` if a count is below 1."""
    for name, value in values.items():
        if value < 1:
            raise _value_error(f"{name} of at least 1", value, f"pass a {name} of at least 1")


def _per_group(channels: int, kernel: Sequence[int], groups: int) -> int:
    _require_positive(channels=channels, groups=groups, **{f"kernel size {i}": k for i, k in enumerate(kernel, 1)})
    if channels % groups:
        raise _value_error(f"channels divisible by {groups} groups", channels, "change the groups or the channels")
    return channels // groups * math.prod(kernel)


def fan_in(in_channels: int, kernel: Sequence[int] = (), groups: int = 1) -> int:
    """Return the number of inputs of one output: in_channels/groups · Π kernel, with no kernel for a linear layer.

    Reference: robust, section 2, equation 1.

    >>> fan_in(64, (3, 3))
    576
    """
    return _per_group(in_channels, kernel, groups)


def fan_out(out_channels: int, kernel: Sequence[int] = (), groups: int = 1) -> int:
    """Return the number of outputs of one input, away from borders and without stride: out_channels/groups · Π kernel.

    Reference: robust, section 2, equation 2.
    Differs: torch.nn.init does not divide by groups, but an input of a grouped layer reaches only its group.

    >>> fan_out(64, (3, 3), groups=64)
    9
    """
    return _per_group(out_channels, kernel, groups)


def conv_output_size(size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """Return the length of a convolution's output along one axis.

    ⌊(size + 2·padding - dilation·(kernel - 1) - 1)/stride⌋ + 1.

    Reference: the definition, as in torch.nn.Conv1d.

    >>> conv_output_size(32, kernel=3, stride=2, padding=1)
    16
    """
    _require_positive(size=size, kernel=kernel, stride=stride, dilation=dilation)
    if padding < 0:
        raise _value_error("padding of at least 0", padding, "check the padding of the layer")
    free = size + 2 * padding - dilation * (kernel - 1) - 1
    if free < 0:
        raise _value_error(f"an input of at least {size - free} positions", size, "enlarge the input or the padding")
    return free // stride + 1


def tap_matrix(
    size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, *, circular: bool = False
) -> FloatArray:
    """Return the number of taps from input i to output o along one axis.

    T[o, i] = #{t < kernel: o·stride + t·dilation - padding = i}. With ``circular`` the equation holds modulo ``size``.
    The shape is (output size, input size).

    Reference: none (ours); it replaces k² in robust, section 2, equation 2.

    >>> tap_matrix(4, kernel=3, stride=2, padding=1)
    array([[1., 1., 0., 0.],
           [0., 1., 1., 1.]])
    """
    outputs = conv_output_size(size, kernel, stride, padding, dilation)
    reached = np.arange(outputs)[:, None] * stride + np.arange(kernel) * dilation - padding
    reached = reached % size if circular else reached
    return np.asarray((reached[:, :, None] == np.arange(size)).sum(axis=1), dtype=np.float64)


def gradient_taps(variance: FloatArray, tap_rows: FloatArray, tap_cols: FloatArray) -> FloatArray:
    """Propagate a map v of gradient variances back through a convolution with d·Var[W] = 1: T_rowsᵀ v T_cols.

    Maps the shape (H_out, W_out) to (H_in, W_in); the taps come from `tap_matrix`.

    Reference: none (ours); robust, section 2, equation 2 with position-dependent taps.

    >>> gradient_taps(np.ones((2, 2)), tap_matrix(2, 3, padding=1), tap_matrix(2, 1))
    array([[2., 2.],
           [2., 2.]])
    """
    if variance.shape != (len(tap_rows), len(tap_cols)):
        expected = f"a variance map of shape {(len(tap_rows), len(tap_cols))}"
        raise _value_error(
            expected, variance.shape, "pass the map at the output of the convolution that has these taps"
        )
    return np.asarray(tap_rows.T @ variance @ tap_cols, dtype=np.float64)


def effective_taps(variance: FloatArray, tap_rows: FloatArray, tap_cols: FloatArray) -> float:
    """Return the mean number of taps t = mean(T_rowsᵀ v T_cols)/mean(v) of an input's gradient.

    Var[W] = γ/(d·t) then keeps the gradient's variance.

    Reference: none (ours); in place of k² in robust, section 2, equation 2.

    >>> effective_taps(np.ones((2, 2)), tap_matrix(4, 1, stride=2), tap_matrix(4, 1, stride=2))
    0.25
    """
    at_input = gradient_taps(variance, tap_rows, tap_cols)
    if not variance.mean() > 0:
        raise _value_error("a variance map with mean > 0", float(variance.mean()), "pass a gradient that is not 0")
    return float(at_input.mean() / variance.mean())


@dataclass(frozen=True)
class Moments:
    """Moments of an activation f at z ~ N(0, std²): mean E f, second E f², variance Var f, slope E f'²."""

    mean: float
    second: float
    variance: float
    slope: float


def selu_constants() -> tuple[float, float]:
    """Return λ and α of SELU, for which zero mean and unit variance are a fixed point.

    α = √(2/π) / (1 - √e·erfc(√½)),  λ⁻² = ½ + α²·(½ - √e·erfc(√½) + ½·e²·erfc(√2)).

    Reference: normdead, section 2.3; Klambauer et al. 2017.

    >>> selu_constants()
    (1.05070098735548..., 1.67326324235437...)
    """
    first, second = math.exp(0.5) * math.erfc(math.sqrt(0.5)), math.exp(2.0) * math.erfc(math.sqrt(2.0))
    alpha = math.sqrt(2 / math.pi) / (1 - first)
    return (0.5 + alpha**2 * (0.5 - first + second / 2)) ** -0.5, alpha


_SELU_SCALE, _SELU_ALPHA = selu_constants()


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)), dtype=np.float64)


def _normal_cdf(x: FloatArray) -> FloatArray:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])


def _normal_density(x: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi), dtype=np.float64)


def _elu(scale: float, alpha: float) -> tuple[_Function, _Function]:
    return (
        lambda x: scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
        lambda x: scale * np.where(x > 0, 1.0, alpha * np.exp(np.minimum(x, 0))),
    )


# Each activation and its derivative: a finite difference would lose three digits.
_SMOOTH: dict[str, tuple[_Function, _Function]] = {
    "selu": _elu(_SELU_SCALE, _SELU_ALPHA),
    "elu": _elu(1.0, 1.0),
    "gelu": (lambda x: x * _normal_cdf(x), lambda x: _normal_cdf(x) + x * _normal_density(x)),
    "silu": (lambda x: x * _sigmoid(x), lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x))),
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "sigmoid": (_sigmoid, lambda x: _sigmoid(x) * _sigmoid(-x)),
    "softplus": (lambda x: np.logaddexp(0.0, x), _sigmoid),
}
_LINEAR = ("identity", "relu", "leaky_relu")  # linear on each side of 0, so known in closed form


def _quadrature(std: float, kinks: Sequence[float]) -> tuple[FloatArray, FloatArray]:
    """Return points x and weights with E g(x) = Σ weight·g(x) for x ~ N(0, std²), by Gauss-Legendre on panels.

    The panels halve towards 0, so that a kink at 0 or a feature of width 1/std costs no accuracy.
    """
    halving = 12.0 * 0.5 ** np.arange(32)  # beyond 12 standard deviations lies a mass of 1e-33
    inner = np.array([kink / std for kink in kinks if abs(kink) < 12 * std])
    edges = np.unique(np.concatenate([-halving, [0.0], halving, inner]))
    nodes, weights = np.polynomial.legendre.leggauss(48)
    half = np.diff(edges)[:, None] / 2
    z = ((edges[:-1] + edges[1:])[:, None] / 2 + half * nodes).ravel()
    return std * z, (half * weights).ravel() * _normal_density(z)


def _difference(function: _Function, x: FloatArray, kinks: Sequence[float]) -> FloatArray:
    """Return the derivative by a fourth-order central difference whose stencil never crosses a kink."""
    room = np.min([np.abs(x - kink) for kink in (0.0, *kinks)], axis=0)
    h = np.minimum(1e-3 * np.maximum(1.0, np.abs(x)), room / 4)
    near, far = function(x + h) - function(x - h), function(x + 2 * h) - function(x - 2 * h)
    return np.asarray((8 * near - far) / (12 * h), dtype=np.float64)


def moments(
    activation: Activation, std: float = 1.0, *, negative_slope: float = 0.01, kinks: Sequence[float] = ()
) -> Moments:
    """Return the moments of an activation at z ~ N(0, std²), in closed form or by quadrature in float64.

    E f = ∫ f(z) φ(z) dz with φ the density of N(0, std²). A callable takes and returns an array; ``kinks`` are the
    points other than 0 where its slope jumps. ``negative_slope`` is for "leaky_relu" only.

    Reference: He et al. 2015, section 2.2; robust, section 2, equations 1 to 3.

    >>> moments("relu")
    Moments(mean=0.3989..., second=0.5, variance=0.3408..., slope=0.5)
    """
    if not (std > 0 and math.isfinite(std)):
        raise _value_error("a finite std > 0", std, "pass the standard deviation of the pre-activation")
    if isinstance(activation, str):
        if activation in _LINEAR:
            below = {"identity": 1.0, "relu": 0.0, "leaky_relu": negative_slope}[activation]
            mean, slope = (1 - below) * std / math.sqrt(2 * math.pi), (1 + below**2) / 2
            return Moments(mean, slope * std**2, slope * std**2 - mean**2, slope)
        if activation not in _SMOOTH:
            error = unknown_name("activation", activation, [*_LINEAR, *_SMOOTH])
            raise ValueError(f"{error}; pass any other function as a callable")
    x, weight = _quadrature(std, kinks)
    function, derivative = _SMOOTH[activation] if isinstance(activation, str) else (activation, None)
    value = np.asarray(function(x), dtype=np.float64)
    if value.shape != x.shape or not np.isfinite(value).all():
        got = f"shape {value.shape}" if value.shape != x.shape else "infinite or undefined values"
        raise _value_error(f"an elementwise activation, finite on ±{12 * std:g}", got, "pass a function of one array")
    slopes = derivative(x) if derivative else _difference(function, x, kinks)
    average = float(weight @ value)
    # Centred before squaring: second - mean² would lose the digits of a nearly constant activation.
    return Moments(average, float(weight @ value**2), float(weight @ (value - average) ** 2), float(weight @ slopes**2))


def _gain(moment: float, second: float, what: str) -> float:
    if moment <= 1e-24 * second:  # the variance of a constant, up to rounding
        raise _value_error(f"an activation with {what} > 0", moment, "use one that is not constant")
    return 1 / moment


def forward_gain(activation: Activation, *, negative_slope: float = 0.01) -> float:
    """Return the gain 1/E f²; Var[W] = gain/fan_in keeps the second moment of the forward signal.

    Reference: He et al. 2015, equation 10; robust, section 2, equation 1.

    >>> forward_gain("relu")
    2.0
    """
    m = moments(activation, negative_slope=negative_slope)
    return _gain(m.second, m.second, "E f²")


def variance_gain(activation: Activation, *, negative_slope: float = 0.01) -> float:
    """Return the gain γ² = 1/Var f; centred weights with variance γ²/fan_in keep the variance of each channel.

    Reference: robust, section 2, equation 3, there γ² = 2/(1 - 1/π) for ReLU; Brock et al. 2021a.

    >>> round(variance_gain("relu") ** 0.5, 5)
    1.71286
    """
    m = moments(activation, negative_slope=negative_slope)
    return _gain(m.variance, m.second, "Var f")


def backward_gain(activation: Activation, *, negative_slope: float = 0.01) -> float:
    """Return the gain 1/E f'²; Var[W] = gain/fan_out keeps the second moment of the gradient.

    Reference: He et al. 2015, equation 14; robust, section 2, equation 2.

    >>> backward_gain("relu")
    2.0
    """
    m = moments(activation, negative_slope=negative_slope)
    return _gain(m.slope, m.second, "E f'²")


def normprop_constants() -> tuple[float, float]:
    """Return mean √(1/2π) and standard deviation √(½·(1 - 1/π)) of ReLU(N(0, 1)), which NormProp normalizes with.

    Reference: normdead, section 2.3; Arpit et al. 2016.

    >>> normprop_constants()
    (0.3989..., 0.5838...)
    """
    relu = moments("relu")
    return relu.mean, math.sqrt(relu.variance)


def fixup_scale(branches: int, degree: int) -> float:
    """Return the factor L^(-1/(2m-2)) on the weights of a branch of degree m (m layers in a row), one of L branches.

    Reference: fixup, section 3, equation 5 and rule 2.

    >>> fixup_scale(branches=16, degree=2)
    0.25
    """
    _require_positive(branches=branches)
    if degree < 2:
        remedy = "zero the branch's only layer or give the branch a second one: the exponent 1/(2m-2) has no value"
        raise _value_error("a branch of degree 2 or more", degree, remedy)
    return float(branches ** (-1 / (2 * degree - 2)))


def scalar_branch_update(a: Sequence[float], x: float = 1.0) -> float:
    """Return |ΔF|/η of the first step of F(x) = (Π a_i)·x at unit output gradient: Σ_i (x·Π_{k≠i} a_k)² = F² Σ 1/a_i².

    Reference: fixup, appendix B.2, equation 17; written as products, which is equation 18 where an a_i is 0.

    >>> scalar_branch_update([0.5, 0.0])
    0.25
    """
    if not a:
        raise _value_error("at least one layer", a, "pass the scale of every layer of the branch")
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
        raise _value_error("n of at least 2", n, "Theorem 1 is stated for two or more inputs")
    log_areas = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - math.log(math.pi) / 2
    product = math.fsum(math.log1p(-1 / (j + 1)) for j in range(2 - n % 2, n - 1, 2))
    return 2 * math.exp(log_areas + product) * (math.pi / 2 if n % 2 else 1.0)


def weightnorm_norm_ratio(blocks: int) -> float:
    """Return the root mean square of ‖f(x)‖/‖x‖ over a stage of B blocks: (1 + 1/B)^(B/2), between √2 and √e.

    Reference: wninit, section 4, theorem 3, equation 7.
    """
    _require_positive(blocks=blocks)
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
    _require_positive(**{f"size of stage {k}": size for k, size in enumerate(stage_sizes, 1)})
    return [[first + b * step for b in range(size)] for first, size in zip(firsts, stage_sizes, strict=True)]
