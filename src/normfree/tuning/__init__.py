"""Search for good settings of a training run, with the samplers and pruners of Optuna."""

from normfree.tuning.tuning import Tuning, tune

__all__ = ["Tuning", "tune"]
