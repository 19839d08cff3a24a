"""Numbers in, numbers out: gains, fans, depth exponents and variance recursions, without a network or a tensor.

Positions are counted from 1: branch ``l`` of ``L`` in the network, branch ``b`` of ``B_k`` in stage ``k``.
"""

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
_Function = Callable[[FloatArray], FloatArray]
Activation = str | _Function
Rule = Callable[[int, int], tuple[float, float, float]]


def _refusal(expected: str, got: object, remedy: str) -> ValueError:
    return ValueError(f"expected {expected}, got {got!r}; {remedy}")


# Moments of activations


@dataclass(frozen=True)
class Moments:
    """Moments of an activation f at z ~ N(0, std²): mean E f, second E f², variance Var f, slope E f'²."""

    mean: float
    second: float
    variance: float
    slope: float


def selu_constants() -> tuple[float, float]:
    """Scale λ and α of SELU, for which zero mean and unit variance are a fixed point.

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


# Each activation beside its derivative: differences would cost three digits.
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
    """Points x and weights such that E g(x) = Σ weight·g(x) for x ~ N(0, std²), by Gauss-Legendre on panels.

    The panels halve towards 0, so that neither a kink there nor a feature of width 1/std costs accuracy.
    """
    halving = 12.0 * 0.5 ** np.arange(32)  # beyond 12 standard deviations lies a mass of 1e-33
    inner = np.array([kink / std for kink in kinks if abs(kink) < 12 * std])
    edges = np.unique(np.concatenate([-halving, [0.0], halving, inner]))
    nodes, weights = np.polynomial.legendre.leggauss(48)
    half = np.diff(edges)[:, None] / 2
    z = ((edges[:-1] + edges[1:])[:, None] / 2 + half * nodes).ravel()
    return std * z, (half * weights).ravel() * _normal_density(z)


def _difference(function: _Function, x: FloatArray, kinks: Sequence[float]) -> FloatArray:
    """Derivative by a fourth-order central difference whose stencil never reaches across a kink."""
    room = np.min([np.abs(x - kink) for kink in (0.0, *kinks)], axis=0)
    h = np.minimum(1e-3 * np.maximum(1.0, np.abs(x)), room / 4)
    near, far = function(x + h) - function(x - h), function(x + 2 * h) - function(x - 2 * h)
    return np.asarray((8 * near - far) / (12 * h), dtype=np.float64)


def moments(
    activation: Activation, std: float = 1.0, *, negative_slope: float = 0.01, kinks: Sequence[float] = ()
) -> Moments:
    """Moments of an activation at a centred normal input, in closed form or by quadrature in float64.

    E f = ∫ f(z) φ(z) dz with φ the density of N(0, std²); a callable takes and returns an array, and ``kinks`` names
    the points other than 0 where its slope jumps; ``negative_slope`` is read by "leaky_relu" alone.

    Reference: He et al. 2015, section 2.2; robust, section 2, equations 1 to 3.

    >>> moments("relu")
    Moments(mean=0.3989..., second=0.5, variance=0.3408..., slope=0.5)
    """
    if not (std > 0 and math.isfinite(std)):
        raise _refusal("a finite std > 0", std, "pass the standard deviation of the pre-activation")
    if isinstance(activation, str):
        if activation in _LINEAR:
            below = {"identity": 1.0, "relu": 0.0, "leaky_relu": negative_slope}[activation]
            mean, slope = (1 - below) * std / math.sqrt(2 * math.pi), (1 + below**2) / 2
            return Moments(mean, slope * std**2, slope * std**2 - mean**2, slope)
        if activation not in _SMOOTH:
            known = [*_LINEAR, *_SMOOTH]
            closest = difflib.get_close_matches(activation, known, n=1, cutoff=0.0)[0]
            remedy = f"did you mean {closest!r}? Any other function can be passed as a callable"
            raise _refusal(f"an activation among {', '.join(known)}", activation, remedy)
    x, weight = _quadrature(std, kinks)
    function, derivative = _SMOOTH[activation] if isinstance(activation, str) else (activation, None)
    value = np.asarray(function(x), dtype=np.float64)
    if value.shape != x.shape or not np.isfinite(value).all():
        got = f"shape {value.shape}" if value.shape != x.shape else "infinite or undefined values"
        raise _refusal(f"an elementwise activation, finite on ±{12 * std:g}", got, "pass a function of one array")
    slopes = derivative(x) if derivative else _difference(function, x, kinks)
    average = float(weight @ value)
    # Centred before squaring: second - mean² would lose the digits of a nearly constant activation.
    return Moments(average, float(weight @ value**2), float(weight @ (value - average) ** 2), float(weight @ slopes**2))


def _gain(moment: float, second: float, what: str) -> float:
    if moment <= 1e-24 * second:  # what rounding leaves of the variance of a constant
        raise _refusal(f"an activation with {what} > 0", moment, "use one that is not constant")
    return 1 / moment


def forward_gain(activation: Activation, *, negative_slope: float = 0.01) -> float:
    """Gain 1/E f², so that Var[W] = gain/fan_in keeps the second moment of the forward signal.

    Reference: He et al. 2015, equation 10; robust, section 2, equation 1.

    >>> forward_gain("relu")
    2.0
    """
    m = moments(activation, negative_slope=negative_slope)
    return _gain(m.second, m.second, "E f²")


def variance_gain(activation: Activation, *, negative_slope: float = 0.01) -> float:
    """Gain γ² = 1/Var f, so that centred weights with variance γ²/fan_in keep the variance of each channel.

    Reference: robust, section 2, equation 3, there γ² = 2/(1 - 1/π) for ReLU; Brock et al. 2021a.

    >>> round(variance_gain("relu") ** 0.5, 5)
    1.71286
    """
    m = moments(activation, negative_slope=negative_slope)
    return _gain(m.variance, m.second, "Var f")


def backward_gain(activation: Activation, *, negative_slope: float = 0.01) -> float:
    """Gain 1/E f'², so that Var[W] = gain/fan_out keeps the second moment of the gradient.

    Reference: He et al. 2015, equation 14; robust, section 2, equation 2.

    >>> backward_gain("relu")
    2.0
    """
    m = moments(activation, negative_slope=negative_slope)
    return _gain(m.slope, m.second, "E f'²")


def normprop_constants() -> tuple[float, float]:
    """Mean √(1/2π) and standard deviation √(½·(1 - 1/π)) of ReLU(N(0, 1)), which NormProp subtracts and divides by.

    Reference: normdead, section 2.3; Arpit et al. 2016.

    >>> normprop_constants()
    (0.3989..., 0.5838...)
    """
    relu = moments("relu")
    return relu.mean, math.sqrt(relu.variance)


# Fans and taps


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise _refusal(f"{name} of at least 1", value, f"check the {name} of the layer")


def _per_group(channels: int, kernel: Sequence[int], groups: int) -> int:
    _positive(channels=channels, groups=groups, **{f"kernel size {i}": k for i, k in enumerate(kernel, 1)})
    if channels % groups:
        raise _refusal(f"channels divisible by {groups} groups", channels, "change the groups or the channels")
    return channels // groups * math.prod(kernel)


def fan_in(in_channels: int, kernel: Sequence[int] = (), groups: int = 1) -> int:
    """Number of inputs that one output sees: in_channels/groups · Π kernel, with no kernel for a linear layer.

    Reference: robust, section 2, equation 1.

    >>> fan_in(64, (3, 3))
    576
    """
    return _per_group(in_channels, kernel, groups)


def fan_out(out_channels: int, kernel: Sequence[int] = (), groups: int = 1) -> int:
    """Number of outputs that one input reaches, away from borders and without stride: out_channels/groups · Π kernel.

    Reference: robust, section 2, equation 2.
    Differs: torch.nn.init leaves out the division by groups, which is what an input of a grouped layer reaches.

    >>> fan_out(64, (3, 3), groups=64)
    9
    """
    return _per_group(out_channels, kernel, groups)


def conv_output_size(size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """Length of a convolution's output along one axis: ⌊(size + 2·padding - dilation·(kernel - 1) - 1)/stride⌋ + 1.

    Reference: the definition, as in torch.nn.Conv1d.

    >>> conv_output_size(32, kernel=3, stride=2, padding=1)
    16
    """
    _positive(size=size, kernel=kernel, stride=stride, dilation=dilation)
    if padding < 0:
        raise _refusal("padding of at least 0", padding, "check the padding of the layer")
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if room < 0:
        raise _refusal(f"an input of at least {size - room} positions", size, "enlarge the input or the padding")
    return room // stride + 1


def tap_matrix(
    size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, *, circular: bool = False
) -> FloatArray:
    """Taps from input i to output o along one axis: T[o, i] = #{t < kernel: o·stride + t·dilation - padding = i}.

    With ``circular`` the equation holds modulo ``size``. Shape (output size, input size).

    Reference: none (ours); it counts what k² stands for in robust, section 2, equation 2.

    >>> tap_matrix(4, kernel=3, stride=2, padding=1)
    array([[1., 1., 0., 0.],
           [0., 1., 1., 1.]])
    """
    outputs = conv_output_size(size, kernel, stride, padding, dilation)
    reached = np.arange(outputs)[:, None] * stride + np.arange(kernel) * dilation - padding
    reached = reached % size if circular else reached
    return np.asarray((reached[:, :, None] == np.arange(size)).sum(axis=1), dtype=np.float64)


def gradient_taps(variance: FloatArray, tap_rows: FloatArray, tap_cols: FloatArray) -> FloatArray:
    """Map of gradient variance carried back through a convolution of unit d·Var[W]: T_rowsᵀ v T_cols.

    Takes v of shape (H_out, W_out), gives (H_in, W_in); the taps come from `tap_matrix`.

    Reference: none (ours); robust, section 2, equation 2 with position-dependent taps.

    >>> gradient_taps(np.ones((2, 2)), tap_matrix(2, 3, padding=1), tap_matrix(2, 1))
    array([[2., 2.],
           [2., 2.]])
    """
    if variance.shape != (len(tap_rows), len(tap_cols)):
        expected = f"a variance map of shape {(len(tap_rows), len(tap_cols))}"
        raise _refusal(expected, variance.shape, "pass the map at the output of the convolution that has these taps")
    return np.asarray(tap_rows.T @ variance @ tap_cols, dtype=np.float64)


def effective_taps(variance: FloatArray, tap_rows: FloatArray, tap_cols: FloatArray) -> float:
    """Mean number of taps t = mean(T_rowsᵀ v T_cols)/mean(v) that feed an input's gradient; Var[W] = γ/(d·t) keeps it.

    Reference: none (ours); in place of k² in robust, section 2, equation 2.

    >>> effective_taps(np.ones((2, 2)), tap_matrix(4, 1, stride=2), tap_matrix(4, 1, stride=2))
    0.25
    """
    carried = gradient_taps(variance, tap_rows, tap_cols)
    if not variance.mean() > 0:
        raise _refusal("a variance map with mean > 0", float(variance.mean()), "carry back a gradient that is not 0")
    return float(carried.mean() / variance.mean())


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
    """Fan-out corrected for stride and padding at a uniform gradient map: out_channels/groups · Π (ΣT/size) over axes.

    ``stride``, ``size`` of the input, ``padding`` and ``dilation`` are one number for all axes or one number each.

    Reference: none (ours); robust, section 2, equation 2 counts out_channels·k².

    >>> effective_fan_out(16, (1, 1), stride=2, size=8, padding=0)
    4.0
    """
    taps = float(_per_group(out_channels, (), groups))
    settings = (size, kernel, stride, padding, dilation)
    axes = [(setting,) * len(kernel) if isinstance(setting, int) else tuple(setting) for setting in settings]
    if any(len(axis) != len(kernel) for axis in axes):
        raise _refusal(f"{len(kernel)} entries, as in kernel", axes, "pass one number or one for each axis")
    for length, *layer in zip(*axes, strict=True):
        taps *= float(tap_matrix(length, *layer, circular=circular).sum()) / length
    return taps


# Fixup and weight normalization


def fixup_scale(branches: int, layers: int) -> float:
    """Factor L^(-1/(2m-2)) on the weights of a branch of m layers, one of L branches.

    Reference: fixup, section 3, equation 5 and rule 2.

    >>> fixup_scale(branches=16, layers=2)
    0.25
    """
    _positive(branches=branches)
    if layers < 2:
        remedy = "zero the branch's only layer or give the branch a second one: the exponent 1/(2m-2) has no value"
        raise _refusal("at least 2 weight layers in a branch", layers, remedy)
    return float(branches ** (-1 / (2 * layers - 2)))


def scalar_branch_update(a: Sequence[float], x: float = 1.0) -> float:
    """Size |ΔF|/η of the first step of F(x) = (Π a_i)·x at unit output gradient: Σ_i (x·Π_{k≠i} a_k)² = F² Σ 1/a_i².

    Reference: fixup, appendix B.2, equation 17; written as products, which is equation 18 where an a_i is 0.

    >>> scalar_branch_update([0.5, 0.0])
    0.25
    """
    if not a:
        raise _refusal("at least one layer", a, "pass the scale of every layer of the branch")
    return math.fsum((x * math.prod([*a[:i], *a[i + 1 :]])) ** 2 for i in range(len(a)))


def k_n(n: int) -> float:
    """Ratio K_n = E‖v‖²/‖u‖² of weight norm's Theorem 1, 2·S_{n-1}/S_n times ½·¾⋯(n-2)/(n-1)·π/2 or ⅔·⅘⋯(n-2)/(n-1).

    The first product is for odd n, the second for even n; S_n = 2π^((n+1)/2)/Γ((n+1)/2) is the area of Sⁿ in Rⁿ⁺¹.
    Both products are ∫ sinⁿ⁻¹ over [0, π/2] = ½√π·Γ(n/2)/Γ((n+1)/2), so K_n = 1 for every n.

    Reference: wninit, section 3, theorem 1, equation 3.
    Differs: the paper finds K_n = 1 empirically; it follows from the line above.

    >>> round(k_n(7), 12)
    1.0
    """
    if n < 2:
        raise _refusal("n of at least 2", n, "Theorem 1 is stated for two or more inputs")
    log_areas = math.lgamma((n + 1) / 2) - math.lgamma(n / 2) - math.log(math.pi) / 2
    product = math.fsum(math.log1p(-1 / (j + 1)) for j in range(2 - n % 2, n - 1, 2))
    return 2 * math.exp(log_areas + product) * (math.pi / 2 if n % 2 else 1.0)


# Variance over depth: a rule gives (c, a, β) of x_{l+1} = c·(a·x_l + β·f(x_l)) for branch l of L


def plain_rule(l: int, L: int) -> tuple[float, float, float]:
    """Plain sum (1, 1, 1): the variance doubles at each branch, 2^L in all.

    Reference: robust, section 2, equation 4; normdead, section 3.2.
    """
    return 1.0, 1.0, 1.0


def sqrt_half_rule(l: int, L: int) -> tuple[float, float, float]:
    """Halved sum (√½, 1, 1): the variance stays.

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
    hanin_bound(r)  # refuses an r for which the sum of the scales diverges
    return lambda l, L: (1.0, 1.0, r**l)


