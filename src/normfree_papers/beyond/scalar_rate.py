"""Our own claims on the scalars of Fixup: at which learning rates they train, and how that depends on depth.

Equation 5 of `fixup` leaves the scalar biases out. They move in sync and change the output by Θ(ηrL) in a step, where r
is their rate relative to that of the weights and L the number of branches (claim fixup/eq5). So the largest r that
trains should fall as 1/L. All accuracies are in per cent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normfree.report.panels import Curve, Panel
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Cost, Measurement, Scale, Settings, aside, expect, rows_claim, training_claim
from normfree_papers.claims.depth_curves import exponent, geometric_means, mean
from normfree_papers.claims.seed_metrics import (
    CHANCE_LINE,
    DEAD,
    SMALL,
    Numbers,
    NumbersByRow,
    Runs,
    combined,
    points_panel,
)
from normfree_papers.claims.shared_ranges import GAP, does_not_train, reading, trains

# Rates at 1,000 layers, in two precisions

_STEADY = {"no biases": "fixup:bias=false", "rate 10/L": "fixup:scalar_lr=10/L", "rate 0": "fixup:scalar_lr=0"}
_VARIANTS = {**_STEADY, "rate 0.1": "fixup", "rate 1": "fixup:scalar_lr=1"}
_PRECISIONS = {"float32": "float32", "mixed": "auto"}  # at this depth "auto" is mixed on a GPU
_AS_SHALLOW = (
    "a step changes the output by ηrL times a constant (fixup/eq5); at r = 10/L that is as much as 100 branches at a "
    "tenth, and without biases or at 0 nothing"
)


def _variant_rows(scale: Scale) -> dict[tuple[str, str], TrainConfig]:
    if scale == "quick":
        chosen = ("rate 10/L", "rate 1")
        deep = recipe("depth_test", model="wrn-52-1", **SMALL)
        return {(name, "float32"): deep.with_changes(method=_VARIANTS[name]) for name in chosen}
    deep = recipe("depth_test", model="wrn-1000-1")
    return {
        (name, precision): deep.with_changes(method=method, precision=setting)
        for name, method in _VARIANTS.items()
        for precision, setting in _PRECISIONS.items()
    }


@rows_claim(
    _variant_rows,
    "{}, {}",
    id="beyond/scalar_rate",
    where="Our question on the scalars' rate, at 1,000 layers",
    statement="At 1,000 layers it is the rate of the scalar biases, not the precision, that decides whether Fixup "
    "trains: at 10/L, at 0 and without biases it does, at the full rate it does not, at a tenth it is luck.",
    paper_value="none; the paper's rule is one rate at every depth",
    how="Recipe depth_test, WRN-1000-1 after one epoch of CIFAR-10: five variants of the scalars in float32 and in "
    "mixed precision (full); 52 layers on the embedded images, two variants (quick).",
    cost=Cost(quick_seconds=60, full_seconds=2150, device="gpu"),
    seeds=5,
    checks=(
        *(
            expect(
                f"accuracy, {name}, {precision}",
                low=DEAD,
                scale=None if (name, precision) == ("rate 10/L", "float32") else "full",
            ).derived(
                f"test accuracy with {name} in {precision}, in %: it trains",
                why=f"{_AS_SHALLOW}; an interval below {DEAD:g} % refutes it",
            )
            for name in _STEADY
            for precision in _PRECISIONS
        ),
        *(
            expect(f"accuracy, rate 1, {precision}", high=DEAD, scale="full").derived(
                f"test accuracy with the scalars at the full rate in {precision}, in %: it does not train",
                why="the change of a step is 50 times that at 10/L; an interval above 20 % refutes it",
            )
            for precision in _PRECISIONS
        ),
        expect("trains, rate 0.1", low=0.05, high=0.95, scale="full").reading(
            "share of seeds and precisions that train with the scalars at a tenth: some do and some do not",
            why=reading("luck", "neither fewer than one run in 20 nor more than 19", "outside of 0.05 to 0.95"),
            binary=True,
        ),
        expect("errors in float32 over mixed", low=1 / GAP, high=GAP, scale="full").reading(
            "test errors in float32 over those in mixed precision, mean over the variants that train",
            why=reading(
                "not", "a ratio of errors within 9.5 %, which section 4.2 of fixup calls a gap", "outside of it"
            ),
        ),
    ),
    needs_data="CIFAR-10",
)
def scalar_rate(runs: Runs, scale: Scale) -> Measurement:
    """Accuracy of a deep network for five rates of its scalars. Reference: none; fixup, equation 5, without biases."""
    found = runs.accuracies()
    columns = found.named("accuracy, {}, {}")
    values: dict[str, list[float]] = {}
    if scale == "full":
        errors = runs.errors()
        ratios = [errors[name, "float32"] / errors[name, "mixed"] for name in _STEADY]
        columns["errors in float32 over mixed"] = combined(ratios, mean)
        for name in _VARIANTS:
            columns[f"float32 - mixed, {name}"] = found[name, "float32"] - found[name, "mixed"]
        tenth = [number for precision in _PRECISIONS for number in found["rate 0.1", precision].values()]
        values |= {"trains, rate 0.1": [float(number > DEAD) for number in tenth]} if tenth else {}
    names = tuple(name for name in _VARIANTS if any(found[name, precision] for precision in _PRECISIONS))
    drawn = {precision: [found[name, precision] for name in names] for precision in _PRECISIONS}
    return Measurement(
        values={**columns, **values},
        panels=points_panel("test accuracy", drawn, names=names, levels=(CHANCE_LINE,)),
        notes=("a diverged run counts as chance",),
    )


# The law: the largest rate over depth

_MULTIPLES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of 1/L
_DEPTHS = {"full": (34, 100, 304, 1000, 3004), "quick": (16, 40)}
_FAR = 10_000


def branches(depth: int) -> int:
    """The number of residual branches of WRN-depth-1."""
    return (depth - 4) // 2


def largest_stable(trained: Mapping[float, bool]) -> float | None:
    """The largest rate that trains together with all smaller ones; None if the smallest does not train.

    >>> largest_stable({1.0: True, 10.0: True, 100.0: False, 1000.0: True})
    10.0
    """
    largest = None
    for rate in sorted(trained):
        if not trained[rate]:
            break
        largest = rate
    return largest


def extrapolated(points: Mapping[int, float], at: int) -> float:
    """The power law through the points, at another place.

    >>> round(extrapolated({10: 1.0, 100: 0.1}, 1000), 6)
    0.01
    """
    slope = exponent(list(points), list(points.values()))
    centre = [math.fsum(map(math.log, column)) / len(points) for column in (points, points.values())]
    return math.exp(centre[1] + slope * (math.log(at) - centre[0]))


_WORDS = "{:g}/L, {:,} layers"


@training_claim(
    id="beyond/scalar_rate_law",
    where="Our question on the scalars' rate, over depth",
    statement="The largest rate of the scalars at which Fixup trains falls as 1/L from 30 to 3,000 layers, and so "
    "predicts which rates train 10,000 layers.",
    paper_value="none; the paper's rule, a tenth at every depth, would be the exponent 0",
    how="Recipe depth_test for WRN-d-1 with 34, 100, 304, 1,000 and 3,004 layers, scalars at 1/L to 300/L in factors "
    "of about three; the largest rate that trains with all smaller ones, and its exponent in L by seed; then 10,000 "
    "layers at a third and at ten times of what the power law predicts (full); 16 and 40 layers on the embedded images "
    "at two rates (quick).",
    cost=Cost(quick_seconds=60, full_seconds=2460, device="gpu"),
    checks=(
        expect("exponent in L", paper=None, low=-1.25, high=-0.75, scale="full").derived(
            "the exponent of the largest rate that trains in the number of branches",
            why="a step changes the output by ηrL times a constant (fixup/eq5), so -1; rates in factors of 3.2 leave "
            "0.09 a seed over five depths, of which 0.25 is nearly three; 0 is the paper's rule",
        ),
        expect("limits inside the rates tried", low=1.0, scale="full").derived(
            "share of depths at which the smallest rate trains and the largest does not",
            why="otherwise the limit lies outside of the rates, and the exponent is that of the grid",
            exact=True,
        ),
        expect("accuracy, a third of the prediction, 10,000 layers", low=DEAD, scale="full").reading(
            "test accuracy at 10,000 layers with the scalars at a third of the predicted rate, in %: it trains",
            why=trains("predicts"),
        ),
        expect("accuracy, ten times the prediction, 10,000 layers", high=DEAD, scale="full").reading(
            "test accuracy at 10,000 layers with the scalars at ten times the predicted rate, in %: it does not train",
            why=does_not_train("predicts"),
        ),
        aside(f"accuracy, {_WORDS.format(10, 40)}", low=DEAD, scale="quick").reading(
            "test accuracy at 40 layers of the stand-in with the scalars at 10/L, in %: it trains", why=trains()
        ),
        expect(f"accuracy, {_WORDS.format(10, 16)}", low=DEAD, scale="quick").reading(
            "test accuracy at 16 layers of the stand-in with the scalars at 10/L, in %: it trains", why=trains()
        ),
    ),
    departures=("mixed precision", "batches of 64 at 10,000 layers"),
    needs_data="CIFAR-10",
)
def scalar_rate_law(settings: Settings) -> Measurement:
    """The largest stable rate of the scalars over depth. Reference: none; fixup, equation 5, without biases."""
    depths = _DEPTHS[settings.scale]
    small: dict[str, Any] = SMALL if settings.quick else {"precision": "mixed"}
    multiples = (10.0, 1000.0) if settings.quick else _MULTIPLES
    rows = {
        (m, depth): recipe("depth_test", model=f"wrn-{depth}-1", method=f"fixup:scalar_lr={m:g}/L", **small)
        for depth in depths
        for m in multiples
    }
    found = settings.train_rows(rows, _WORDS).accuracies()
    columns = found.named(f"accuracy, {_WORDS}")
    limits: dict[int, dict[int, float]] = {}  # the largest rate by seed and number of branches
    inside = Numbers()
    for seed in () if settings.quick else settings.seeds:
        if all(seed in column for column in found.values()):
            largest = {d: largest_stable({m: found[m, d][seed] > DEAD for m in multiples}) for d in depths}
            inside[seed] = mean([float(top is not None and top < multiples[-1]) for top in largest.values()])
            limits[seed] = {branches(d): top / branches(d) for d, top in largest.items() if top is not None}
    columns["limits inside the rates tried"] = inside
    columns["exponent in L"] = Numbers(
        {seed: exponent(list(points), list(points.values())) for seed, points in limits.items() if len(points) > 1}
    )
    predicted = {seed: extrapolated(limits[seed], branches(_FAR)) for seed in columns["exponent in L"]}
    columns |= _far_away(settings, predicted)
    curves = [Curve(f"seed {s}", tuple(p.values()), tuple(map(float, p))) for s, p in limits.items() if p]
    whole = [tuple(p.values()) for p in limits.values() if len(p) == len(depths)]
    if len(whole) > 1:
        curves.append(Curve("all seeds", geometric_means(whole), tuple(float(branches(d)) for d in depths)))
    title = "largest rate of the scalars that trains, relative to that of the weights"
    return Measurement(
        values=columns,
        panels=(Panel(title, tuple(curves), "", "branches", log_x=True),) if curves else (),
        notes=("a diverged run counts as chance",),
    )


def _far_away(settings: Settings, predicted: Mapping[int, float]) -> NumbersByRow:
    """Accuracies at 10,000 layers below and above the predicted rate, for the seeds that have a prediction."""
    deep = recipe("depth_test_10000")
    factors = {"a third of the prediction": 1 / 3, "ten times the prediction": 10.0}
    names = {name: f"{name}, {_FAR:,} layers" for name in factors}
    wanted = {
        f"{names[name]}, seed {seed}": deep.with_changes(
            method=f"fixup:scalar_lr={factor * rate * branches(_FAR):.3g}/L", seed=seed
        )
        for name, factor in factors.items()
        for seed, rate in predicted.items()
    }
    runs = settings.train(wanted) if wanted else {}
    made = {name: {s: run for s in predicted if (run := runs[f"{name}, seed {s}"])} for name in names.values()}
    return Runs(made).accuracies().named("accuracy, {}")
