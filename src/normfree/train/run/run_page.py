"""The state, the verdict, the curves and the page of a run: from its records, without torch."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from normfree.report.page import Card, Page, Section
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Rating, Table, compact
from normfree.report.terminal import duration, percent
from normfree.storage.provenance import without_folders
from normfree.train.run.run_records import is_guess

REFRESH = 5  # seconds after which the page of a run that trains loads itself again
_SIGNALS = 5  # measurements of the signal on a page, the first and the last among them
# The keys of a record by the name of their curve. A record has an `epoch`; any other key may be missing.
_LOSSES = {"training": "train_loss", "validation": "validation_loss"}
_ACCURACIES = {"training": "train_accuracy", "validation": "validation_accuracy"}
_RATES = {"learning rate": "lr"}
_STEEP = 30.0  # a loss that changes by more than this factor gets a logarithmic axis
_POINTS = 2000  # of a curve; the plot has no more columns of pixels
_SMALL = 0.62  # the width of the learning rate relative to the others


# The state

RunState = Literal["starting", "running", "finished", "stopped", "diverged", "unknown", "damaged"]
"""The state of a run. 'unknown' has not ended, and its lock cannot be read; 'starting' has taken no step yet."""


_STATES: dict[str, RunState] = {
    "finished": "finished",
    "diverged": "diverged",
    "interrupted": "stopped",
}  # by the status of a result


@dataclass(frozen=True, kw_only=True)
class WatchedRun:
    """The state and the numbers of a run, from its files; None for those that they lack.

    Attributes:
        folder: The folder of the run.
        state: See `RunState`.
        note: Why the folder is damaged, or which signal stopped the run.
        model, method, data: The main settings.
        epochs: The epochs of the whole run.
        epoch: The epochs done, with a fraction.
        loss, accuracy: The means of training in the last epoch.
        validation, test: The loss and the accuracy on these data.
        bleu: BLEU of the test sentences of a translation.
        throughput: Images or target tokens per second, the `unit`.
        classes: The number of classes, or of tokens in the vocabulary; 0 if it is not known.
        parameters: The number of parameters.
        seconds: The time of the run so far.
        left: The seconds that are left.
        updated: When the run last wrote one of its files, in seconds since 1970.
    """

    folder: Path
    state: RunState
    note: str = ""
    model: str = ""
    method: str = ""
    data: str = ""
    epochs: int | None = None
    epoch: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    validation: tuple[float, float] | None = None
    test: tuple[float, float] | None = None
    bleu: float | None = None
    throughput: float | None = None
    unit: str = "images"
    classes: int = 0
    parameters: int | None = None
    seconds: float | None = None
    left: float | None = None
    updated: float = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether a process works on the run."""
        return self.state in ("starting", "running")


def describe_run(
    folder: Path,
    config: Mapping[str, Any],
    last: Mapping[str, Any],
    result: Mapping[str, Any],
    now: Mapping[str, Any],
    updated: float,
) -> WatchedRun:
    """Describe a run by its records, each of which may be empty; `with_state` adds whether it is running.

    Args:
        folder: The folder of the run.
        config: The settings.
        last: The last line of the metrics.
        result: The content of result.json.
        now: The content of progress.json.
        updated: When the last of these was written.
    """
    status = result.get("status")
    if status in ("finished", "diverged") or _number(now.get("step")) is None:
        now = {}  # left by a process that was killed at its end
    unit = "tokens" if "tokens_per_second" in {**result, **last, **now} else "images"
    known = {**last, **result, **now}  # a later record overrides an earlier one
    return WatchedRun(
        folder=folder,
        state=_STATES.get(str(status), "unknown"),
        note=f"signal {result['signal']}" if isinstance(result.get("signal"), int) else "",
        **{name: str(config.get(name, "")) for name in ("model", "method", "data")},
        epochs=_count(config.get("epochs")),
        epoch=_number(now.get("epoch", result.get("epochs", last.get("epoch")))),
        loss=_number(known.get("train_loss")),
        accuracy=_number(known.get("train_accuracy")),
        validation=_score(result.get("validation")) if result and not now else _logged(now) or _logged(last),
        test=_score(result.get("test")),
        bleu=_number(result["bleu"].get("score")) if result.get("bleu") else None,
        throughput=_number(known.get(f"{unit}_per_second")),
        unit=unit,
        classes=_count(known.get("classes")) or 0,
        parameters=_count(known.get("parameters")),
        seconds=_number(known.get("seconds")),
        left=_number(now.get("seconds_left")),
        updated=updated,
    )


