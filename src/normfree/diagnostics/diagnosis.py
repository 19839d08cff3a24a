"""A diagnosis of a model: its signal and the verdict on it, as text, table, plot, page and JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normfree.arguments import check_arguments, check_call, model_inside
from normfree.diagnostics.measurement.layer_weights import layer_table
from normfree.diagnostics.passes.fault_localization import measure_causes
from normfree.diagnostics.passes.invariants import check_behaviour
from normfree.diagnostics.propagation import Loss, propagate
from normfree.diagnostics.rules.findings import SEVERITY, SignalStatus
from normfree.diagnostics.rules.growth import Direction
from normfree.diagnostics.signal_details import details
from normfree.diagnostics.signals import Signal
from normfree.diagnostics.verdict import Verdict, judge, not_measured
from normfree.graph import supports_conversion
from normfree.methods import get
from normfree.models import BaseModel, supports
from normfree.nn.model_state import call_arguments, eagerly, is_sharded, parts_of, preserve_model_state
from normfree.nn.normalizers import untrained_norms
from normfree.plan import ResidualPlan, remembered_method
from normfree.report.page import Card, Page, Section, write_page
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot
from normfree.report.tables import Column, Rating, Table, compact, notebook_html, print_table, shorten_names, sparkline
from normfree.storage.writing import to_json_values

CARD_STATUS: dict[SignalStatus, Rating] = {
    **dict.fromkeys(("preserved", "growing"), "good"),
    "drifting": "warn",
    **dict.fromkeys(("vanishing", "exploding", "faulty", "dead branch"), "bad"),
}
INJECTED = {
    "output": "no targets were given: a random gradient was injected at the output",
    "outputs": "no targets were given: a random gradient was injected at every output that feeds no other output",
    "features": "the classifier is zero and lets no gradient through: a random gradient was injected at its input",
    "memory": "the attentions over the encoder's output return zero: a random gradient was injected there, too",
}
_PLAIN_PANELS = (
    ("forward: second moment of the layer's output", "level", "second moment"),
    ("backward: squared norm of its gradient", "gradient_level", "squared norm"),
)
_SUM_PANELS = (
    ("forward: variance of the sum", "level", "variance"),
    ("backward: variance of the sum's gradient", "gradient_level", "variance"),
    ("forward: squared mean of the sum", "sum.mean_square", "squared mean"),
    ("forward: variance at the branch's end", "branch.variance", "variance"),
)


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of `diagnose`: print it, or save it as .html, .png, .svg or .json.

    Attributes:
        name: The name of the model in tables and plots.
        signal: The measured signal.
        verdict: The verdict on the signal.
    """

    name: str
    signal: Signal
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain data; numbers may be NaN or infinite."""
        return {"name": self.name, "verdict": self.verdict.to_json(), "signal": self.signal.to_json()}

    def save(self, path: str | Path) -> Path:
        """Write the diagnosis to a file.

        Args:
            path: A file name that ends in .html, .png, .svg or .json. The page is a single file that works offline.

        Returns:
            The path of the file.

        Raises:
            ValueError: if the file name has another ending.
            ImportError: if a page needs jinja2, or a plot matplotlib, and it is not installed.
        """
        return save([self], path)

    def __repr__(self) -> str:
        verdict, signal = self.verdict, self.signal
        block = "layer" if signal.plain else "block"
        factors = (
            f"forward ×{compact(verdict.forward.factor)} and backward ×{compact(verdict.backward.factor)} per {block}"
        )
        return f"Diagnosis({self.name!r}: {verdict.word}; {_count([self])}, {factors})"

    def _repr_html_(self) -> str:
        """Return the verdict and the table of numbers for a notebook."""
        verdict = self.verdict
        sentences = [verdict.sentence, verdict.recommendation, *filter(None, [verdict.more]), *details(self.signal)]
        return notebook_html(f"{self.name}: {verdict.word}", map(_sentence, sentences), table([self]))

    def __str__(self) -> str:
        """Return the table and the text that the command line prints."""
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
    """Measure how the signal travels through a model, forward and backward, and judge it.

    One forward and one backward pass measure every residual sum, or every weight layer of a network without sums, and
    the input, the output and the first loss. The model is unchanged: modes, gradients, buffers, hooks and random
    states. `docs/diagnosis.md` explains the words of the verdict and their limits.

    Args:
        model: Any model with weight layers. A compiled one is measured as plain Python.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments.
        targets: The second argument of the loss. Without targets and loss, the backward pass starts from a random
            gradient at every output that feeds no other output.
        name: The name in tables and plots (default: the model's name or class).
        plan: The residual plan (default: the one that the model remembers, or the discovered one).
        loss: A function of the output and the targets (default: cross-entropy).
        generator: The source of random gradients (default: seed 0).

    Returns:
        The diagnosis; print it, or save it as a page, plot or JSON file.

    Raises:
        ValueError: if the model has no layers to measure, is on the meta device or returns no tensor, if the plan
            belongs to another model, or if the batch is too small for a variance or has the wrong type.

    >>> from normfree.models import build
    >>> images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> diagnose(build("resnet56", "he_in"), images).verdict.status
    'exploding'
    """
    check_arguments(model=model, inputs=inputs, loss=loss, plan=plan)
    model = model_inside(model)
    check_call(model, *call_arguments(inputs))
    label = name or str(getattr(model, "name", type(model).__name__))
    with eagerly():
        return _diagnose(model, inputs, targets, label, plan, loss, generator)


def _diagnose(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    label: str,
    plan: ResidualPlan | None,
    loss: Loss | None,
    generator: torch.Generator | None,
) -> Diagnosis:
    """Measure a model, again where chance or a fault calls for it, and judge it."""
    signal = propagate(model, inputs, targets, plan=plan, loss=loss, generator=generator)
    parts = parts_of(model)
    if not signal.unmeasured and not any(map(is_sharded, parts.parameters.values())):
        failed = check_behaviour(model, parts, call_arguments(inputs), targets, loss, signal)
        signal = replace(signal, facts=(*signal.facts, *failed))
    verdict = judge_model(model, signal)
    if any(s.branch.norm == 0 for s in signal.sums if s.name in verdict.dead):
        with preserve_model_state(model, parts):  # a branch may be left out at random, as by stochastic depth
            torch.manual_seed(0)
            again = propagate(model, inputs, targets, plan=signal.plan, loss=loss, generator=generator)
        sums = [new if old.name in verdict.dead else old for old, new in zip(signal.sums, again.sums, strict=True)]
        signal = replace(signal, sums=tuple(sums))
        verdict = judge_model(model, signal)
    if verdict.at_least("vanishing"):
        signal = measure_causes(signal, model, inputs, targets, loss)
        verdict = judge_model(model, signal)
    return Diagnosis(label, signal, verdict)


def judge_model(model: nn.Module, signal: Signal) -> Verdict:
    """Judge a model's signal; the verdict recommends only methods that fit the model and that it does not use yet."""
    known = model.method.name if isinstance(model, BaseModel) else remembered_method(model) or ""
    spec: str = getattr(signal.plan.changes, "method", None) or known
    verdict = judge(signal, method=spec.partition(":")[0], supports=_supported(model, signal.plan))
    if verdict.is_healthy or not (new := untrained_norms(model)):
        return verdict
    advice = "call model.train() and diagnose again: before training, batch norms in evaluation mode normalize nothing"
    return replace(verdict, recommendation=f"{advice} ({shorten_names(new)})")


def _supported(model: nn.Module, plan: ResidualPlan) -> Callable[[str], bool]:
    """Return a function that tells by name which methods the model can be built with, or converted to."""
    if isinstance(model, BaseModel):
        return functools.partial(supports, model.name)
    return lambda name: supports_conversion(model, plan, get(name))


def summary(*diagnoses: Diagnosis) -> str:
    """Write the verdicts as text, followed by the places where random gradients were injected."""
    lines: list[str] = []
    starts: dict[str, list[str]] = {}
    for d in diagnoses:
        lines += [f"{d.name}: {d.verdict.word}", f"  {d.verdict.sentence}", f"  {d.verdict.recommendation}"]
        lines += [f"  {line}" for line in (*filter(None, [d.verdict.more]), *details(d.signal))]
        for place in filter(None, d.signal.injected.split(", ")):
            starts.setdefault(INJECTED[place], []).append(d.name)
    for start, names in starts.items():
        whose = "" if len(names) == len(diagnoses) else f"{', '.join(names)}: "
        lines.append(f"({whose}{start})")
    return "\n".join(lines)


def _count(diagnoses: Sequence[Diagnosis]) -> str:
    """The number of places that were measured, such as '27 residual sums'."""
    counts = sorted({len(d.signal.sums) for d in diagnoses})
    plain = {d.signal.plain for d in diagnoses}
    what = "places" if len(plain) > 1 else "weight layers" if True in plain else "residual sums"
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} {what if counts != [1] else what[:-1]}"


