"""Training: configurations and recipes, the training loop, and runs stored in folders.

Names load on first use, so that reading a configuration does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Recipe": "recipes",
    "RunFolder": "run.run_folder",
    "RunResult": "run.run_records",
    "Snapshot": "run.run_records",
    "TrainConfig": "config",
    "evaluate": "run.evaluation",
    "evaluate_translation": "run.evaluation",
    "fit": "engine.loop",
    "load": "run.loading",
    "read_config": "run.loading",
    "recipe": "recipes",
}
__all__ = [
    "Recipe",
    "RunFolder",
    "RunResult",
    "Snapshot",
    "TrainConfig",
    "evaluate",
    "evaluate_translation",
    "fit",
    "load",
    "read_config",
    "recipe",
]

if TYPE_CHECKING:
    from normfree.train.config import TrainConfig
    from normfree.train.engine.loop import fit
    from normfree.train.recipes import Recipe, recipe
    from normfree.train.run.evaluation import evaluate, evaluate_translation
    from normfree.train.run.loading import load, read_config
    from normfree.train.run.run_folder import RunFolder
    from normfree.train.run.run_records import RunResult, Snapshot


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'normfree.train' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    value = getattr(import_module(f"normfree.train.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
