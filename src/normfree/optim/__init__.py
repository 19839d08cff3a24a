"""Parameter groups, learning-rate schedules, gradient clipping, and the optimizer on one vector."""

from normfree.optim.clipping import agc_parameters, clip_adaptively_, clip_by_norm_, clip_grad_agc_, clip_grad_norm_
from normfree.optim.learning_rates import Schedule, param_groups
from normfree.optim.master_weights import MasterWeights, UpdateRule

__all__ = [
    "MasterWeights",
    "Schedule",
    "UpdateRule",
    "agc_parameters",
    "clip_adaptively_",
    "clip_by_norm_",
    "clip_grad_agc_",
    "clip_grad_norm_",
    "param_groups",
]