def table(diagnoses: Sequence[Diagnosis]) -> Table:
    """Make a table with one row for each diagnosis: verdict, factors, and both curves as sparklines."""
    columns = (
        Column("network"),
        Column("verdict"),
        Column("forward"),
        Column("per block", justify="right"),
        Column("in all", justify="right"),
        Column("backward"),
        Column("per block", justify="right"),
        Column("in all", justify="right"),
        Column("worst place"),
    )
    rows = tuple(
        (
            d.name,
            d.verdict.status,
            *_cells(d.verdict.forward, [s.level for s in d.signal.sums]),
            *_cells(d.verdict.backward, [s.gradient_level for s in d.signal.sums]),
            _worst_place(d.verdict),
        )
        for d in diagnoses
    )
    caption = (
        "curves are log variance, first block left; 'in all' compares both ends of the network; "
        "'per block' is within stages"
    )
    if any("growing" in (d.verdict.forward.status, d.verdict.backward.status) for d in diagnoses):
        caption += ", ↘ approaches 1 with depth"
    where = "weight layers" if all(d.signal.plain for d in diagnoses) else "residual blocks"
    return Table(f"signal through the {where}", columns, rows, caption)


def _worst_place(verdict: Verdict) -> str:
    """The place to look at first."""
    if verdict.findings and verdict.findings[0].place:
        return verdict.findings[0].place
    if verdict.dead or verdict.outliers:
        return (*verdict.dead, *(outlier.name for outlier in verdict.outliers))[0]
    measured = [d for d in (verdict.forward, verdict.backward) if d.status != "not measured"]
    worst = max(measured, key=lambda d: SEVERITY.index(d.status), default=None)
    return worst.worst if worst is not None and verdict.at_least("vanishing") else "–"


