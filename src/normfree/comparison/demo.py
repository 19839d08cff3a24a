"""The demo: three short experiments on data of the package, and one page about them.

The text of the page is made from the measured numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from normfree.checksums import read_sealed_json
from normfree.comparison.comparison import Comparison, Point
from normfree.comparison.comparison_report import curve, levels, panel, table
from normfree.comparison.run_engine import run_tasks
from normfree.comparison.sweep import compare, layers
from normfree.diagnostics.propagation import propagate
from normfree.files import atomic_path, explain_os_errors, from_json_values, write_sealed_json
from normfree.models import build
from normfree.report.page import Card, Page, Section, write_page
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table, sparkline
from normfree.report.terminal import ProgressCallback, percent
from normfree.train import TrainConfig, recipe
from normfree.train.engine.environment import Stop

DESCRIPTIONS = {
    "fixup": "no normalization, Fixup",
    "batchnorm": "batch normalization",
    "sqrt_half": "no normalization, sums scaled by √½",
    "he_in": "no normalization, plain He",
}
_NO_LIMIT = 1e30  # only a loss that is not finite ends a run, however large it is
_FADED = 1e-3  # a signal that shrinks below this share has faded
_LOST = 0.05  # a method's card warns if its deepest network is this far below its best accuracy
_SAMPLES = 6_000  # to train on, of the spirals and of the images
# For the progress bar: a signal takes as long as a training step through this many layers, and a method that diverges
# does only a share of its steps.
_SIGNAL_COST = 16_000.0
_SHARE_OF_STEPS, _SHARE_AT_BATCH_TWO = {"he_in": 0.05}, {"batchnorm": 0.2}


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The experiments of the demo; the defaults take less than two minutes on two idle CPU cores."""

    rates: Mapping[str, float] = field(  # the learning rate of each method: the best of 0.01 to 0.07 at 100 layers
        default_factory=lambda: {"fixup": 0.07, "batchnorm": 0.02, "sqrt_half": 0.01, "he_in": 0.01}
    )
    signal_model: str = "wrn-1000-1"
    models: tuple[str, ...] = ("resmlp-1-64", "resmlp-4-64", "resmlp-49-64")
    epochs: int = 7
    seeds: tuple[int, ...] = (0, 1, 2)
    twins: tuple[str, str] = ("batchnorm", "fixup")
    batch_model: str = "resmlp-149-64"
    batch_sizes: tuple[int, ...] = (2, 8, 32)
    batch_rates: tuple[float, ...] = (0.3, 0.1)  # at a batch of 128; in proportion at other sizes
    batch_held_out: float = 0.9  # training on a tenth of the images is enough, and ten times as fast
    seed: int = 0

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods, in the order of the page."""
        return tuple(self.rates)

    def methods_by_rate(self) -> dict[float, list[str]]:
        """The methods that share a learning rate."""
        found: dict[float, list[str]] = {}
        for method, rate in self.rates.items():
            found.setdefault(rate, []).append(method)
        return found


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The measurements of the demo."""

    settings: DemoSettings
    forward: dict[str, list[float]]
    backward: dict[str, list[float]]
    depth: Comparison
    batches: dict[int, Comparison]


def run_demo(
    out: str | Path, settings: DemoSettings | None = None, *, jobs: int = 1, progress: ProgressCallback | None = None
) -> Demo | None:
    """Run the three experiments; finished ones are read from `out`.

    Args:
        out: Folder of the runs.
        settings: The experiments.
        jobs: Number of processes.
        progress: Called with the percentage of the work that is done, 100, and a string. It counts work, not runs.

    Returns:
        The measurements; None after a signal, with finished runs kept.

    Raises:
        ValueError: if a run cannot be trained.
        OSError: if a folder cannot be written.
    """
    settings = settings or DemoSettings()
    out = Path(out)
    short: dict[str, Any] = {"loss_limit": _NO_LIMIT, "checkpoint_epochs": 0}  # runs take seconds
    base = recipe("spirals", epochs=settings.epochs, clip="none", warmup=1.0, **short)
    quick = TrainConfig(epochs=1, validation=settings.batch_held_out, **short)
    each = len(settings.twins) * len(settings.batch_rates)
    costs = _costs(settings, base, quick)

    def show(done: int, text: str) -> None:
        if progress is not None:
            progress(int(100 * sum(costs[:done]) / sum(costs)), 100, text)

    show(0, f"signal through {settings.signal_model}")
    signals = _signals(settings, out / "signal.json", jobs)
    if signals is None:
        return None
    before = len(settings.methods)

    def show_runs(done: int, _: int, text: str) -> None:
        show(before + done, re.sub(r"^about [^,]* left(, )?", "", text))  # its own estimate is of one comparison

    common: dict[str, Any] = {"out": out / "runs", "jobs": jobs, "progress": show_runs}
    parts = []
    for rate, methods in settings.methods_by_rate().items():
        grid: dict[str, Any] = {"methods": methods, "models": settings.models, "lrs": [rate]}
        parts.append(compare(base, seeds=settings.seeds, **grid, **common))
        if parts[-1].signal is not None:
            return None
        before += len(methods) * len(settings.models) * len(settings.seeds)
    ended = sorted((run for part in parts for run in part.runs), key=lambda run: run.depth)
    depth = replace(parts[0], runs=tuple(ended), methods=settings.methods, lrs=tuple(settings.methods_by_rate()))
    batches = {}
    for size in settings.batch_sizes:
        rates = [rate * size / 128 for rate in settings.batch_rates]
        sized = quick.with_changes(batch_size=size)
        twins: dict[str, Any] = {"methods": settings.twins, "models": [settings.batch_model], "lrs": rates}
        batches[size] = compare(sized, seeds=(settings.seed,), **twins, **common)
        if batches[size].signal is not None:
            return None
        before += each
    return Demo(
        settings=settings, forward=signals["forward"], backward=signals["backward"], depth=depth, batches=batches
    )