def shao_rule(l: int, L: int) -> tuple[float, float, float]:
    """Weighted sum (1, √(1-β²), β) with β² = 1/(l + L): the variance stays, all branches weigh the same at the end.

    Reference: normdead, section 4.1 (Shao et al. 2020).
    """
    return 1.0, math.sqrt(1 - 1 / (l + L)), math.sqrt(1 / (l + L))


def skipinit_rule(l: int, L: int) -> tuple[float, float, float]:
    """Branch that starts at zero (1, 1, 0), as in SkipInit, ReZero and Fixup: the variance stays.

    Reference: normdead, section 4.1 (De & Smith 2020); fixup, section 3, rule 1.
    """
    return 1.0, 1.0, 0.0


def weightnorm_rule(l: int, L: int) -> tuple[float, float, float]:
    """Equal shares (1, 1, 1/√B) of the B = L branches of one stage: the variance grows to (1 + 1/B)^B.

    Reference: wninit, section 4, theorem 3.
    """
    return 1.0, 1.0, L**-0.5


def hanin_bound(r: float) -> float:
    """Limit exp(r²/(1-r²)) that the variance of `hanin_rule` never passes, since Π(1 + r^(2l)) <= exp(Σ r^(2l)).

    Reference: normdead, section 3.2 (Hanin & Rolnick 2018).
    """
    if not 0 < r < 1:
        raise _refusal("0 < r < 1", r, "use for example r = 0.9, so that the scales r^l sum to a finite number")
    return math.exp(r**2 / (1 - r**2))