def _cells(direction: Direction, levels: Sequence[float]) -> tuple[str, str, str]:
    """The curve, the factor per block and the change in all; an arrow marks factors that fall with depth."""
    if direction.status == "not measured":
        return "not measured", "–", "–"
    factor = f"{direction.factor:.2f}{'↘' if direction.status == 'growing' else ''}"
    return sparkline(levels, width=12), factor, compact(direction.total)


def panels(diagnoses: Sequence[Diagnosis]) -> tuple[Panel, ...]:
    """Make the signal propagation plots, with one curve for each diagnosis."""
    sums = max((d.signal.sums for d in diagnoses), key=len)
    names = tuple(s.name for s in sums)
    stages = tuple(i + 1 for i, s in enumerate(sums) if i > 0 and s.stage != sums[i - 1].stage)
    measured = [d for d in diagnoses if d.verdict.backward.status != "not measured"] or diagnoses
    lost = "; ".join(f"{d.name}: {not_measured(d.signal.unmeasured)}" for d in diagnoses if d.signal.unmeasured)
    plain = all(d.signal.plain for d in diagnoses)
    wanted = _PLAIN_PANELS if plain else _SUM_PANELS
    return tuple(
        Panel(
            title=title,
            curves=tuple(
                Curve(d.name, tuple(attrgetter(part)(s) for s in d.signal.sums))
                for d in (measured if part == "gradient_level" else diagnoses)
            ),
            y_label=label,
            x_label="weight layer" if plain else "residual block",
            stages=stages,
            point_names=names,
            note=lost if part == "gradient_level" else "",
        )
        for title, part, label in wanted
    )


def save(diagnoses: Sequence[Diagnosis], path: str | Path, *, title: str = "Signal propagation") -> Path:
    """Write several diagnoses to one file, a page, plot or JSON by its ending.

    Raises:
        ValueError: if the file name does not end in .html, .png, .svg or .json.
        ImportError: if a page needs jinja2, or a plot matplotlib, and it is not installed.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".html":
            write_page(page(diagnoses, title), path)
        case ".png" | ".svg":
            write_plot(panels(diagnoses), path, title=title)
        case ".json":
            path.write_text(json.dumps(json_data(diagnoses), indent=1), encoding="utf-8")
        case suffix:
            raise ValueError(f"expected a file name ending in .html, .png, .svg or .json, got '{suffix or path.name}'")
    return path


def page(diagnoses: Sequence[Diagnosis], title: str) -> Page:
    """Make a page: a card with the verdict of each diagnosis, the plots, and the table of numbers."""
    cards = tuple(
        Card(
            d.name,
            rating(d.verdict),
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
    return Page(
        title,
        subtitle=f"{_count(diagnoses)}; one forward and one backward pass",
        cards=cards,
        panels=panels(diagnoses),
        sections=tuple(
            Section(
                f"Weight layers of {d.name}",
                tuple(map(_sentence, details(d.signal))),
                folded=(layer_table(d.name, d.signal.layers),),
            )
            for d in diagnoses
        ),
        tables=(table(diagnoses),),
        notes=notes,
    )


def rating(verdict: Verdict) -> Rating:
    """The colour of a verdict; growth by a thousandfold or more is no good sign, whatever its law."""
    found = CARD_STATUS[verdict.status]
    return "warn" if found == "good" and not verdict.is_healthy else found


def _sentence(text: str) -> str:
    """Turn a clause into a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def json_data(diagnoses: Sequence[Diagnosis]) -> Any:
    """Return diagnoses as data for JSON, in which numbers that are not finite are strings."""
    return to_json_values([d.to_json() for d in diagnoses])