def _costs(settings: DemoSettings, base: TrainConfig, quick: TrainConfig) -> list[float]:
    """Estimate the cost of each signal and run, in the order of `compare`, which begins with the deepest.

    The time of networks this narrow depends on the number of layers, and not on the batch size.
    """

    def cost(model: str, config: TrainConfig) -> float:
        steps = config.epochs * math.ceil(_SAMPLES * (1 - config.validation) / config.batch_size)
        return float(layers(build(model, "he_in", device="meta").plan) * steps)

    groups = [
        [_SHARE_OF_STEPS.get(method, 1.0) for method in methods for _ in settings.seeds]
        for methods in settings.methods_by_rate().values()
    ]
    depths = sorted((cost(model, base) for model in settings.models), reverse=True)
    sizes = {size: cost(settings.batch_model, quick.with_changes(batch_size=size)) for size in settings.batch_sizes}
    first = [_SHARE_AT_BATCH_TWO.get(method, 1.0) for method in settings.twins for _ in settings.batch_rates]
    return [
        *[_SIGNAL_COST] * len(settings.methods),
        *(one * share for shares in groups for one in depths for share in shares),
        *(one * (share if size == 2 else 1.0) for size, one in sizes.items() for share in first),
    ]


def _signals(settings: DemoSettings, path: Path, jobs: int) -> dict[str, Any] | None:
    """Measure the variance after every residual sum, and of its gradient, by method; None after a stop."""
    wanted = {"model": settings.signal_model, "methods": list(settings.methods), "seed": settings.seed, "format": 2}
    if path.exists():
        try:
            stored = read_sealed_json(path, "the signals", "measure them again")
        except ValueError:
            stored = {}
        if stored.get("settings") == wanted:
            read: dict[str, Any] = from_json_values(stored)
            return read
    tasks = [(settings.signal_model, method, settings.seed) for method in settings.methods]
    found: dict[str, Any] = {"settings": wanted, "forward": {}, "backward": {}}
    with Stop() as stop:
        measured = dict(run_tasks(measure_signal, tasks, jobs=jobs, stop=stop))
        if stop.requested:
            return None
    for number, method in enumerate(settings.methods):
        found["forward"][method], found["backward"][method] = measured[number]
    with explain_os_errors("the signals", path):
        write_sealed_json(path, found)
    return found


def measure_signal(task: tuple[str, str, int]) -> tuple[list[float], list[float]]:
    """Measure one forward and one backward pass of noise at initialization; NaN where no gradient can be measured."""
    model, method, seed = task
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    network = build(model, method, example=images, generator=torch.Generator().manual_seed(seed))
    signal = propagate(network, images, generator=torch.Generator().manual_seed(seed))
    return signal.series("sum"), signal.series("sum_gradient")


# The page


def save(demo: Demo, out: str | Path) -> tuple[Path, Path]:
    """Write index.html and demo.png, and return their paths; a file is complete or absent.

    Raises:
        OSError: if a file cannot be written.
    """
    out = Path(out)
    shown = page(demo)
    paths = out / "index.html", out / "demo.png"
    with explain_os_errors("the demo in", out):
        with atomic_path(paths[0]) as temporary:
            write_page(shown, temporary)
        with atomic_path(paths[1]) as temporary:
            write_plot(picture(demo), temporary, title=shown.title, columns=3)
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
            "To repeat or vary this: normfree compare --recipe spirals -m fixup -m batchnorm --model resmlp-49-64 "
            "--lr 0.05 --set clip=none --set warmup=1 --seeds 3. Every run with its configuration, metrics and "
            "checkpoint lies in runs/ beside this page.",
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
    least, most = min(p.depth for p in points), max(p.depth for p in points)
    starts, ends = ([f"{p.method} {_end(p)}" for p in points if p.depth == depth] for depth in (least, most))
    linear = demo.depth.linear_accuracy or 0.0
    return Section(
        "2 · What trains, and how deep",
        (
            f"Residual networks of fully connected layers, {width} wide, learn to which of five interleaved spirals a "
            f"point belongs, in {s.epochs} passes over 5,400 points. A spiral needs a function with many folds, and a "
            f"deep network folds once a layer. Each method has a learning rate that suits it: {rates}. A point is the "
            f"mean of {len(s.seeds)} seeds; × marks a method that diverged.",
            f"At {most:,} layers: {', '.join(ends)}. At {least:,} layers: {', '.join(starts)}. For comparison, a "
            f"linear classifier gets {percent(linear)}, and guessing {percent(demo.depth.chance)}.",
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
    images = round(_SAMPLES * (1 - s.batch_held_out))
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
