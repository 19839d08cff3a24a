"""Gains of activations: mean, variance and slope at a normal input, in closed form or by quadrature."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from normfree.theory.errors import FloatArray, unknown_name, value_error

_Function = Callable[[FloatArray], FloatArray]
Activation = str | _Function


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
        raise value_error("a finite std > 0", std, "pass the standard deviation of the pre-activation")
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
        raise value_error(f"an elementwise activation, finite on ±{12 * std:g}", got, "pass a function of one array")
    slopes = derivative(x) if derivative else _difference(function, x, kinks)
    average = float(weight @ value)
    # Centred before squaring: second - mean² would lose the digits of a nearly constant activation.
    return Moments(average, float(weight @ value**2), float(weight @ (value - average) ** 2), float(weight @ slopes**2))


def _gain(moment: float, second: float, what: str) -> float:
    if moment <= 1e-24 * second:  # the variance of a constant, up to rounding
        raise value_error(f"an activation with {what} > 0", moment, "use one that is not constant")
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
