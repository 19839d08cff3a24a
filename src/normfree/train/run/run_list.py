"""Find runs below folders, without torch, and show them in one table or on one page.

    runs = RunList([Path("runs")])
    for run in runs.read():  # cheap enough to ask again every second
        print(run.folder, run.state, run.epoch)

Nothing is written. Files may be damaged or forged; in a list, such a run becomes a `WatchedRun` that says so.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from normfree.report.page import Card, Page
from normfree.report.panels import Curve, Panel
from normfree.report.tables import Column, Link, Rating, Table, compact
from normfree.report.terminal import duration, percent
from normfree.storage.folder_lock import is_held
from normfree.storage.reading import from_json_values, parse_json, read_limited
from normfree.train.config import TrainConfig
from normfree.train.run.run_page import REFRESH, WatchedRun, describe_run, perplexity, training_panels, with_state
from normfree.train.run.run_records import (
    CONFIG,
    LOCK,
    METRICS,
    PAGE,
    PROGRESS,
    RESULT,
    check_config,
    read_last_line,
    read_result,
)
from normfree.train.setting_fields import parse_toml

_SIGNS = {CONFIG, METRICS, RESULT, LOCK}  # two of these, or one and a checkpoint, make a folder that of a run
_MOST = 100_000  # folders in which runs are looked for
_MARKS = {"finished": "✓ ", "stopped": "◐ ", "unknown": "◐ ", "diverged": "✗ ", "damaged": "✗ "}
_CURVES = 32  # runs whose curves are drawn over each other; no more can be distinguished
_COLUMNS = ("run", "state", "epoch", "loss", "training", "validation", "test", "speed", "left", "updated")
EXPENDABLE = ("speed", "loss", "training", "test", "updated", "left", "epoch", "validation")
"""The columns of `runs_table` that a narrow terminal leaves out, the first one first."""
_SEARCH_SHARE = 0.05  # the largest share of the time that is spent on looking for new runs


class RunList:
    """The runs below some folders. Files that did not change since the last reading are not read again.

    Args:
        folders: Folders of runs, or folders above them.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._found: list[Path] = []
        self._search_again = 0.0  # the time of the next search
        self._read: dict[Path, tuple[object, WatchedRun]] = {}  # by folder, with the state of its files
        self.complete = True  # False if there were too many folders to look into all of them

    def read(self) -> list[WatchedRun]:
        """Return the runs: those at work first, then by the time of their last files."""
        began = time.monotonic()
        if began >= self._search_again:
            self._found, self.complete = _search(self._folders)
            now = time.monotonic()
            self._search_again = now + (now - began) / _SEARCH_SHARE
        self._read = {folder: self._current(folder) for folder in self._found}  # forgets those that are gone
        # An age alone would not tell whether a process works on a run that has not ended.
        runs = [
            with_state(run, is_held(run.folder)) if run.state in ("unknown", "stopped") else run
            for _, run in self._read.values()
        ]
        return sorted(runs, key=lambda run: (not run.is_alive, -run.updated, run.folder))

    def _current(self, folder: Path) -> tuple[object, WatchedRun]:
        files, before = _identities(folder), self._read.get(folder)
        return before if before is not None and before[0] == files else (files, _read_files(folder, files))


# Looking for runs


def _search(folders: Sequence[Path]) -> tuple[list[Path], bool]:
    """Return the folders of runs at and below folders, and whether all were looked into; links are not followed."""
    found: dict[Path, Path] = {}
    left, seen = list(reversed(folders)), 0
    while left and seen < _MOST:
        folder, seen = left.pop(), seen + 1
        try:
            with os.scandir(folder) as entries:
                listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        except OSError:
            continue  # it was removed, or may not be read
        if _is_run(folder, listed):
            found.setdefault(folder.resolve(), folder)
        else:
            inner = sorted((name for name, is_folder in listed if is_folder and name[0] != "."), reverse=True)
            left += [folder / name for name in inner]
    return list(found.values()), not left


def _is_run(folder: Path, listed: Iterable[tuple[str, bool]]) -> bool:
    files = {name for name, is_folder in listed if not is_folder} & _SIGNS
    saved = any(is_folder and name.startswith("checkpoint-") for name, is_folder in listed)
    return len(files) + saved >= 2 or (files == {LOCK} and bool(is_held(folder)))


# Reading one run


