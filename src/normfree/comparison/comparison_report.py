"""Tables, plots and pages of a comparison, and its files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from normfree.comparison.comparison_result import ComparedRun, Comparison, Point
from normfree.report.page import Card, Page, write_page
from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table
from normfree.report.terminal import duration, percent
from normfree.storage.reading import has_checksum, has_kinds, parse_json, read_limited, read_sealed_json
from normfree.storage.writing import explain_os_errors, write_sealed_json
from normfree.train.engine.data_interface import PAIRS, TEXT

_NUMBER = int | float
# The kinds of the values in a stored comparison, which may be forged.
_KINDS: dict[str, Any] = {"runs": list, "settings": dict, "methods": list, "lrs": list, "seeds": list}
_KINDS |= {"chance": _NUMBER, "linear_accuracy": _NUMBER | None, "signal": int | None}
_SETTINGS: dict[str, Any] = {"data": str, "epochs": int, "batch_size": int}
_RUN_KINDS: dict[str, Any] = {"method": str, "model": str, "depth": int, "lr": _NUMBER, "seed": int, "status": str}
_RUN_KINDS |= {"validation": _NUMBER | None, "test": _NUMBER | None, "seconds": _NUMBER, "folder": str}
_RUN_KINDS |= {"bleu": _NUMBER | None, "origin": dict}
SUFFIXES = (".json", ".html", ".png", ".svg")
_CLOSE = 0.05  # a method's card warns if its deepest network is this far below its best accuracy
_SPREAD, _FAR = 5.0, 3.0  # a level is not drawn if curves that spread over 5 points lie 3 spreads above it


def table(comparison: Comparison) -> Table:
    """Tabulate the comparison, one row per method and model."""
    translated = any(p.bleu is not None for p in comparison.points)
    columns = (
        Column("method", style="cyan"),
        Column("model"),
        Column("layers", "right"),
        Column("lr", "right"),
        Column("validation", "right"),
        Column("test", "right"),
        *((Column("BLEU", "right"),) if translated else ()),
        Column("diverged", "right"),
        Column("time", "right"),
    )
    rows = tuple(
        (
            p.method,
            p.model,
            f"{p.depth:,}",
            f"{p.lr:g}",
            percent(p.validation),
            percent(p.test, p.spread),
            *((f"{p.bleu:.1f}" if p.bleu is not None else "",) if translated else ()),
            f"{p.diverged} of {p.runs}" if p.diverged else "",
            duration(p.seconds),
        )
        for p in comparison.points
    )
    return Table(
        f"Test accuracy {_setting(comparison)}",
        columns,
        rows,
        caption=_caption(comparison, "± is their standard deviation"),
    )


def _setting(comparison: Comparison) -> str:
    """Describe the settings that all runs share."""
    s = comparison.settings
    epochs = f"{s['epochs']} epoch{'' if s['epochs'] == 1 else 's'}"
    kind = _kind_of_text(comparison)
    if kind is not None:
        counted = "tokens" if kind == PAIRS else "blocks"
        return f"on {Path(s['data'].removeprefix(kind)).name} after {epochs}, batches of {s['batch_size']:,} {counted}"
    return f"on {s['data']} after {epochs}, batch size {s['batch_size']}"


def _kind_of_text(comparison: Comparison) -> str | None:
    """Return `PAIRS`, whose batches are counted in tokens, or `TEXT`, counted in blocks; None for images."""
    return next((kind for kind in (PAIRS, TEXT) if str(comparison.settings["data"]).startswith(kind)), None)


def _y_label(comparison: Comparison) -> str:
    labels = {PAIRS: "target tokens predicted in the test, %", TEXT: "tokens predicted in the test, %"}
    return labels.get(_kind_of_text(comparison) or "", "test accuracy in %")


def _caption(comparison: Comparison, seeds: str = "pale: single seeds", *, best: bool = True) -> str:
    """Explain the points: each method at its `best` learning rate or at every rate, and how its `seeds` are shown."""
    texts = []
    if best and len(comparison.lrs) > 1:
        rates = ", ".join(f"{lr:g}" for lr in comparison.lrs)
        texts.append(f"Each method at its best of the learning rates {rates}, by validation accuracy.")
    count = len(comparison.seeds)
    texts.append("One seed." if count == 1 else f"Mean over {count} seeds; {seeds}.")
    if any(point.diverged for point in comparison.points):
        texts.append(f"A diverged run counts as chance, {percent(comparison.chance)}.")
    if comparison.linear_accuracy is not None:
        texts.append(f"A linear classifier gets {percent(comparison.linear_accuracy)}.")
    return " ".join(texts)


def levels(comparison: Comparison) -> tuple[ReferenceLine, ...]:
    """Return the reference lines of an accuracy plot: a linear classifier if known, and chance."""
    linear = comparison.linear_accuracy
    known = [] if linear is None else [ReferenceLine(f"linear classifier, {percent(linear)}", 100 * linear)]
    return (*known, ReferenceLine(f"chance, {percent(comparison.chance)}", 100 * comparison.chance))


def _levels_to_draw(comparison: Comparison, curves: Sequence[Curve]) -> tuple[tuple[ReferenceLine, ...], str]:
    """Return the reference lines to draw, and a sentence that names those that would flatten the curves."""
    reached = [value for curve in curves for values in (curve.values, *curve.singles) for value in values]
    reached = [value for value in reached if math.isfinite(value)] or [0.0]
    low, spread = min(reached), max(reached) - min(reached)
    known = levels(comparison)
    far = [level for level in known if spread >= _SPREAD and low - level.value > _FAR * spread]
    words = f" The axis begins above {' and '.join(level.name for level in far)}." if far else ""
    return tuple(level for level in known if level not in far), words


def panel(comparison: Comparison) -> Panel:
    """Plot test accuracy against the number of layers, one curve per method, as Figure 3 of `fixup`."""
    points = comparison.points
    shapes = {_shape(p.model) for p in points}
    groups: dict[str, list[Point]] = {}
    for p in sorted(points, key=lambda p: (comparison.methods.index(p.method), p.depth)):
        groups.setdefault(p.method if len(shapes) == 1 else f"{p.method}, {_shape(p.model)}", []).append(p)
    return _accuracy_panel(
        comparison,
        f"accuracy of {next(iter(shapes))} against depth" if len(shapes) == 1 else "accuracy against depth",
        [curve(name, [p.depth for p in g], g) for name, g in groups.items()],
        "layers",
        _caption(comparison) + (" × marks diverged runs." if any(p.diverged for p in points) else ""),
    )


def panel_over_rates(comparison: Comparison) -> Panel:
    """Plot the test accuracy of a single model against the learning rate, one curve per method."""
    model, curves = comparison.runs[0].model, []
    for method in comparison.methods:
        found = [p for lr in sorted(comparison.lrs) if (p := comparison.point(method, model, lr))]
        curves.append(curve(method, [p.lr for p in found], found))
    title = f"accuracy of {model} against the learning rate"
    return _accuracy_panel(comparison, title, curves, "learning rate", _caption(comparison, best=False))


def _accuracy_panel(comparison: Comparison, title: str, curves: Sequence[Curve], x_label: str, note: str) -> Panel:
    drawn, words = _levels_to_draw(comparison, curves)
    return Panel(
        title,
        tuple(curves),
        y_label=_y_label(comparison),
        x_label=x_label,
        log_y=False,
        log_x=True,
        levels=drawn,
        note=note + words,
    )


def _panel(comparison: Comparison) -> Panel:
    """Plot against depth, or for a single model with several learning rates against the rate."""
    single = len({run.model for run in comparison.runs}) == 1
    return panel_over_rates(comparison) if single and len(comparison.lrs) > 1 else panel(comparison)


def curve(name: str, x: Sequence[float], points: Sequence[Point]) -> Curve:
    """Make a curve of points in per cent with their single runs; × marks diverged ones, NaN untested ones."""
    most = max(len(p.tests) for p in points)
    padded = [[100 * test for test in p.tests] + [math.nan] * (most - len(p.tests)) for p in points]
    return Curve(
        name,
        tuple(math.nan if p.test is None else 100 * p.test for p in points),
        tuple(float(position) for position in x),
        singles=tuple(zip(*padded, strict=True)) if most > 1 else (),
        crossed=tuple(i for i, p in enumerate(points) if p.diverged),
    )


def _shape(model: str) -> str:
    """Replace the depth in a model's name by N; a model with encoder and decoder has two depths.

    >>> _shape("wrn-100-1"), _shape("resnet110"), _shape("transformer-6-6-512-1024-4")
    ('wrn-N-1', 'resnetN', 'transformer-N-N-512-1024-4')
    """
    return re.sub(r"\d+", "N", model, count=2 if model.startswith("transformer-") else 1)


def page(comparison: Comparison, title: str) -> Page:
    """Make a page of a card per method, the plot and the table."""
    setting = _setting(comparison)
    runs = f"{len(comparison.runs)} runs" if setting in title else f"{len(comparison.runs)} runs {setting}"
    return Page(
        title,
        subtitle=f"{runs}; {_listed(comparison.seeds)}.",
        cards=_cards(comparison),
        panels=(_panel(comparison),),
        tables=(replace(table(comparison), caption=None),),  # the plot's note has it
    )


def _listed(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _cards(comparison: Comparison) -> tuple[Card, ...]:
    """Make a card per method with its accuracy in the deepest network that was tested."""
    cards = []
    for method in comparison.methods:
        scores = {p: p.test for p in comparison.points if p.method == method and p.test is not None}
        if not scores:
            continue
        deepest = max(scores, key=lambda p: p.depth)
        best = max(scores, key=lambda p: scores[p])
        lost = scores[best] - scores[deepest]
        guessed = scores[deepest] < 2 * comparison.chance
        status: Literal["good", "warn", "bad"] = (
            "bad" if deepest.diverged or guessed else "warn" if lost > _CLOSE else "good"
        )
        end = "diverged" if deepest.diverged == deepest.runs else percent(deepest.test, deepest.spread)
        text = f"Best: {percent(best.test)} at {best.depth:,} layers." if best != deepest and scores[best] > 0 else ""
        cards.append(Card(method, status, f"{end} at {deepest.depth:,} layers", text))
    return tuple(cards)


def save(
    comparison: Comparison, out: str | Path, *, name: str = "comparison", title: str = "", command: str | None = None
) -> tuple[Path, ...]:
    """Write the comparison as .json, .html, .png and .svg into a folder; a file is complete or absent.

    Args:
        comparison: The comparison.
        out: The folder.
        name: Name of the files, without suffix.
        title: Title of the page and the plot; default: one made from the settings.
        command: The command to record in the .json.

    Returns:
        The paths.

    Raises:
        OSError: if a file cannot be written.
    """
    out = Path(out)
    paths = tuple(out / f"{name}{suffix}" for suffix in SUFFIXES)
    with explain_os_errors("the comparison in", out):
        write_sealed_json(paths[0], {"command": command, **comparison.to_json()})
    draw(comparison, paths[1:], title)
    return paths


def draw(comparison: Comparison, paths: Sequence[Path], title: str = "") -> None:
    """Draw a comparison into .png and .svg files, and write it as a page into .html files."""
    title = title or f"Methods compared {_setting(comparison)}"
    for path in paths:
        with explain_os_errors("the comparison", path):
            if path.suffix == ".html":
                write_page(page(comparison, title), path)
            else:
                write_plot((_panel(comparison),), path, title=title)


def redraw(path: str | Path) -> tuple[Path, ...]:
    """Draw a stored comparison again: the .png, and the page and .svg if they exist.

    Args:
        path: A comparison.json.

    Returns:
        The paths of the files drawn.

    Raises:
        ValueError: if the file holds no comparison, or was altered after it was written.
        OSError: if a drawing cannot be written.
    """
    path = Path(path)
    paths = [path.with_suffix(suffix) for suffix in SUFFIXES[1:]]
    drawn = tuple(each for each in paths if each.suffix == ".png" or each.exists())
    draw(_read(path), drawn)
    return drawn


def _read(path: Path) -> Comparison:
    if has_checksum(path):  # earlier releases wrote none
        read_sealed_json(path, "the comparison", "run it again")
    try:
        data = parse_json(read_limited(path))
        whole = has_kinds(data, _KINDS) and all(has_kinds(run, _RUN_KINDS) for run in data["runs"])
        whole = whole and has_kinds(data["settings"], _SETTINGS) and _SETTINGS.keys() <= data["settings"].keys()
        if not whole or not all(isinstance(rate, _NUMBER) for rate in data["lrs"]):
            raise ValueError("it was forged")
        known: dict[str, Any] = {each.name: data[each.name] for each in fields(Comparison)}
        lists: dict[str, Any] = {name: tuple(known[name]) for name in ("methods", "lrs", "seeds")}
        return Comparison(**{**known, **lists, "runs": tuple(ComparedRun(**run) for run in known["runs"])})
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"expected a comparison in '{path}', found none; name a comparison.json") from None
