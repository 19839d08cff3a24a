"""A comparison: its runs, each method's point at each depth, and every way to look at them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from normfree.files import explained, replacing, write_json
from normfree.report.formatting import duration, percent
from normfree.report.page import Card, Page, write_page
from normfree.report.panels import Curve, Level, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table
from normfree.train.text.text_data import PAIRS, TEXT

SUFFIXES = (".json", ".html", ".png", ".svg")
_CLOSE = 0.05  # an accuracy that much below the method's own best is a loss
_SPREAD, _FAR = 5.0, 3.0  # curves that differ by so many points are not to be flattened by a line so many times below


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that ended; a diverged one has no test, nor one on data without a test split.

    `bleu` is that of test sentences, where it translates; `origin` is its commit, versions and hardware.
    """

    method: str
    model: str
    depth: int
    lr: float
    seed: int
    status: Literal["finished", "diverged"]
    validation: float | None
    test: float | None
    seconds: float
    folder: str
    bleu: float | None = None
    origin: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """What it was and how it ended, in a line."""
        end = "diverged" if self.status == "diverged" else percent(self.test)
        return f"{self.method}, {self.model}, lr {self.lr:g}: {end or 'not tested'}"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A method in a model at its learning rate: means over the seeds, and the spread where there are several.

    A diverged run counts as chance, in `validation` and in `test`. Either is None where a finished run has none.
    """

    method: str
    model: str
    depth: int
    lr: float
    runs: int
    diverged: int
    validation: float | None
    test: float | None
    spread: float | None  # standard deviation of `test` over the seeds, of a sample
    seconds: float  # of all seeds at this rate
    bleu: float | None = None  # the mean over the seeds that translate; a diverged one counts as 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` found; `signal` is the one that ended it early, and then runs are missing."""

    runs: tuple[Run, ...]
    settings: dict[str, Any]
    methods: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    chance: float
    linear_accuracy: float | None
    signal: int | None = None

    @property
    def points(self) -> tuple[Point, ...]:
        """Each method in each model, at the learning rate of the highest mean validation accuracy.

        The test accuracy has no say in it. A rate at which every seed diverged is taken only where there is no other,
        and of equal rates the lower.
        """
        found = []
        for method in self.methods:
            for model in dict.fromkeys(run.model for run in self.runs):
                rates = [self.point(method, model, lr) for lr in self.lrs]
                if there := [point for point in rates if point is not None]:
                    found.append(max(there, key=lambda p: (p.diverged < p.runs, p.validation or 0.0, -p.lr)))
        return tuple(found)

    def point(self, method: str, model: str, lr: float) -> Point | None:
        """A method in a model at one learning rate; None where no run ended."""
        runs = [run for run in self.runs if (run.method, run.model, run.lr) == (method, model, lr)]
        if not runs:
            return None
        test = self._counted(runs, [run.test for run in runs])
        validation = self._counted(runs, [run.validation for run in runs])
        return Point(
            method=runs[0].method,
            model=runs[0].model,
            depth=runs[0].depth,
            lr=runs[0].lr,
            runs=len(runs),
            diverged=sum(run.status == "diverged" for run in runs),
            validation=fmean(validation) if validation else None,
            test=fmean(test) if test else None,
            spread=stdev(test) if len(test) > 1 else None,
            seconds=sum(run.seconds for run in runs),
            bleu=_mean_bleu(runs),
        )

    def _counted(self, runs: Sequence[Run], shares: Sequence[float | None]) -> list[float]:
        """Their accuracies, a diverged run's that of chance; empty where a finished one has none."""
        each = [self.chance if run.status == "diverged" else share for run, share in zip(runs, shares, strict=True)]
        known = [share for share in each if share is not None]
        return known if len(known) == len(runs) else []

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {**asdict(self), "points": [asdict(point) for point in self.points]}


def _mean_bleu(runs: Sequence[Run]) -> float | None:
    """Over the seeds; None where none translates."""
    if all(run.bleu is None for run in runs):
        return None
    return fmean(run.bleu or 0.0 for run in runs)


def table(comparison: Comparison) -> Table:
    """One row a method and model."""
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
    return Table(f"Test accuracy {_setting(comparison)}", columns, rows, caption=_caption(comparison))


