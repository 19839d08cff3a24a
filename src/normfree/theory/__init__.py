"""Formulas of the papers: numbers in, numbers out, without networks or tensors. Tests compare the code with them."""

from normfree.theory.depth import (
    fixup_scale,
    k_n,
    nf_output_variance,
    normalized_variance,
    scalar_branch_update,
    weightnorm_norm_ratio,
)
from normfree.theory.fans import (
    conv_output_size,
    effective_fan_out,
    effective_taps,
    fan_in,
    fan_out,
    gradient_taps,
    tap_matrix,
)
from normfree.theory.gains import (
    Moments,
    backward_gain,
    forward_gain,
    moments,
    normprop_constants,
    selu_constants,
    variance_gain,
)

__all__ = [
    "Moments",
    "backward_gain",
    "conv_output_size",
    "effective_fan_out",
    "effective_taps",
    "fan_in",
    "fan_out",
    "fixup_scale",
    "forward_gain",
    "gradient_taps",
    "k_n",
    "moments",
    "nf_output_variance",
    "normalized_variance",
    "normprop_constants",
    "scalar_branch_update",
    "selu_constants",
    "tap_matrix",
    "variance_gain",
    "weightnorm_norm_ratio",
]
