"""A diagnosis: a signal, the verdict on it, and every way to look at them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from normfree.diagnostics.propagation import Loss, Signal, propagate
from normfree.diagnostics.verdict import SEVERITY, Direction, Status, Verdict, judge, not_measured
from normfree.graph import admits_conversion
from normfree.methods import get
from normfree.models import BaseModel, admits
from normfree.plan import ResidualPlan
from normfree.report.page import Card, Page, write_page
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Table, print_table
from normfree.report.terminal import sparkline

CARD_STATUS: dict[Status, Literal["good", "warn", "bad"]] = {
    "preserved": "good",
    "growing": "good",
    "vanishing": "warn",
    "exploding": "bad",
    "dead branch": "bad",
}
INJECTED = {
    "output": "no targets were given: a random gradient was put on the output",
    "features": "the classifier is zero and lets no gradient through: a random gradient was put on its input",
    "memory": "the attentions over the encoder's output put out zero: a random gradient was put on it, too",
}


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `print` it, or `save` it as .html, .png, .svg or .json."""

    name: str
    signal: Signal
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as plain data."""
        return {"name": self.name, "verdict": self.verdict.to_json(), "signal": self.signal.to_json()}

    def save(self, path: str | Path) -> Path:
        """Write the diagnosis; the suffix says how."""
        return save([self], path)

    def __str__(self) -> str:
        """The table that the command line prints."""
        from rich.console import Console

        buffer = StringIO()
        console = Console(file=buffer, width=110, color_system=None, emoji=False)
        print_table(table([self]), console)
        console.print(summary(self), highlight=False, markup=False)
        return buffer.getvalue().rstrip()


def diagnose(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    name: str | None = None,
    plan: ResidualPlan | None = None,
    loss: Loss | None = None,
    generator: torch.Generator | None = None,
) -> Diagnosis:
    """Show how the signal travels through any model, forward and backward, and what that means.

    `inputs` is a tensor, a tuple of positional arguments or a mapping of keyword arguments; the rest is as for
    `propagate`. The model is left as it was.

    >>> from normfree.models import build
    >>> images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> diagnose(build("resnet56", "he_in"), images).verdict.status
    'exploding'

    Raises `ValueError` when the model has no residual sums, holds no values (meta device), or puts out no tensor.
    """
    signal = propagate(model, inputs, targets, plan=plan, loss=loss, generator=generator)
    label = name or str(getattr(model, "name", type(model).__name__))
    return Diagnosis(label, signal, verdict_on(model, signal))


def verdict_on(model: nn.Module, signal: Signal) -> Verdict:
    """The verdict on a model's signal, which recommends only what the model admits and does not have."""
    converted = str(getattr(signal.plan.changes, "method", "")).partition(":")[0]
    method = converted or str(getattr(getattr(model, "method", None), "name", ""))
    return judge(signal, method=method, admits=_admitted(model, signal.plan))


def _admitted(model: nn.Module, plan: ResidualPlan) -> Callable[[str], bool]:
    """A function that tells which methods a model of ours can be built with, or any other surely be converted by."""
    if isinstance(model, BaseModel):
        return functools.partial(admits, model.name)
    return lambda name: admits_conversion(model, plan, get(name))


def summary(*diagnoses: Diagnosis) -> str:
    """The verdicts in words, and once where the gradient came from."""
    lines: list[str] = []
    starts: dict[str, list[str]] = {}
    for d in diagnoses:
        lines += [f"{d.name}: {d.verdict.word}", f"  {d.verdict.sentence}", f"  {d.verdict.recommendation}"]
        for place in filter(None, d.signal.injected.split(", ")):
            starts.setdefault(INJECTED[place], []).append(d.name)
    for start, names in starts.items():
        whose = "" if len(names) == len(diagnoses) else f"{', '.join(names)}: "
        lines.append(f"({whose}{start})")
    return "\n".join(lines)


def table(diagnoses: Sequence[Diagnosis]) -> Table:
    """One row a diagnosis: the words, the factors, and the two curves as sparklines (left is the first block)."""
    columns = (
        Column("network"),
        Column("verdict"),
        Column("forward"),
        Column("× a block", justify="right"),
        Column("in all", justify="right"),
        Column("backward"),
        Column("× a block", justify="right"),
        Column("in all", justify="right"),
        Column("worst place"),
    )
    rows = []
    for d in diagnoses:
        v = d.verdict
        rows.append(
            (
                d.name,
                v.status,
                sparkline(d.signal.series("sum"), width=12),
                _factor(v.forward),
                _total(v.forward),
                "not measured" if _unmeasured(v) else sparkline(d.signal.series("sum_gradient"), width=12),
                _factor(v.backward),
                _total(v.backward),
                _place(v),
            )
        )
    caption = (
        "curves are log variance, first block left; in all is from the first block that the signal meets to the last, "
        "× a block is inside stages"
    )
    if any("growing" in (d.verdict.forward.status, d.verdict.backward.status) for d in diagnoses):
        caption += ", ↘ comes to 1 with depth"
    return Table("signal through the residual blocks", columns, tuple(rows), caption)


