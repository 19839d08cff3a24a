"""Recipes: named configurations, such as the experiments of the papers; recipes.toml has their settings."""

from __future__ import annotations

import tomllib
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
