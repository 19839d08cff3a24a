"""The page of a run and the page over many runs, from plain records and without torch; and the table of runs."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from normfree.report.page import Card, Page, Section
from normfree.report.panels import Curve, Panel
from normfree.report.tables import Column, Link, Rating, Table, compact
from normfree.report.terminal import duration, percent
from normfree.train.run.result_file import is_guess
from normfree.train.run.run_list import WatchedRun
from normfree.train.run.training_curves import training_panels

PAGE, SIGNAL = "page.html", "signal.jsonl"  # in the folder of a run
REFRESH = 5  # seconds after which the page of a run that trains loads itself again
_MARKS = {"finished": "✓ ", "stopped": "◐ ", "unfinished": "◐ ", "diverged": "✗ ", "damaged": "✗ "}
_SIGNALS = 5  # measurements of the signal on a page, the first and the last among them
_CURVES = 32  # runs whose curves are drawn over each other; no more can be distinguished
_COLUMNS = ("run", "state", "epoch", "loss", "training", "validation", "test", "speed", "left", "updated")
EXPENDABLE = ("speed", "loss", "training", "test", "updated", "left", "epoch", "validation")
"""The columns of `runs_table` that a narrow terminal leaves out, the first one first."""


def judge_run(run: WatchedRun) -> tuple[Rating, str, str]:
    """Judge a run in words: a rating, a headline, and a sentence."""
    guess = math.log(run.classes) if run.classes > 1 else math.inf
    name, (loss, accuracy) = _judged(run)
    beside = f"The {name} loss is {loss:.4g}"
    if guess < math.inf:
        beside += f"; a guess among {run.classes:,} {'tokens' if run.unit == 'tokens' else 'classes'} has {guess:.4g}"
    guesses = run.classes > 1 and not math.isnan(loss) and is_guess(loss, accuracy, run.classes, run.unit)
    if run.state == "damaged":
        return "bad", "damaged", run.note
    if run.state == "diverged":
        return "bad", "diverged", "The loss is no longer finite, or above the limit. Try a lower learning rate."
    if run.state == "finished":
        return ("warn", "finished at chance", f"{beside}.") if guesses else ("good", "finished", f"{beside}.")
    if run.state == "starting" or run.loss is None:
        return "info", run.state, "No step has been reported yet."
    if run.state != "running":
        return "warn", run.state, "Continue it with: normfree train --resume FOLDER"
    if not guesses:
        return "good", "learning", f"{beside}."
    young = (run.epoch or 0.0) < 1
    return ("info", "too early to tell", f"{beside}.") if young else ("warn", "not learning so far", f"{beside}.")


def _judged(run: WatchedRun) -> tuple[str, tuple[float, float]]:
    """Return the score that says most about the model, with its name."""
    for name, found in (("test", run.test), ("validation", run.validation)):
        if found is not None:
            return name, found
    return "training", tuple(math.nan if value is None else value for value in (run.loss, run.accuracy))  # type: ignore[return-value]


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
    ppl = f", ppl {_perplexity(run.validation[0])}" if run.validation and run.unit == "tokens" else ""
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


def _perplexity(loss: float) -> str:
    return compact(math.exp(min(loss, 700)))


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


# The page of one run


def run_page(
    run: WatchedRun,
    name: str,
    records: Sequence[Mapping[str, Any]],
    signals: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
) -> Page:
    """Make the page of a run: a verdict, its numbers, its curves and its signal over depth.

    Args:
        run: How far it is.
        name: Its name.
        records: Its metrics.
        signals: The lines of its signal.jsonl.
        settings: The settings to list.
    """
    shown = list(records)
    if run.is_alive and run.epoch is not None and (not shown or run.epoch > shown[-1].get("epoch", 0)):
        shown.append({"epoch": run.epoch, "train_loss": run.loss, "train_accuracy": run.accuracy})  # so far
    size = f", {run.parameters:,} parameters" if run.parameters else ""
    rows = tuple((key, str(value)) for key, value in (settings or {}).items())
    table = Table("Settings that differ from their defaults", (Column("setting"), Column("value")), rows)
    return Page(
        title=name,
        subtitle=f"{run.model} ({run.method}) on {run.data}, {run.epochs} epochs{size}.",
        cards=tuple(_cards(run, signals)),
        panels=training_panels(shown),
        sections=_signal_sections(signals),
        tables=(table,) if rows else (),
        notes=() if shown else ("The curves begin when training does.",),
        refresh=REFRESH if run.is_alive else 0,
        written=time.time(),
    )


def _cards(run: WatchedRun, signals: Sequence[Mapping[str, Any]]) -> list[Card]:
    rating, headline, text = judge_run(run)
    if run.is_alive and headline != run.state:
        headline = f"{run.state}: {headline}"
    cards = [Card("verdict", rating, headline, text)]
    if run.epoch is not None:
        left = "" if run.left is None else f"about {duration(run.left)} left, "
        so_far = "" if run.seconds is None else f"{duration(run.seconds)}{' so far' if run.is_alive else ''}"
        speed = f"{run.throughput:,.0f} {run.unit}/s" if run.throughput else ""
        done = f"epoch {run.epoch:.3g} of {run.epochs}"
        cards.append(Card("progress", "info", done, ", ".join(filter(None, (f"{left}{so_far}", speed)))))
    training = None if run.loss is None or run.accuracy is None else (run.loss, run.accuracy)
    for name, score in (("training", training), ("validation", run.validation), ("test", run.test)):
        if score is not None:
            ppl = f", perplexity {_perplexity(score[0])}" if run.unit == "tokens" and name != "training" else ""
            bleu = f", BLEU {run.bleu:.2f}" if run.bleu is not None and name == "test" else ""
            cards.append(Card(name, "info", f"{percent(score[1], digits=2)}", f"loss {score[0]:.4g}{ppl}{bleu}"))
    if signals and signals[0]["epoch"] == 0:  # the words of a verdict are about the start of training
        first, last = signals[0], signals[-1]
        good: Rating = "good" if first["status"] == "preserved" else "info" if first["status"] == "growing" else "warn"
        change = f"forward ×{last['forward_in_all']:.3g} over all blocks, gradient ×{last['backward_in_all']:.3g}"
        text = f"After epoch {last['epoch']}: {change}." if last["epoch"] else f"{first['sentence']}."
        cards.append(Card("signal", good, f"{first['status']} at the start", text))
    return cards


def _signal_sections(signals: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    """Draw the signal over depth at a few moments, the first and the last among them."""
    latest = sorted({signal["step"]: signal for signal in signals}.values(), key=lambda signal: signal["step"])
    chosen = dict.fromkeys(round(i * (len(latest) - 1) / (_SIGNALS - 1)) for i in range(_SIGNALS)) if latest else ()
    drawn = [latest[i] for i in chosen]
    panels = []
    for title, key in (
        ("forward: variance of the signal", "forward"),
        ("backward: variance of its gradient", "backward"),
    ):
        curves = [
            Curve(f"epoch {signal['epoch']:.4g}" if signal["epoch"] else "at the start", tuple(signal[key]))
            for signal in drawn
            if signal[key]
        ]
        if curves:
            panels.append(Panel(title, tuple({curve.name: curve for curve in curves}.values()), "variance"))
    if not panels:
        return ()
    text = (
        "A healthy network keeps the variance within a few powers of ten over all blocks. The gradient starts at "
        "random at the output.",
    )
    return (Section("Signal over depth", text, tuple(panels), name="signal"),)


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
