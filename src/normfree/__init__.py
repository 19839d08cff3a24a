"""normfree trains deep residual networks without normalization layers, and shows why it works.

Every public name loads on first use, so importing the package does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name → the module that defines it; this table is the whole public face.
_PUBLIC = {
    "ResidualPlan": "normfree.plan",
    "Monitor": "normfree.diagnostics",
    "build": "normfree.models",
    "diagnose": "normfree.diagnostics",
    "discover": "normfree.graph",
    "initialize_": "normfree.methods",
    "param_groups": "normfree.optim",
    "register": "normfree.methods",
}

__all__ = [
    "Monitor",
    "ResidualPlan",
    "__version__",
    "build",
    "diagnose",
    "discover",
    "initialize_",
    "param_groups",
    "register",
]

if TYPE_CHECKING:
    from normfree.diagnostics import Monitor, diagnose
    from normfree.graph import discover
    from normfree.methods import initialize_, register
    from normfree.models import build
    from normfree.optim import param_groups
    from normfree.plan import ResidualPlan


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'normfree' has no attribute {name!r}; its public names are {', '.join(_PUBLIC)}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value  # the next access skips this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
