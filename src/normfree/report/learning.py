"""The picture of a training run: loss, accuracy and learning rate over the epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot

# The keys of a record, by the name of their curve; `epoch` is its place, and a record may lack any of the others.
LOSSES = {"training": "train_loss", "validation": "validation_loss"}
ACCURACIES = {"training": "train_accuracy", "validation": "validation_accuracy"}
RATES = {"learning rate": "lr"}
TEST = {"loss": "test_loss", "accuracy": "test_accuracy"}  # measured once, so that it is said in words
_STEEP = 30.0  # a loss that falls or grows by more than this factor is drawn in the logarithm
_POINTS = 2000  # of a curve; the picture has no more columns
_SMALL = 0.62  # width of the learning rate to the others


def draw_learning(records: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw the metrics of a run into a .png or .svg file; accuracies are shares of 1, and drawn in per cent.

    Records may hold some of the numbers only, such as the training loss every few steps and the validation at the end
    of an epoch; those without an epoch are left out.

    Raises:
        ValueError: when there is nothing to draw, or on another suffix.
        ImportError: if matplotlib is not installed.
    """
    panels = learning_panels(records)
    if not panels:
        raise ValueError(
            f"expected records with an 'epoch' and numbers, got none in {len(records)}; train at least once"
        )
    widths = [_SMALL if panel.title == "learning rate" else 1.0 for panel in panels]
    write_plot(panels, path, title=title, columns=3, widths=widths)


def learning_panels(records: Sequence[Mapping[str, Any]]) -> tuple[Panel, ...]:
    """Loss, accuracy and learning rate over the epochs, each where there are numbers."""
    losses, accuracies, rates = (_curves(records, keys) for keys in (LOSSES, ACCURACIES, RATES))
    places = [place for curve in (*losses, *accuracies, *rates) for place in curve.x]
    span = (min(places), max(places)) if places else ()  # so that one epoch has the same place in all of them
    panels = []
    if losses:
        values = [v for curve in losses for v in curve.values if math.isfinite(v)]
        steep = bool(values) and min(values) > 0 and max(values) > _STEEP * min(values)
        note = _notes(_extreme(losses, "lowest"), _test(records, "loss"))
        panels.append(Panel("loss", losses, "cross-entropy", "epoch", log_y=steep, x=span, note=note))
    if accuracies:
        percent = tuple(Curve(curve.name, tuple(100 * v for v in curve.values), curve.x) for curve in accuracies)
        note = _notes(_extreme(percent, "best"), _test(records, "accuracy"))
        panels.append(Panel("accuracy", percent, "top-1 accuracy in %", "epoch", log_y=False, x=span, note=note))
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
    """About `_POINTS` points at most; the last one is kept, and what is not finite."""
    every = max(1, math.ceil(len(points) / _POINTS))
    last = len(points) - 1
    return [p for i, p in enumerate(points) if (last - i) % every == 0 or not math.isfinite(p[1])]


def _extreme(curves: Sequence[Curve], word: str) -> str:
    """The best value of the validation, else of the training, in words."""
    curve = curves[-1]
    finite = [(value, place) for value, place in zip(curve.values, curve.x, strict=True) if math.isfinite(value)]
    if not finite:
        return ""
    value, place = (min if word == "lowest" else max)(finite, key=lambda pair: pair[0])
    return f"{word} {curve.name} {value:.4g}{' %' if word == 'best' else ''} at epoch {place:.4g}"


def _test(records: Sequence[Mapping[str, Any]], what: str) -> str:
    found = [record[TEST[what]] for record in records if _is_number(record.get(TEST[what]))]
    if not found:
        return ""
    return f"test {100 * found[-1]:.4g} %" if what == "accuracy" else f"test {found[-1]:.4g}"


def _notes(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
