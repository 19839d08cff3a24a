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

if TYPE_CHECKING:
    from normfree.train.config import TrainConfig as TrainConfig
    from normfree.train.engine.loop import fit as fit
    from normfree.train.recipes import Recipe as Recipe
    from normfree.train.recipes import recipe as recipe
    from normfree.train.run.evaluation import evaluate as evaluate
    from normfree.train.run.evaluation import evaluate_translation as evaluate_translation
    from normfree.train.run.loading import load as load
    from normfree.train.run.loading import read_config as read_config
    from normfree.train.run.run_folder import RunFolder as RunFolder
    from normfree.train.run.run_records import RunResult as RunResult
    from normfree.train.run.run_records import Snapshot as Snapshot


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'normfree.train' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    value = getattr(import_module(f"normfree.train.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
