"""The page and the picture of the demo; their text is made from the measured numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from normfree.comparison.comparison_report import curve, levels, panel, table
from normfree.comparison.comparison_result import Point
from normfree.comparison.demo import DESCRIPTIONS, SAMPLES, Demo
from normfree.report.page import Card, Page, Section, write_page
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table, sparkline
from normfree.report.terminal import percent
from normfree.storage.writing import explain_os_errors

_FADED = 1e-3  # a signal that shrinks below this share has faded
_LOST = 0.05  # a method's card warns if its deepest network is this far below its best accuracy


def save(demo: Demo, out: str | Path) -> tuple[Path, Path]:
    """Write index.html and demo.png, and return their paths; a file is complete or absent.

    Raises:
        OSError: if a file cannot be written.
    """
    out = Path(out)
    shown = page(demo)
    paths = out / "index.html", out / "demo.png"
    with explain_os_errors("the demo in", out):
        write_page(shown, paths[0])
        write_plot(picture(demo), paths[1], title=shown.title, columns=3)
    return paths


def picture(demo: Demo) -> tuple[Panel, ...]:
    """Return the panels of demo.png, with titles and notes that need no page around them."""
    forward, _, accuracy, batches = page(demo).all_panels
    deepest = max(run.depth for found in demo.batches.values() for run in found.runs)
    twins = " and ".join(demo.settings.twins)
    words = (
        (
            f"1 · before training: a signal through {max(map(len, demo.forward.values()))} blocks",
            "A signal that explodes or fades cannot train the first layers.",
        ),
        ("2 · after training on spirals: accuracy against depth", _cross(accuracy, len(demo.settings.seeds))),
        (
            f"3 · {deepest:,} layers, trained with small batches",
            f"{_cross(batches, 1)} Only {twins} were run here: with normalization, and without.",
        ),
    )
    return tuple(
        replace(shown, title=title, note=note, curves=tuple(replace(c, name=_named(c.name)) for c in shown.curves))
        for shown, (title, note) in zip((forward, accuracy, batches), words, strict=True)
    )


def _named(method: str) -> str:
    """Write a method with its description, for a legend."""
    return f"{method} ({DESCRIPTIONS[method]})" if method in DESCRIPTIONS else method


def _cross(shown: Panel, seeds: int) -> str:
    """Explain the sign × if a curve has one, and say how many seeds there are."""
    cross = "× diverged, which counts as chance. " if any(curve.crossed for curve in shown.curves) else ""
    return cross + ("One seed." if seeds == 1 else f"Mean over {seeds} seeds; pale: single seeds.")


def page(demo: Demo) -> Page:
    """Make the page: three sections, each with its observation and how it was measured."""
    s = demo.settings
    deepest = max(demo.depth.runs, key=lambda run: run.depth)
    rates = " ".join(f"--lr {s.rates[method]:g}" for method in s.twins if method in s.rates)
    return Page(
        f"{deepest.depth:,} layers, trained without normalization",
        subtitle=(
            "Deep residual networks need batch normalization, or a better start. Three short experiments on two CPU "
            "cores: where the signal goes, what trains, and what happens at a batch of two."
        ),
        cards=tuple(_card(demo, method) for method in s.methods),
        sections=(_signal_section(demo), _depth_section(demo), _batch_section(demo)),
        notes=(
            "Data: points on five spirals, made by a formula, and Fashion-MNIST at 14×14, 6,000 training and 1,000 "
            f"test images, part of the package. Section 2 has {len(s.seeds)} seeds; sections 1 and 3 have one, where a "
            "difference of a percent or two is noise. SGD with momentum 0.9 and a cosine schedule, in section 2 "
            "after a warm-up of one epoch. A run has diverged when its loss is no longer a finite number; it then "
            "counts as chance.",
            "To repeat or vary this: `normfree compare --recipe spirals -m fixup -m batchnorm --model resmlp-49-64 "
            f"{rates} --set epochs={s.epochs} --set clip=none --set warmup=1 --seeds {len(s.seeds)}`. Every run with "
            "its configuration, metrics and checkpoint is in `runs/` beside this page.",
        ),
    )


def _card(demo: Demo, method: str) -> Card:
    points = sorted((p for p in demo.depth.points if p.method == method), key=lambda p: p.depth)
    alive = [p for p in points if (p.test or 0.0) >= 2 * demo.depth.chance]
    text = DESCRIPTIONS.get(method, "")
    end = f"{text[:1].upper()}{text[1:]}." if text else ""
    last = points[-1]
    if not alive:
        return Card(method, "bad", "trains at no depth", end)
    if alive[-1] is last:
        lost = max(p.test or 0.0 for p in points) - (last.test or 0.0)
        return Card(method, "good" if lost < _LOST else "warn", f"{percent(last.test)} at {last.depth:,} layers", end)
    following = points[points.index(alive[-1]) + 1]
    reached = f"{end} {percent(alive[-1].test)} at {alive[-1].depth:,} layers."
    word = "diverges" if following.diverged else "does not train"
    return Card(method, "bad", f"{word} at {following.depth:,} layers", reached.strip())


def _signal_section(demo: Demo) -> Section:
    s = demo.settings
    blocks = max(map(len, demo.forward.values()))
    texts = [f"{method} {_fate(values)}" for method, values in demo.forward.items()]
    lost = [method for method, values in demo.backward.items() if all(map(math.isnan, values))]
    measured = {method: values for method, values in demo.backward.items() if method not in lost} or demo.backward
    note = f"Not measured, because the forward signal does not stay finite: {', '.join(lost)}." if lost else ""
    return Section(
        "1 · A signal through a thousand layers" if blocks > 400 else f"1 · A signal through {blocks} blocks",
        (
            f"One batch of noise goes forward through the {blocks} residual blocks of {s.signal_model}, and a random "
            "gradient comes back, before any training. A signal that explodes or fades cannot train the first layers.",
            f"Variance of the signal: {'; '.join(texts)}.",
        ),
        panels=tuple(
            Panel(title, tuple(Curve(m, tuple(v)) for m, v in series.items()), y_label="variance", note=below)
            for title, series, below in (
                (f"forward through {s.signal_model}: variance of the signal", demo.forward, ""),
                (f"backward through {s.signal_model}: variance of its gradient", measured, note),
            )
        ),
    )


def signal_table(demo: Demo) -> Table:
    """Tabulate the signal before training: a row per method, with its variance over the blocks as a sparkline."""
    columns = (Column("method", style="cyan"), Column("description"), Column("variance"), Column("outcome"))
    rows = tuple(
        (method, DESCRIPTIONS.get(method, ""), sparkline(values, width=30), _fate(values))
        for method, values in demo.forward.items()
    )
    return Table(f"A signal through {demo.settings.signal_model}", columns, rows)


def _fate(values: list[float]) -> str:
    """Describe what becomes of a signal, after the name of the method.

    >>> _fate([1.0, 1e20, float("inf")]), _fate([1.0, 2.5])
    ('leaves the range of float32 at block 3', 'keeps it between 1 and 2.5')
    """
    lost = next((place for place, value in enumerate(values, 1) if not math.isfinite(value)), None)
    if lost is not None:
        return f"leaves the range of float32 at block {lost}"
    if values[-1] < _FADED * values[0]:
        return f"fades to {values[-1]:.0e}"
    return f"keeps it between {min(values):.3g} and {max(values):.3g}"


def _depth_section(demo: Demo) -> Section:
    s = demo.settings
    width = s.models[0].rsplit("-", 1)[-1]
    rates = ", ".join(f"{method} {rate:g}" for method, rate in s.rates.items())
    points = demo.depth.points
    by_depth = [
        f"At {depth:,} layers: {', '.join(f'{p.method} {_end(p)}' for p in points if p.depth == depth)}."
        for depth in sorted({p.depth for p in points})
    ]
    linear = demo.depth.linear_accuracy or 0.0
    return Section(
        "2 · What trains, and how deep",
        (
            f"Residual networks of fully connected layers, {width} wide, learn to which of five interleaved spirals a "
            f"point belongs, in {s.epochs} passes over 5,400 points. A spiral needs a function with many folds, and a "
            f"deep network folds once a layer. Each method has a learning rate that suits it: {rates}. A point is the "
            f"mean of {len(s.seeds)} seeds; × marks a method that diverged.",
            f"{' '.join(by_depth)} For comparison, a linear classifier gets {percent(linear)}, and guessing "
            f"{percent(demo.depth.chance)}.",
        ),
        panels=(replace(panel(demo.depth), note=""),),  # the text above has it
        tables=(replace(table(demo.depth), caption=None),),
    )


def _end(point: Point) -> str:
    return "diverges" if point.diverged else percent(point.test)


def _reached(point: Point) -> str:
    return "diverges" if point.diverged else f"reaches {percent(point.test)}"


def _batch_section(demo: Demo) -> Section:
    s = demo.settings
    found = {
        method: [next(p for p in c.points if p.method == method) for c in demo.batches.values()] for method in s.twins
    }
    sizes = tuple(float(size) for size in demo.batches)
    images = round(SAMPLES * (1 - s.batch_held_out))
    normed, free = (found[method] for method in s.twins)
    rates = ", ".join(f"{rate:g}·b/128" for rate in s.batch_rates)
    panels = Panel(
        f"accuracy of {s.batch_model} against batch size",
        tuple(curve(method, sizes, points) for method, points in found.items()),
        y_label="test accuracy in %",
        x_label="batch size",
        log_y=False,
        log_x=True,
        levels=levels(replace(demo.batches[s.batch_sizes[0]], linear_accuracy=None)),  # it saw ten times the images
        note=f"Best of the learning rates {rates} at a batch of b, by validation accuracy. One seed; × diverged. Only "
        f"{' and '.join(s.twins)} were run.",
    )
    return Section(
        f"3 · A batch of {s.batch_sizes[0]}",
        (
            f"Batch normalization measures mean and variance on the batch, and two images measure them badly: with "
            f"{normed[0].depth} layers, {s.twins[0]} {_reached(normed[0])}, and its twin without "
            f"normalization, {s.twins[1]}, {_reached(free[0])}. At a batch of {s.batch_sizes[-1]}, {s.twins[0]} "
            f"{_reached(normed[-1])} and {s.twins[1]} {_reached(free[-1])}.",
            f"One pass over {images:,} images: a larger batch means fewer steps, so compare the two at one size only. "
            "Shallower networks suffer less, and so do convolutional ones, whose batch norm also averages over the "
            "positions of an image.",
        ),
        panels=(panels,),
    )
