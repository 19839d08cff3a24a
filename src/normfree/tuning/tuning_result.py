"""The result of `tune`: its trials and the best of them, as a table, pictures, a file and the options of a command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table, compact
from normfree.report.terminal import duration, percent
from normfree.storage.provenance import origin, without_folders
from normfree.storage.writing import explain_os_errors, write_sealed_json
from normfree.tuning.search_space import SearchRange, parse_search
from normfree.tuning.study import Metric

_SHOWN = 10  # trials in the table
NAME = "tuning"
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


def table(tuning: Tuning) -> Table:
    """Tabulate the best trials; trials that did not finish come last."""
    sign = 1 if tuning.metric == "accuracy" else -1
    ranked = sorted(
        tuning.trials,
        key=lambda t: (t.status != "finished", math.inf if t.score is None else -sign * t.score, t.number),
    )
    shown = ranked[:_SHOWN]
    names = [one.name for one in parse_search(tuning.search)]
    columns = (
        Column("trial", "right"),
        *(Column(name, "right", style="cyan") for name in names),
        Column(f"validation {tuning.metric}", "right"),
        Column("test accuracy", "right"),
        Column("epochs", "right"),
        Column("time", "right"),
        Column("status"),
    )
    texts = [_values_texts(shown, name) for name in names]
    rows = tuple(
        (
            str(trial.number),
            *(column[place] for column in texts),
            score_text(tuning, trial.score),
            percent(trial.test),
            str(len(trial.scores)),
            "" if trial.seconds is None else duration(trial.seconds),
            trial.status,
        )
        for place, trial in enumerate(shown)
    )
    counts = [f"{sum(t.status == status for t in tuning.trials)} {status}" for status in _statuses(tuning)]
    more = f" The {_SHOWN} best are shown." if len(ranked) > _SHOWN else ""
    caption = f"{', '.join(counts)}.{more} The best is chosen by validation {tuning.metric} alone."
    return Table(f"{tuning.finished} of {tuning.total} trials", columns, rows, caption=caption)


def _values_texts(trials: Sequence[TunedTrial], name: str) -> list[str]:
    """Write the values of one setting, rounded."""
    found = [trial.values.get(name, "") for trial in trials]
    return [compact(value) if isinstance(value, float) else str(value) for value in found]


def _statuses(tuning: Tuning) -> list[str]:
    found = {trial.status for trial in tuning.trials}
    return [status for status in get_args(TrialStatus) if status in found]


def score_text(tuning: Tuning, score: float | None) -> str:
    """Write a validation score."""
    if score is None:
        return ""
    return percent(score, digits=2) if tuning.metric == "accuracy" else compact(score)


def train_options(trial: TunedTrial, search: Sequence[str]) -> str:
    """Write the settings of a trial as the options of `normfree train`, with all digits.

    >>> trial = TunedTrial(number=0, values={"lr": 0.05, "method": "fixup:scalar_lr=1/L"}, status="finished", score=0.9)
    >>> train_options(trial, ["lr=0.01..1:log", "method=fixup:scalar_lr=1/L,batchnorm"])
    '--set lr=0.05 --set method=fixup:scalar_lr=1/L'
    """
    names = [one.name for one in parse_search(search)]
    return shlex.join(word for name in names for word in ("--set", f"{name}={trial.values[name]}"))


def panels(tuning: Tuning) -> tuple[Panel, ...]:
    """Draw the scores in the order of the trials, and against every searched setting."""
    accuracy = tuning.metric == "accuracy"
    label, better = ("validation accuracy in %", max) if accuracy else (f"validation {tuning.metric}", min)
    scored = [
        replace(trial, score=100 * trial.score if accuracy else trial.score)
        for trial in tuning.trials
        if trial.score is not None
    ]
    if not scored:
        return ()
    best, so_far = [], None
    for trial in scored:
        if trial.status == "finished" and trial.score is not None:
            so_far = trial.score if so_far is None else better(so_far, trial.score)
        best.append(math.nan if so_far is None else so_far)
    numbers = tuple(float(trial.number) for trial in scored)
    curves = [*_dots(scored, lambda trial: float(trial.number))]
    if not all(map(math.isnan, best)):
        curves.insert(0, Curve("best so far", tuple(best), x=numbers))  # below the dots
    found = [Panel("history", tuple(curves), y_label=label, x_label="trial", log_y=False, from_zero=False)]
    for one in parse_search(tuning.search):
        places: dict[Any, float] = {}
        if not isinstance(one, SearchRange):
            places = {choice: float(place) for place, choice in enumerate(one.choices, 1)}

        def position(trial: TunedTrial, name: str = one.name, places: dict[Any, float] = places) -> float:
            return places[trial.values[name]] if places else float(trial.values[name])

        drawn = [trial for trial in scored if one.name in trial.values]
        found.append(
            Panel(
                one.name,
                tuple(_dots(drawn, position)),
                y_label=label,
                x_label="" if places else one.name,
                log_y=False,
                from_zero=False,
                x=(one.low, one.high) if isinstance(one, SearchRange) else (),
                log_x=isinstance(one, SearchRange) and one.log,
                names=() if isinstance(one, SearchRange) else one.choices,
            )
        )
    return tuple(found)


def _dots(trials: Sequence[TunedTrial], position: Any) -> list[Curve]:
    """Return the scores of finished and of pruned trials as dots, each kind a curve."""
    found = []
    for status in ("finished", "pruned", "unfinished"):
        points = sorted((position(trial), trial.score) for trial in trials if trial.status == status)
        if points:
            x, y = zip(*points, strict=True)
            found.append(Curve(status, tuple(y), x=tuple(x), joined=False))
    return found


def save(tuning: Tuning, out: Path, *, command: str) -> list[Path]:
    """Write tuning.json, and tuning.png and tuning.svg if a trial has a score and matplotlib is installed.

    Raises:
        OSError: in one sentence, if a file cannot be written.
    """
    plain = {**replace(tuning, signal=None).to_json(), "command": command, **origin("cpu")}
    path = out / f"{NAME}.json"
    with explain_os_errors("the result of the search", path):
        write_sealed_json(path, without_folders(plain))
    written, drawn = [path], panels(tuning)
    for suffix in (".png", ".svg") if drawn else ():
        picture = out / f"{NAME}{suffix}"
        try:
            with explain_os_errors("the picture", picture):
                write_plot(drawn, picture, title=" ".join(tuning.search))
        except ImportError:
            break
        written.append(picture)
    return written