def weightnorm_norm_ratio(blocks: int) -> float:
    """Root mean square of ‖f(x)‖/‖x‖ over a stage of B blocks: (1 + 1/B)^(B/2), between √2 and √e.

    Reference: wninit, section 4, theorem 3, equation 7.
    """
    _positive(blocks=blocks)
    return float((1 + 1 / blocks) ** (blocks / 2))


def variance_by_depth(rule: Rule, branches: int, start: float = 1.0, branch_gain: float = 1.0) -> FloatArray:
    """Second moments v_1 … v_{L+1} along the branches: v_{l+1} = c²·(a² + branch_gain·β²)·v_l.

    Holds for a branch that multiplies the second moment by branch_gain and is uncorrelated with its shortcut.

    Reference: robust, section 3.1; wninit, section 4, theorem 3.

    >>> variance_by_depth(plain_rule, 3)
    array([1., 2., 4., 8.])
    """
    _positive(branches=branches)
    scalars = (rule(l, branches) for l in range(1, branches + 1))
    factors = [c**2 * (a**2 + branch_gain * beta**2) for c, a, beta in scalars]
    return np.asarray(np.cumprod([start, *factors]), dtype=np.float64)


def nf_expected_variance(stage_sizes: Sequence[int], beta: float) -> list[list[float]]:
    """Expected variance of the input of every branch by stage, of which α = 1/√E[Var] is made.

    1 at the first branch of all, 1 + β²·B_{k-1} at the first branch of a later stage, else 1 + (b-1)·β².

    Reference: normdead, section 4.2 and appendix A.3 (β scales the branch and α its input; Brock swaps the names).

    >>> nf_expected_variance([2, 3], beta=1.0)
    [[1.0, 2.0], [3.0, 2.0, 3.0]]
    """
    outputs = nf_output_variance(stage_sizes, beta)
    before = [1.0, *(stage[-1] for stage in outputs)]  # a transition still divides by what the last stage piled up
    return [[first, *stage[:-1]] for first, stage in zip(before, outputs, strict=False)]


