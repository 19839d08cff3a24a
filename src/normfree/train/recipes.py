"""Recipes: named configurations, such as the experiments of the papers; recipes.toml has their settings.

`configuration` composes a recipe, a file of settings and single changes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from normfree.errors import unknown_name, wrong_argument
from normfree.train.config import TrainConfig

_FILE = Path(__file__).with_name("recipes.toml")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration with a one-line summary and its source."""

    name: str
    summary: str
    reference: str
    config: TrainConfig


@cache
def _read_recipes() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for name, table in tomllib.loads(_FILE.read_text(encoding="utf-8")).items():
        summary, reference, base = table.pop("summary"), table.pop("reference"), table.pop("base", None)
        start = TrainConfig() if base is None else found[base].config
        found[name] = Recipe(name=name, summary=summary, reference=reference, config=start.with_changes(**table))
    return found


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in the order of recipes.toml."""
    return dict(_read_recipes())


def recipe(name: str, **changes: Any) -> TrainConfig:
    """Return the configuration of a recipe, with changes.

    >>> recipe("fixup_cifar", lr=0.2).lr
    0.2

    Args:
        name: The recipe's name; see `normfree train --list`.
        changes: New values of settings, by name.

    Returns:
        The configuration.

    Raises:
        ValueError: If the recipe or a setting is unknown (the message names the closest one) or a value is bad.
    """
    known = _read_recipes()
    if not isinstance(name, str):
        raise wrong_argument("name", "the name of a recipe", name, "see normfree train --list")
    if name not in known:
        raise unknown_name("recipe", name, known)
    return known[name].config.with_changes(**changes)


def configuration(
    name: str | None = None,
    *,
    file: str | Path | None = None,
    changes: Iterable[str] = (),
    resume: str | Path | None = None,
    trust: bool = False,
) -> TrainConfig:
    """Compose a configuration as the command line does: a recipe, a file over it, and single changes over both.

    Args:
        name: The recipe; the defaults if None.
        file: A TOML file with some of the settings.
        changes: Single settings of the form 'name=value'.
        resume: The folder of a run to resume. Its configuration is the base if neither recipe nor file is given.
        trust: Whether the file or folder may name a model of any module, which is then imported.

    Returns:
        The configuration.

    Raises:
        ValueError: If a name is unknown (for a model's name the message says how to pass it), a value is bad, or the
            model's name needs `trust`.
        OSError: If the file cannot be read.
    """
    if resume is not None and name is None and file is None:
        from normfree.train.run.loading import read_config

        chosen = read_config(resume)
    else:
        if name is not None and name not in recipes():
            _refuse_model(name)
        chosen = TrainConfig() if name is None else recipe(name)
    if file is not None:
        chosen = TrainConfig.from_toml(file, base=chosen)
    changed = TrainConfig.parse_changes(changes)
    if "model" not in changed and (origin := file or resume) is not None:
        from normfree.models.third_party import require_trusted

        require_trusted(chosen.model, origin, trust)
    return chosen.with_changes(**changed)


def _refuse_model(name: str) -> None:
    """Raise `ValueError` if the name given as a recipe is that of a model; the message says how to pass a model."""
    from normfree.models import is_model_name
    from normfree.models.builder import is_foreign

    if is_foreign(name) or is_model_name(name):
        raise ValueError(f"expected a recipe, got the model '{name}'; give it as --model {name}, or see --list")