def _setting(comparison: Comparison) -> str:
    """What all runs share, in words."""
    s = comparison.settings
    epochs = f"{s['epochs']} epoch{'' if s['epochs'] == 1 else 's'}"
    kind = _kind_of_text(comparison)
    if kind is not None:
        counted = "tokens" if kind == PAIRS else "blocks"
        return f"on {Path(s['data'].removeprefix(kind)).name} after {epochs}, batches of {s['batch_size']:,} {counted}"
    return f"on {s['data']} after {epochs}, batch size {s['batch_size']}"


def _kind_of_text(comparison: Comparison) -> str | None:
    """Pairs, whose batches are counted in tokens, or running text, whose are in blocks; None for images."""
    return next((kind for kind in (PAIRS, TEXT) if str(comparison.settings["data"]).startswith(kind)), None)


def _y_label(comparison: Comparison) -> str:
    what = {PAIRS: "target tokens predicted in the test, %", TEXT: "tokens predicted in the test, %"}
    return what.get(_kind_of_text(comparison) or "", "test accuracy in %")


def _caption(comparison: Comparison, *, best: bool = True) -> str:
    """What a point is; each method at its `best` learning rate, or at every one."""
    texts = []
    if best and len(comparison.lrs) > 1:
        rates = ", ".join(f"{lr:g}" for lr in comparison.lrs)
        texts.append(f"Each method at its best of the learning rates {rates}, by validation accuracy.")
    count = len(comparison.seeds)
    texts.append("One seed." if count == 1 else f"Mean ± standard deviation over {count} seeds.")
    if any(point.diverged for point in comparison.points):
        texts.append(f"A diverged run counts as chance, {percent(comparison.chance)}.")
    if comparison.linear_accuracy is not None:
        texts.append(f"A linear classifier on the pixels gets {percent(comparison.linear_accuracy)}.")
    return " ".join(texts)


def levels(comparison: Comparison) -> tuple[Level, ...]:
    """What an accuracy is held against, as lines of a panel."""
    linear = comparison.linear_accuracy
    known = [] if linear is None else [Level(f"linear classifier, {percent(linear)}", 100 * linear)]
    return (*known, Level(f"chance, {percent(comparison.chance)}", 100 * comparison.chance))


def _held_against(comparison: Comparison, curves: Sequence[Curve]) -> tuple[tuple[Level, ...], str]:
    """The levels that are drawn with curves, and a sentence on those so far below that they would flatten them."""
    reached = [value for curve in curves for i in range(len(curve.values)) for value in curve.reach(i)]
    low, spread = min(reached), max(reached) - min(reached)
    known = levels(comparison)
    far = [level for level in known if spread >= _SPREAD and low - level.value > _FAR * spread]
    words = f" The axis begins above {' and '.join(level.name for level in far)}." if far else ""
    return tuple(level for level in known if level not in far), words


def panel(comparison: Comparison) -> Panel:
    """Test accuracy over the number of layers, a curve a method, as Figure 3 of `fixup`."""
    points = comparison.points
    shapes = {_shape(p.model) for p in points}
    groups: dict[str, list[Point]] = {}
    for p in sorted(points, key=lambda p: p.depth):
        groups.setdefault(p.method if len(shapes) == 1 else f"{p.method}, {_shape(p.model)}", []).append(p)
    order = {method: number for number, method in enumerate(comparison.methods)}
    curves = [curve(name, [p.depth for p in g], g) for name, g in groups.items()]
    drawn, words = _held_against(comparison, curves)
    return Panel(
        f"accuracy of {next(iter(shapes))} against depth" if len(shapes) == 1 else "accuracy against depth",
        tuple(sorted(curves, key=lambda c: order[groups[c.name][0].method])),
        y_label=_y_label(comparison),
        x_label="layers",
        log_y=False,
        log_x=True,
        levels=drawn,
        note=_caption(comparison) + (" × marks them." if any(p.diverged for p in points) else "") + words,
    )