def nf_output_variance(stage_sizes: Sequence[int], beta: float) -> list[list[float]]:
    """Expected variance 1 + b·β² of the output of every block by stage; transitions normalize and so restart it.

    Reference: normdead, section 4.2 and appendix A.3.

    >>> nf_output_variance([2, 3], beta=1.0)
    [[2.0, 3.0], [2.0, 3.0, 4.0]]
    """
    return _linear_growth(stage_sizes, [1 + beta**2] * len(stage_sizes), beta**2)


def normalized_variance(
    stage_sizes: Sequence[int], slope: float = 1 - 1 / math.pi, *, first_projects: bool = True
) -> list[list[float]]:
    """Channel variance of every block's output under batch norm and pre-activated transitions: (b + 1)·slope.

    The branch adds 2·Var ReLU = 1 - 1/π and a projection gives as much. Without ``first_projects`` the first block
    keeps its input of variance 1: 1 + b·slope in stage 1.

    Reference: normdead, section 4.2, figure 4.

    >>> normalized_variance([2, 1], slope=0.5)
    [[1.0, 1.5], [1.0]]
    """
    first = 2 * slope if first_projects else 1 + slope
    return _linear_growth(stage_sizes, [first] + [2 * slope] * (len(stage_sizes) - 1), slope)


def _linear_growth(stage_sizes: Sequence[int], firsts: Sequence[float], step: float) -> list[list[float]]:
    _positive(**{f"size of stage {k}": size for k, size in enumerate(stage_sizes, 1)})
    return [[first + b * step for b in range(size)] for first, size in zip(firsts, stage_sizes, strict=True)]
