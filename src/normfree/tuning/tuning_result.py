"""The result of `tune`: its trials, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from normfree.report.tables import compact
from normfree.tuning.study import Metric

TrialStatus = Literal["finished", "pruned", "diverged", "refused", "unfinished"]


@dataclass(frozen=True, kw_only=True)
class TunedTrial:
    """One trial.

    Attributes:
        number: Its number, from 0.
        values: The searched settings by name; a choice as it is written after `--set NAME=`.
        status: 'finished', 'pruned', 'diverged', 'refused' if its settings exclude each other, or 'unfinished'.
        score: The validation score of its last epoch; None without one. A diverged trial has None here, although the
            sampler counts it as an accuracy of 0 or an infinite loss.
        scores: The validation score after each epoch.
        test: Test accuracy of a finished trial. It plays no part in the choice.
        seconds: Training time; None if it is not known.
        folder: Name of the folder of its run.
        reason: Why the settings were refused.
    """

    number: int
    values: dict[str, Any]
    status: TrialStatus
    score: float | None
    scores: tuple[float, ...] = ()
    test: float | None = None
    seconds: float | None = None
    folder: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Tuning:
    """The result of `tune`.

    Attributes:
        trials: All trials in order.
        search: The searched settings with their ranges, as texts.
        metric: The validation score that was compared, 'accuracy' or 'loss'.
        total: The number of trials that were asked for.
        settings: The settings that all trials share.
        signal: The number of the Unix signal that stopped the search early; else None.
    """

    trials: tuple[TunedTrial, ...]
    search: tuple[str, ...]
    metric: Metric
    total: int
    settings: dict[str, Any] = field(default_factory=dict)
    signal: int | None = None

    def __repr__(self) -> str:
        best = "" if self.best is None else f", best {self.metric} {compact(self.best.score or 0.0)}"
        return f"Tuning({' '.join(self.search)}: {self.finished} of {self.total} trials{best})"

    @property
    def finished(self) -> int:
        """The number of trials that ended."""
        return sum(trial.status != "unfinished" for trial in self.trials)

    @property
    def best(self) -> TunedTrial | None:
        """The finished trial with the best validation score, the first of several; None if none finished."""
        sign = 1 if self.metric == "accuracy" else -1
        done = [trial for trial in self.trials if trial.status == "finished" and trial.score is not None]
        return max(done, key=lambda trial: (sign * (trial.score or 0.0), -trial.number), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the search as plain data, with the best trial under 'best'."""
        return {**asdict(self), "best": None if self.best is None else asdict(self.best)}


def values_texts(trials: Sequence[TunedTrial], name: str) -> list[str]:
    """Write the values of one setting, rounded."""
    found = [trial.values.get(name, "") for trial in trials]
    return [compact(value) if isinstance(value, float) else str(value) for value in found]
