"""The table, the pictures and the file of a search, and the command that uses its best settings."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from normfree.files import atomic_path, explain_os_errors, write_sealed_json
from normfree.provenance import origin, without_folders
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table, compact
from normfree.report.terminal import duration, percent
from normfree.tuning.search_space import SearchRange, parse_search
from normfree.tuning.tuning_result import TunedTrial, Tuning, values_texts

_SHOWN = 10  # trials in the table
NAME = "tuning"


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
    texts = [values_texts(shown, name) for name in names]
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


def _statuses(tuning: Tuning) -> list[str]:
    found = {trial.status for trial in tuning.trials}
    return [status for status in ("finished", "pruned", "diverged", "refused", "unfinished") if status in found]


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
            with explain_os_errors("the picture", picture), atomic_path(picture) as temporary:
                write_plot(drawn, temporary, title=" ".join(tuning.search))
        except ImportError:
            break
        written.append(picture)
    return written
