"""normfree trains deep residual networks without normalization layers, and shows why it works.

Every public name loads on first use, so importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

# Public name → the module that defines it; this table is the whole public face.
_PUBLIC = {
    "ResidualPlan": "normfree.plan",
    "Monitor": "normfree.diagnostics",
    "TrainConfig": "normfree.train",
    "build": "normfree.models",
    "clip_grad_agc_": "normfree.optim",
    "compare": "normfree.comparison",
    "convert": "normfree.conversion",
    "convert_": "normfree.conversion",
    "diagnose": "normfree.diagnostics",
    "discover": "normfree.graph",
    "evaluate": "normfree.train",
    "find_lr": "normfree.optim.rate_search",
    "fit": "normfree.train",
    "fold_": "normfree.conversion",
    "fold_batchnorm": "normfree.conversion",
    "initialize_": "normfree.methods",
    "load": "normfree.train",
    "param_groups": "normfree.optim",
    "recipe": "normfree.train",
    "register": "normfree.methods",
}

__all__ = [
    "Monitor",
    "ResidualPlan",
    "TrainConfig",
    "__version__",
    "build",
    "clip_grad_agc_",
    "compare",
    "convert",
    "convert_",
    "diagnose",
    "discover",
    "evaluate",
    "find_lr",
    "fit",
    "fold_",
    "fold_batchnorm",
    "initialize_",
    "load",
    "param_groups",
    "recipe",
    "register",
]

if TYPE_CHECKING:
    from normfree.comparison import compare
    from normfree.conversion import convert, convert_, fold_, fold_batchnorm
    from normfree.diagnostics import Monitor, diagnose
    from normfree.graph import discover
    from normfree.methods import initialize_, register
    from normfree.models import build
    from normfree.optim import clip_grad_agc_, param_groups
    from normfree.optim.rate_search import find_lr
    from normfree.plan import ResidualPlan
    from normfree.train import TrainConfig, evaluate, fit, load, recipe


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'normfree' has no attribute {name!r}; its public names are {', '.join(_PUBLIC)}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value  # the next access skips this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
