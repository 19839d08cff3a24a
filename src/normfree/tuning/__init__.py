"""Search for good settings of a training run, with the samplers and pruners of Optuna."""

from normfree.tuning.tune_runs import tune
from normfree.tuning.tuning_result import Tuning

__all__ = ["Tuning", "tune"]
