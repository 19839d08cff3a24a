"""`configuration`: a configuration composed of a recipe, a file and single changes, as the command line does it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from normfree.train.config import TrainConfig


def configuration(
    name: str | None = None,
    *,
    file: str | Path | None = None,
    changes: Iterable[str] = (),
    resume: str | Path | None = None,
) -> TrainConfig:
    """Compose a configuration as the command line does: a recipe, a file over it, and single changes over both.

    Args:
        name: The recipe; the defaults if None.
        file: A TOML file with some of the settings.
        changes: Single settings of the form 'name=value'.
        resume: The folder of a run to resume. Its configuration is the base if neither recipe nor file is given.

    Returns:
        The configuration.

    Raises:
        ValueError: If a name is unknown (for a model's name the message says how to pass it) or a value is bad.
        OSError: If the file cannot be read.
    """
    from normfree.train.recipes import recipe, recipes  # imported here because recipes are made of configurations

    if resume is not None and name is None and file is None:
        from normfree.train.run.loading import read_config  # imported here because it loads torch

        chosen = read_config(resume)
    else:
        if name is not None and name not in recipes():
            _refuse_model(name)
        chosen = TrainConfig() if name is None else recipe(name)
    if file is not None:
        chosen = TrainConfig.from_toml(file, base=chosen)
    return chosen.with_changes(**TrainConfig.parse_changes(changes))


def _refuse_model(name: str) -> None:
    """Raise `ValueError` if the name given as a recipe is that of a model; the message says how to pass a model."""
    from normfree.models import is_model_name  # imported here because it loads torch
    from normfree.models.foreign import is_foreign

    if is_foreign(name) or is_model_name(name):
        raise ValueError(f"expected a recipe, got the model '{name}'; give it as --model {name}, or see --list")