def _place(verdict: Verdict) -> str:
    """Where to look first."""
    if verdict.dead or verdict.odd:
        return (*verdict.dead, *(odd.name for odd in verdict.odd))[0]
    worst = verdict.backward if _worse(verdict.backward, verdict.forward) else verdict.forward
    return worst.worst if verdict.at_least("vanishing") else "–"


def _factor(direction: Direction) -> str:
    """The factor a block; the mean of many that fall where growth is a power of the depth."""
    if direction.status == "not measured":
        return "–"
    return f"{direction.factor:.2f}{'↘' if direction.status == 'growing' else ''}"


def _total(direction: Direction) -> str:
    if direction.status == "not measured":
        return "–"
    return f"{direction.total:.2g}" if 1e-3 < direction.total < 1e3 else f"{direction.total:.1e}"


def _unmeasured(verdict: Verdict) -> bool:
    return verdict.backward.status == "not measured"


def _worse(one: Direction, other: Direction) -> bool:
    if one.status == "not measured" or other.status == "not measured":
        return other.status == "not measured"
    return SEVERITY.index(one.status) > SEVERITY.index(other.status)


def panels(diagnoses: Sequence[Diagnosis]) -> tuple[Panel, ...]:
    """The signal propagation plots, with all diagnoses overlaid."""
    sums = max((d.signal.sums for d in diagnoses), key=len)
    names = tuple(s.name for s in sums)
    stages = tuple(i + 1 for i, s in enumerate(sums) if i > 0 and s.stage != sums[i - 1].stage)
    measured = [d for d in diagnoses if not _unmeasured(d.verdict)] or diagnoses
    lost = "; ".join(f"{d.name}: {not_measured(d.signal.unmeasured)}" for d in diagnoses if d.signal.unmeasured)
    wanted = (
        ("forward: variance of the sum", "sum", "variance"),
        ("backward: variance of the sum's gradient", "sum_gradient", "variance"),
        ("forward: squared mean of the sum", "sum", "mean_square"),
        ("forward: variance at the branch's end", "branch", "variance"),
    )
    return tuple(
        Panel(
            title=title,
            curves=tuple(
                Curve(d.name, tuple(d.signal.series(part, statistic)))
                for d in (measured if part == "sum_gradient" else diagnoses)
            ),
            y_label="squared mean" if statistic == "mean_square" else statistic,
            stages=stages,
            point_names=names,
            note=lost if part == "sum_gradient" else "",
        )
        for title, part, statistic in wanted
    )


def save(diagnoses: Sequence[Diagnosis], path: str | Path, *, title: str = "Signal propagation") -> Path:
    """Write diagnoses together as one .html page, .png or .svg picture, or .json file."""
    path = Path(path)
    match path.suffix.lower():
        case ".html":
            write_page(page(diagnoses, title), path)
        case ".png" | ".svg":
            write_plot(panels(diagnoses), path, title=title)
        case ".json":
            path.write_text(json.dumps(plain(diagnoses), indent=1), encoding="utf-8")
        case suffix:
            raise ValueError(f"expected a file name ending in .html, .png, .svg or .json, got '{suffix or path.name}'")
    return path


def page(diagnoses: Sequence[Diagnosis], title: str) -> Page:
    """The diagnoses as a page: a card with the verdict of each, the plots, and the table of numbers."""
    cards = tuple(
        Card(
            d.name,
            "warn" if d.verdict.odd else CARD_STATUS[d.verdict.status],
            d.verdict.word,
            " ".join(_sentence(text) for text in (d.verdict.sentence, d.verdict.recommendation)),
        )
        for d in diagnoses
    )
    notes = tuple(
        f"{', '.join(d.name for d in diagnoses if place in d.signal.injected.split(', '))}: {note}."
        for place, note in INJECTED.items()
        if any(place in d.signal.injected.split(", ") for d in diagnoses)
    )
    counts = sorted({len(d.signal.sums) for d in diagnoses})
    blocks = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return Page(
        title,
        subtitle=f"{blocks} residual blocks; one forward and one backward pass",
        cards=cards,
        panels=panels(diagnoses),
        tables=(table(diagnoses),),
        notes=notes,
    )


def _sentence(text: str) -> str:
    """A clause as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:]}."


def plain(diagnoses: Sequence[Diagnosis]) -> Any:
    """Diagnoses as data that JSON can hold."""
    return finite([d.to_json() for d in diagnoses])


def finite(value: Any) -> Any:
    """Plain data with numbers that JSON has no word for as strings."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
