"""The settings that a search varies: ranges and lists of choices, from texts such as 'lr=0.001..1:log'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from types import NoneType
from typing import Any, get_args

from normfree.train.config import NOT_IN_FINGERPRINT, TrainConfig
from normfree.train.setting_fields import field_types, require_known

_FIXED = ("data", "validation")  # scores on other validation data cannot be compared
_SAMPLE = "'lr=0.001..1:log', 'batch_size=32..256:step=32' or 'method=fixup,batchnorm'"


@dataclass(frozen=True)
class SearchRange:
    """A number between two bounds, both included; on a logarithmic scale, or in steps from the lower one."""

    name: str
    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def suggest(self, trial: Any) -> Any:
        """Return the value of an Optuna trial."""
        if self.whole:
            step = 1 if self.step is None else int(self.step)
            return int(trial.suggest_int(self.name, int(self.low), int(self.high), step=step, log=self.log))
        return float(trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log))

    @property
    def first(self) -> Any:
        """The lower bound."""
        return int(self.low) if self.whole else self.low

    @property
    def grid(self) -> tuple[Any, ...] | None:
        """All values in order; None if they cannot be listed."""
        if self.step is None:
            return None
        values = [self.low + i * self.step for i in range(round((self.high - self.low) / self.step) + 1)]
        return tuple(map(int, values)) if self.whole else tuple(values)

    def parse(self, value: Any) -> Any:
        """Return the value of the setting for a value of the trial."""
        return value

    def __str__(self) -> str:
        """Write the range as it is parsed."""
        kind = ":log" if self.log else "" if self.step is None else f":step={self.step:g}"
        return f"{self.name}={self.low:g}..{self.high:g}{kind}"


@dataclass(frozen=True)
class SearchChoices:
    """One of several values, each as it is written after `--set NAME=`."""

    name: str
    choices: tuple[str, ...]

    def suggest(self, trial: Any) -> Any:
        """Return the choice of an Optuna trial."""
        return trial.suggest_categorical(self.name, self.choices)

    @property
    def first(self) -> Any:
        """The value of the setting for the first choice."""
        return self.parse(self.choices[0])

    @property
    def grid(self) -> tuple[str, ...]:
        """All choices."""
        return self.choices

    def parse(self, value: str) -> Any:
        """Return the value of the setting for a choice."""
        return TrainConfig.parse_changes([f"{self.name}={value}"])[self.name]

    def __str__(self) -> str:
        """Write the choices as they are parsed."""
        return f"{self.name}={(';' if any(',' in one for one in self.choices) else ',').join(self.choices)}"


SearchSpace = tuple[SearchRange | SearchChoices, ...]


def parse_search(texts: Iterable[str]) -> SearchSpace:
    """Parse the settings of a search.

    Choices are separated by commas, or by semicolons if one of them has a comma of its own.

    >>> [str(one) for one in parse_search(["lr=0.001..1:log", "batch_size=32..96:step=32", "method=fixup,batchnorm"])]
    ['lr=0.001..1:log', 'batch_size=32..96:step=32', 'method=fixup,batchnorm']

    Raises:
        ValueError: if there is no setting, one is unknown or repeated, or its range or choices are wrong.
    """
    found: dict[str, SearchRange | SearchChoices] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise ValueError(f"expected a search such as {_SAMPLE}, got '{text}'")
        require_known([name], field_types(TrainConfig))
        if name in found:
            raise ValueError(f"expected each setting once in a search, got '{name}' twice; leave one out")
        if name in NOT_IN_FINGERPRINT or name in _FIXED:
            why = "scores on other data cannot be compared" if name in _FIXED else "it changes no score"
            raise ValueError(f"expected a setting to search for, got '{name}'; {why}")
        found[name] = _range(name, values) if ".." in values else _choices(name, values)
    if not found:
        raise ValueError(f"expected a setting to search for, such as {_SAMPLE}, got none")
    return tuple(found.values())


def _range(name: str, text: str) -> SearchRange:
    """Parse LOW..HIGH, LOW..HIGH:log or LOW..HIGH:step=N."""
    hint = field_types(TrainConfig)[name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if kinds not in ([int], [float]):
        raise ValueError(f"expected choices for '{name}', which is no number, got the range '{text}'; list the values")
    whole = kinds == [int]
    bounds, _, option = text.partition(":")
    low, high = (_number(name, part, whole) for part in bounds.split("..", 1))
    if low >= high:
        raise ValueError(f"expected a range of '{name}' from low to high, got {low:g}..{high:g}; swap or widen it")
    if option == "log":
        if low <= 0:
            raise ValueError(f"expected a logarithmic range of '{name}' above 0, got {low:g}; raise its lower bound")
        return SearchRange(name, low, high, log=True, whole=whole)
    if not option:
        return SearchRange(name, low, high, whole=whole)
    if not option.startswith("step="):
        raise ValueError(f"expected 'log' or 'step=N' after the range of '{name}', got '{option}'")
    step = _number(name, option.removeprefix("step="), whole)
    if step <= 0 or not math.isclose(round((high - low) / step) * step, high - low, rel_tol=1e-9):
        raise ValueError(f"expected a step of '{name}' that divides {low:g}..{high:g}, got {step:g}")
    return SearchRange(name, low, high, step=step, whole=whole)


def _number(name: str, text: str, whole: bool) -> float:
    try:
        number = float(int(text)) if whole else float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"expected a {'whole' if whole else 'finite'} number in the range of '{name}', got '{text}'")
    return number


def _choices(name: str, text: str) -> SearchChoices:
    choices = tuple(part.strip() for part in text.split(";" if ";" in text else ","))
    if len(set(choices)) < 2 or len(set(choices)) < len(choices):
        raise ValueError(f"expected at least two choices for '{name}', each once, got '{text}'; a range is LOW..HIGH")
    found = SearchChoices(name, choices)
    for choice in choices:
        found.parse(choice)
    return found


def require_valid(config: TrainConfig, space: SearchSpace) -> None:
    """Raise `ValueError` if a bound or a choice is out of the range of its setting."""
    for one in space:
        if isinstance(one, SearchRange):
            ends: list[Any] = [int(end) if one.whole else end for end in (one.low, one.high)]
        else:
            ends = [one.parse(choice) for choice in one.choices]
        for value in ends:
            config.with_changes(**{one.name: value})


def grid_of(space: SearchSpace) -> dict[str, list[Any]]:
    """Return the values of every setting.

    Raises:
        ValueError: if a range has no step.
    """
    grid: dict[str, list[Any]] = {}
    for one in space:
        if one.grid is not None:
            grid[one.name] = list(one.grid)
        elif isinstance(one, SearchRange):
            low, high = (repr(float(bound)).removesuffix(".0") for bound in (one.low, one.high))
            raise ValueError(
                f"expected choices or a step for '{one.name}' in a grid, got '{one}'; list its values, as in "
                f"{one.name}={low},{high}"
            )
    return grid


def grid_size(space: SearchSpace) -> int:
    """Count the points of a grid."""
    return len(list(product(*grid_of(space).values())))


def texts_of(space: SearchSpace) -> Sequence[str]:
    """Write a search as it is parsed."""
    return [str(one) for one in space]