def _identities(folder: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """Return the time, size and number of every file that is read, which change when the file does."""
    return tuple(_identity(folder / name) for name in (CONFIG, METRICS, RESULT, PROGRESS))


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read_files(folder: Path, files: Sequence[tuple[int, int, int] | None]) -> WatchedRun:
    """Read the files of a run; whether a process works on it is left open."""
    updated = max((found[0] for found in files if found is not None), default=0) / 1e9
    has_config, has_metrics, has_result, _ = (found is not None for found in files)
    try:
        result = from_json_values(read_result(folder / RESULT)) if has_result else {}
        config = result.get("config") or (_read_config(folder / CONFIG) if has_config else {})
        last = read_last_line(folder / METRICS) if has_metrics else {}
        now = _read_progress(folder / PROGRESS)
    except (ValueError, OSError) as error:
        return WatchedRun(folder=folder, state="damaged", note=" ".join(str(error).split()), updated=updated)
    return describe_run(folder, config, last, result, now, updated)


def _read_config(path: Path) -> dict[str, Any]:
    """Read the settings of a run as plain data, with today's defaults for those that are missing."""
    check_config(path)
    return {"epochs": TrainConfig.epochs, "data": TrainConfig.data, **parse_toml(read_limited(path), path)}


def _read_progress(path: Path) -> dict[str, Any]:
    """Read progress.json, which is not synced to the disk: after a power failure it may be anything."""
    try:
        found = from_json_values(parse_json(read_limited(path)))
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


# The table of runs


def runs_table(
    runs: Sequence[WatchedRun], names: Sequence[str], *, now: float | None = None, links_from: Path | None = None
) -> Table:
    """Make a table with a row for each run.

    Args:
        runs: The runs.
        names: Their names.
        now: The time from which ages count, in seconds since 1970.
        links_from: The folder of the page that links to the pages of the runs; None for no links.
    """
    now = time.time() if now is None else now
    rows = [_row(run, name, now) for run, name in zip(runs, names, strict=True)]
    used = [i for i, name in enumerate(_COLUMNS) if name in ("run", "state") or any(row[i] for row in rows)]
    styles: dict[str, dict[str, Any]] = {"run": {"style": "cyan"}, "state": {"marked": True}}
    columns = tuple(Column(_COLUMNS[i], **styles.get(_COLUMNS[i], {"justify": "right"})) for i in used)
    links = () if links_from is None else tuple(_links(run, links_from) for run in runs)
    shown = tuple(tuple(row[i] for i in used) for row in rows)
    return Table("", columns, shown, links=links if any(links) else ())


def _row(run: WatchedRun, name: str, now: float) -> tuple[str, ...]:
    done = "" if run.epoch is None else f"{run.epoch:.3g}"
    of = "" if run.epochs is None else f"/{run.epochs}"
    ppl = f", ppl {perplexity(run.validation[0])}" if run.validation and run.unit == "tokens" else ""
    test = percent(run.test[1]) if run.test else ""
    return (
        name,
        f"{_MARKS.get(run.state, '')}{run.state}",
        f"{done or '0'}{of}" if done or of else "",
        "" if run.loss is None else f"{run.loss:.4g}" if run.loss < 1e4 else compact(run.loss),
        percent(run.accuracy),
        f"{percent(run.validation[1])}{ppl}" if run.validation else "",
        test if run.bleu is None else f"BLEU {run.bleu:.1f}",
        f"{run.throughput:,.0f}/s" if run.throughput else "",
        "" if run.left is None else duration(run.left),
        age(now - run.updated) if run.updated else "",
    )


def age(seconds: float) -> str:
    """Write how long ago something was, in its largest unit.

    >>> [age(s) for s in (-3, 4.2, 150, 7300, 200000)]
    ['0 s ago', '4 s ago', '2 min ago', '2 h ago', '2 days ago']
    """
    for size, unit in ((172_800, "days"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // (86_400 if unit == 'days' else size):.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def run_names(folders: Sequence[Path]) -> list[str]:
    """Name runs by their folders, without the path that all have in common.

    >>> run_names([Path("runs/a"), Path("runs/b/c")]), run_names([Path("runs/a")])
    (['a', 'b/c'], ['a'])
    """
    if not folders:
        return []
    whole = [Path(os.path.abspath(folder)) for folder in folders]
    common = os.path.commonpath([folder.parent for folder in whole])
    names = (os.fsencode(folder.relative_to(common)).decode(errors="replace") for folder in whole)
    return [name.replace("\n", " ") for name in names]  # a name is one line


def _links(run: WatchedRun, start: Path) -> tuple[Link, ...]:
    path = run.folder / PAGE
    if not path.is_file():
        return ()
    address = quote(os.fsencode(os.path.relpath(path, start)))
    return (Link("page", address),)


# The page over many runs


def runs_page(
    runs: Sequence[WatchedRun], names: Sequence[str], curves: Mapping[Path, Sequence[Mapping[str, Any]]], folder: Path
) -> Page:
    """Make a page over many runs: a table with links to their own pages, and their curves over each other.

    Args:
        runs: The runs.
        names: Their names.
        curves: The metrics by folder, of the runs to draw; at most `drawn_runs`.
        folder: The folder of the page.
    """
    counts = Counter(run.state for run in runs)
    ratings: dict[str, Rating] = {"finished": "good", "diverged": "bad", "damaged": "bad", "stopped": "warn"}
    cards = tuple(
        Card(f"{state} runs", ratings.get(state, "info"), f"{count:,}") for state, count in counts.most_common()
    )
    by_title: dict[str, list[Curve]] = {}
    for run, name in zip(runs, names, strict=True):
        for panel in training_panels(curves.get(run.folder, ())):
            for curve in panel.curves:
                if panel.title != "learning rate":
                    by_title.setdefault(f"{curve.name} {panel.title}", []).append(Curve(name, curve.values, curve.x))
    units = {"loss": "cross-entropy", "accuracy": "top-1 accuracy in %"}
    order = ("validation accuracy", "validation loss", "training accuracy", "training loss")
    panels = tuple(
        Panel(title, tuple(by_title[title]), units[title.split()[-1]], "epoch", log_y=False)
        for title in order
        if title in by_title
    )
    note = f"The curves are those of {_CURVES} runs: of those at work first, then of those with the latest files."
    many = len(runs) > len(drawn_runs(runs)) >= _CURVES
    alive = any(run.is_alive for run in runs)
    return Page(
        title="Runs",
        cards=cards,
        panels=panels,
        summary=(runs_table(runs, names, links_from=folder),) if runs else (),
        notes=(note,) if many else (),
        refresh=2 * REFRESH if alive else 0,
        written=time.time(),
    )


def drawn_runs(runs: Sequence[WatchedRun]) -> list[WatchedRun]:
    """Return the runs whose curves a page draws: as many as can be distinguished, in the order given."""
    return [run for run in runs if run.state != "damaged"][:_CURVES]