def panel_over_rates(comparison: Comparison) -> Panel:
    """Test accuracy of a single model over the learning rate, a curve a method."""
    curves = []
    for method in comparison.methods:
        found = [p for lr in comparison.lrs if (p := comparison.point(method, comparison.runs[0].model, lr))]
        found.sort(key=lambda p: p.lr)
        curves.append(curve(method, [p.lr for p in found], found))
    drawn, words = _held_against(comparison, curves)
    return Panel(
        f"accuracy of {comparison.runs[0].model} against the learning rate",
        tuple(curves),
        y_label=_y_label(comparison),
        x_label="learning rate",
        log_y=False,
        log_x=True,
        levels=drawn,
        note=_caption(comparison, best=False) + words,
    )


def _panel(comparison: Comparison) -> Panel:
    """What there is most to see in: depths, or of a single model its learning rates."""
    single = len({run.model for run in comparison.runs}) == 1
    return panel_over_rates(comparison) if single and len(comparison.lrs) > 1 else panel(comparison)


def curve(name: str, x: Sequence[float], points: Sequence[Point]) -> Curve:
    """Points at positions as a curve in per cent, with its spread, a cross where a run diverged, NaN where untested."""
    spread = tuple(100 * (p.spread or 0.0) for p in points)
    return Curve(
        name,
        tuple(math.nan if p.test is None else 100 * p.test for p in points),
        tuple(float(position) for position in x),
        spread=spread if any(spread) else (),
        crossed=tuple(i for i, p in enumerate(points) if p.diverged),
    )


def _shape(model: str) -> str:
    """A model's name without its depth, of which one with encoder and decoder has two.

    >>> _shape("wrn-100-1"), _shape("resnet110"), _shape("transformer-6-6-512-1024-4")
    ('wrn-N-1', 'resnetN', 'transformer-N-N-512-1024-4')
    """
    return re.sub(r"\d+", "N", model, count=2 if model.startswith("transformer-") else 1)


def page(comparison: Comparison, title: str) -> Page:
    """The comparison as a page: how each method ends at its deepest, the plot, and the table."""
    return Page(
        title,
        subtitle=f"{len(comparison.runs)} runs {_setting(comparison)}; {_listed(comparison.seeds)}.",
        cards=_cards(comparison),
        panels=(_panel(comparison),),
        tables=(replace(table(comparison), caption=None),),  # the plot says it
    )


def _listed(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _cards(comparison: Comparison) -> tuple[Card, ...]:
    """How each method ends at the deepest network that was tested; none for one that never was."""
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
    """Write the comparison as .json, .html, .png and .svg into a folder, each whole or not at all.

    `command` is what was typed, for the first of them.

    Raises:
        OSError: in one sentence, when one cannot be written.
    """
    out = Path(out)
    paths = tuple(out / f"{name}{suffix}" for suffix in SUFFIXES)
    with explained("the comparison in", out):
        write_json(paths[0], {"command": command, **comparison.to_json()})
    _draw(comparison, paths[1:], title)
    return paths


def _draw(comparison: Comparison, paths: Sequence[Path], title: str = "") -> None:
    title = title or f"Methods compared {_setting(comparison)}"
    for path in paths:
        with explained("the comparison", path), replacing(path) as temporary:
            if path.suffix == ".html":
                write_page(page(comparison, title), temporary)
            else:
                write_plot((_panel(comparison),), temporary, title=title)


def redraw(path: str | Path) -> tuple[Path, ...]:
    """Draw the stored comparison at a .json anew: its picture, and the page and .svg where they lie beside it.

    Raises:
        ValueError: where there is no comparison.
        OSError: where a drawing cannot be written.
    """
    path = Path(path)
    paths = [path.with_suffix(suffix) for suffix in SUFFIXES[1:]]
    drawn = tuple(each for each in paths if each.suffix == ".png" or each.exists())
    _draw(_read(path), drawn)
    return drawn


def _read(path: Path) -> Comparison:
    try:
        data = json.loads(path.read_bytes())
        known: dict[str, Any] = {each.name: data[each.name] for each in fields(Comparison)}
        lists: dict[str, Any] = {name: tuple(known[name]) for name in ("methods", "lrs", "seeds")}
        return Comparison(**{**known, **lists, "runs": tuple(Run(**run) for run in known["runs"])})
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"expected a comparison in '{path}', found none; name a comparison.json") from None