def with_state(run: WatchedRun, held: bool | None) -> WatchedRun:
    """Complete the state of a run that has not ended, given whether a process holds its lock."""
    if run.state not in ("unknown", "stopped"):
        return run
    if held:
        left = None if run.left is None else max(0.0, run.left - (time.time() - run.updated))
        return replace(run, state="starting" if run.epoch is None else "running", note="", left=left)
    return replace(run, state="unknown" if held is None else "stopped", left=None)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _number(value: object) -> float | None:
    """Return a number of a file, which may be forged; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _logged(record: Mapping[str, Any]) -> tuple[float, float] | None:
    return _score({"loss": record.get("validation_loss"), "accuracy": record.get("validation_accuracy")})


def _score(found: object) -> tuple[float, float] | None:
    values = [_number(found.get(name)) for name in ("loss", "accuracy")] if isinstance(found, dict) else [None]
    return None if None in values else (values[0], values[1])  # type: ignore[return-value]


# The verdict


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
    if run.state == "unknown":
        return "warn", run.state, "The run has not ended, and its lock cannot be read: it may be training or killed."
    if run.state == "stopped":
        folder = without_folders(str(run.folder))  # a page that is passed on does not tell where it was
        return "warn", run.state, f"Continue it with: normfree train --resume {shlex.quote(folder)}"
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


# The curves of a run


def write_curves(records: Sequence[Mapping[str, Any]], title: str, path: Path) -> Path | None:
    """Draw the metrics of a run into a .png or .svg file; return None without metrics or matplotlib.

    A record may hold only some of the numbers, such as the training loss every few steps and the validation loss at
    the end of an epoch. Records without an epoch are left out. Accuracies are fractions of 1, drawn in per cent.
    """
    if not (panels := training_panels(records)):
        return None
    widths = [_SMALL if panel.title == "learning rate" else 1.0 for panel in panels]
    try:
        write_plot(panels, path, title=title, columns=3, widths=widths)
    except ImportError:  # a run does not need a picture
        return None
    return path


def training_panels(records: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    """Make panels of loss, accuracy and learning rate over the epochs; a panel without numbers is left out."""
    losses, accuracies, rates = (_curves(records, keys) for keys in (_LOSSES, _ACCURACIES, _RATES))
    epochs = [epoch for curve in (*losses, *accuracies, *rates) for epoch in curve.x]
    span = (min(epochs), max(epochs)) if epochs else ()  # so that an epoch is at the same place in all panels
    panels = []
    if losses:
        values = [v for curve in losses for v in curve.values if math.isfinite(v)]
        steep = bool(values) and min(values) > 0 and max(values) > _STEEP * min(values)
        note = _best(losses, "lowest")
        panels.append(Panel("loss", losses, "cross-entropy", "epoch", log_y=steep, x=span, note=note))
    if accuracies:
        in_percent = tuple(Curve(curve.name, tuple(100 * v for v in curve.values), curve.x) for curve in accuracies)
        note = _best(in_percent, "best")
        panels.append(Panel("accuracy", in_percent, "top-1 accuracy in %", "epoch", log_y=False, x=span, note=note))
    if rates:
        panels.append(Panel("learning rate", rates, "", "epoch", log_y=False, x=span))
    return tuple(panels)


def _curves(records: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> tuple[Curve, ...]:
    curves = []
    for name, key in keys.items():
        pairs = [(r["epoch"], r[key]) for r in records if _is_number(r.get("epoch")) and _is_number(r.get(key))]
        points = sorted((pair for pair in pairs if math.isfinite(pair[0])), key=lambda pair: pair[0])
        if points := _thinned(points):
            curves.append(Curve(name, tuple(float(v) for _, v in points), tuple(float(x) for x, _ in points)))
    return tuple(curves)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep at most about `_POINTS` points, the last one and all that are not finite among them."""
    every = max(1, math.ceil(len(points) / _POINTS))
    last = len(points) - 1
    return [p for i, p in enumerate(points) if (last - i) % every == 0 or not math.isfinite(p[1])]


def _best(curves: Sequence[Curve], word: str) -> str:
    """The best value of the last curve, which is the validation if there is one, in words."""
    curve = curves[-1]
    finite = [(value, epoch) for value, epoch in zip(curve.values, curve.x, strict=True) if math.isfinite(value)]
    if not finite:
        return ""
    value, epoch = (min if word == "lowest" else max)(finite, key=lambda pair: pair[0])
    return f"{word} {curve.name} {value:.4g}{' %' if word == 'best' else ''} at epoch {epoch:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# The page


def run_page(
    run: WatchedRun,
    name: str,
    records: Sequence[Mapping[str, Any]],
    signals: Sequence[Mapping[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
) -> Page:
    """Make the page of a run: a verdict, its numbers, its curves and its signal over depth.

    Args:
        run: Its state and numbers.
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
        notes=() if shown else (_no_curves(run),),
        refresh=REFRESH if run.is_alive else 0,
        written=time.time(),
    )


def _no_curves(run: WatchedRun) -> str:
    return "The curves begin when training does." if run.is_alive else "There are no curves, because no epoch ended."


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
            ppl = f", perplexity {perplexity(score[0])}" if run.unit == "tokens" and name != "training" else ""
            bleu = f", BLEU {run.bleu:.2f}" if run.bleu is not None and name == "test" else ""
            cards.append(Card(name, "info", f"{percent(score[1], digits=2)}", f"loss {score[0]:.4g}{ppl}{bleu}"))
    if signals and signals[0]["epoch"] == 0:  # the words of a verdict are about the start of training
        first, last = signals[0], signals[-1]
        good: Rating = "good" if first["status"] == "preserved" else "info" if first["status"] == "growing" else "warn"
        change = f"forward ×{last['forward_in_all']:.3g} over all blocks, gradient ×{last['backward_in_all']:.3g}"
        sentence = first["sentence"][:1].upper() + first["sentence"][1:]
        text = f"After epoch {last['epoch']}: {change}." if last["epoch"] else f"{sentence}."
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


def perplexity(loss: float) -> str:
    """Write the perplexity of a loss."""
    return compact(math.exp(min(loss, 700)))
