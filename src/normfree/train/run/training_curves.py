"""The curves of a run: panels of loss, accuracy and learning rate from its metrics, and a picture of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot

# The keys of a record by the name of their curve. A record has an `epoch`; any other key may be missing.
_LOSSES = {"training": "train_loss", "validation": "validation_loss"}
_ACCURACIES = {"training": "train_accuracy", "validation": "validation_accuracy"}
_RATES = {"learning rate": "lr"}
_STEEP = 30.0  # a loss that changes by more than this factor gets a logarithmic axis
_POINTS = 2000  # of a curve; the plot has no more columns of pixels
_SMALL = 0.62  # the width of the learning rate relative to the others


def write_curves(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path | None:
    """Draw the metrics of a run into a file; return None if there are none yet, or matplotlib is not installed."""
    if not records:
        return None
    try:
        draw_training_curves(records, path, title)
    except ImportError:  # a run does not need a picture
        return None
    return path


def draw_training_curves(records: Sequence[Mapping[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw the metrics of a run into a .png or .svg file; accuracies are fractions of 1, drawn in per cent.

    A record may hold only some of the numbers, such as the training loss every few steps and the validation loss at
    the end of an epoch. Records without an epoch are left out.

    Raises:
        ValueError: if there is nothing to draw, or the file has another suffix.
        ImportError: if matplotlib is not installed.
    """
    panels = training_panels(records)
    if not panels:
        raise ValueError(
            f"expected records with an 'epoch' and numbers, got none in {len(records)}; train at least once"
        )
    widths = [_SMALL if panel.title == "learning rate" else 1.0 for panel in panels]
    write_plot(panels, path, title=title, columns=3, widths=widths)


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
