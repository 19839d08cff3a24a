"""Fan-in and fan-out of layers, and fan-out with stride and padding taken into account."""

import math
from collections.abc import Sequence

import numpy as np

from normfree.theory.errors import FloatArray, require_positive, value_error


def _per_group(channels: int, kernel: Sequence[int], groups: int) -> int:
    require_positive(channels=channels, groups=groups, **{f"kernel size {i}": k for i, k in enumerate(kernel, 1)})
    if channels % groups:
        raise value_error(f"channels divisible by {groups} groups", channels, "change the groups or the channels")
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
    require_positive(size=size, kernel=kernel, stride=stride, dilation=dilation)
    if padding < 0:
        raise value_error("padding of at least 0", padding, "check the padding of the layer")
    free = size + 2 * padding - dilation * (kernel - 1) - 1
    if free < 0:
        raise value_error(f"an input of at least {size - free} positions", size, "enlarge the input or the padding")
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
        raise value_error(expected, variance.shape, "pass the map at the output of the convolution that has these taps")
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
        raise value_error("a variance map with mean > 0", float(variance.mean()), "pass a gradient that is not 0")
    return float(at_input.mean() / variance.mean())


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
    taps = float(_per_group(out_channels, (), groups))
    settings = (size, kernel, stride, padding, dilation)
    axes = [(setting,) * len(kernel) if isinstance(setting, int) else tuple(setting) for setting in settings]
    if any(len(axis) != len(kernel) for axis in axes):
        raise value_error(f"{len(kernel)} entries, as in kernel", axes, "pass one number or one for each axis")
    for length, *layer in zip(*axes, strict=True):
        taps *= float(tap_matrix(length, *layer, circular=circular).sum()) / length
    return taps
