"""The claims of `wninit` on how deep a network can be trained: MLPs, plain CNNs and wide ResNets.

Reference: Arpit, Campos, Bengio 2019, section 5.1. All accuracies are in per cent. The supplement with the settings was
not available; the recipes and `how` state our choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from normfree.report.panels import Curve, Panel
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, Settings, aside, expect, training_claim
from normfree_papers.claims.depth_curves import mean
from normfree_papers.claims.seed_metrics import (
    CHANCE,
    CHANCE_LINE,
    DEAD,
    DIVERGED,
    QUICK_SETTINGS,
    NumbersByRow,
    accuracy,
    combined,
)
from normfree_papers.claims.shared_ranges import does_not_train, it_trains, reading
from normfree_papers.wninit.sweep import Sweep

_PLAIN = {"proposed": "wn", "data-dependent": "wn_data"}
_RESIDUAL = {**_PLAIN, "stage-wise Hanin": "wn_hanin", "PyTorch default": "wn_default"}
_DECADES: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # down to the smallest that the text names
_SMALL: dict[str, Any] = {**QUICK_SETTINGS, "flip": False}
_EMBEDDED, _CIFAR = "the embedded images", "CIFAR-10"
_NAMES = "{}, {} layers"  # of the accuracies: initialization and depth


def _only(depth: int, quick: tuple[int, ...]) -> Scale | None:
    """The scale of a check on a depth: None (both scales) if the quick run also covers this depth."""
    return None if depth in quick else "full"


def _networks(kind: str, depths: Iterable[int], width: int, **changes: Any) -> dict[int, TrainConfig]:
    """The MLPs or CNNs of these depths; the classifier is one more layer."""
    return {d: recipe(f"wninit_{kind}", model=f"{kind}-{d + 1}-{width}", **changes) for d in depths}


# Figure 2: fully connected networks

_MLP_DEPTHS, _MLP_QUICK = (10, 20, 50, 100, 200), (20, 50)
_CHOSEN = ("the supplement with the settings was not available: width, epochs and rates are chosen",)


def _mlps(settings: Settings) -> Sweep:
    """The runs of both figures; a diverged run counts as 0, as in the caption."""
    if settings.quick:
        networks, rates = _networks("mlp", _MLP_QUICK, 128, **_SMALL, epochs=5, batch_size=64), _DECADES[1:4]
    else:
        networks, rates = _networks("mlp", _MLP_DEPTHS, 500), _DECADES
    return Sweep.run(settings, _PLAIN, networks, rates, diverged=0.0, trains=50.0)


def _trains(label: str, depth: int, quick: tuple[int, ...], paper: str = "trains", **options: Any) -> Check:
    what = f"test accuracy of the {label} initialization at {depth} layers"
    return it_trains(f"{label}, {depth} layers", what, paper=paper, scale=_only(depth, quick), **options)


def _stand_in_trains(depth: int) -> Check:
    what = f"test accuracy of the proposed initialization at {depth} layers of the stand-in"
    return it_trains(f"proposed, {depth} layers", what, scale="quick")


_HALF = reading("train", "half of the test images, five times chance", "below 50 %")
_LINEAR = reading("successfully", "no worse than a linear classifier, 12 % error on MNIST (LeCun 1998)", "below 88 %")


@training_claim(
    id="wninit/fig2_left",
    where="Figure 2, left",
    statement="With the proposed initialization MLPs of up to 200 layers train on MNIST; with the data-dependent one "
    "those of up to 20 do, and deeper ones diverge at any learning rate.",
    paper_value="a plot: data-dependent up to 20 layers, also at a rate of 1e-5; proposed up to 200",
    how="Recipe wninit_mlp at rates from 0.1 to 1e-5 in factors of ten, the best chosen on held-out images; hidden "
    "layers are counted, as the authors do; width 500, 20 epochs and the depths 10, 20, 50, 100 and 200 are chosen; 20 "
    "and 50 layers of width 128 on the embedded images (quick).",
    cost=Cost(quick_seconds=100, full_seconds=12100, device="gpu"),
    checks=(
        *(_trains("proposed", depth, _MLP_QUICK, low=50.0, why=_HALF) for depth in _MLP_DEPTHS[:-1]),
        _trains("proposed", 200, _MLP_QUICK, "trains successfully", low=88.0, why=_LINEAR),
        *(_trains("data-dependent", depth, _MLP_QUICK, low=50.0, why=_HALF) for depth in (10, 20)),
        *(
            expect(
                f"data-dependent, {depth} layers", paper="diverges", high=50.0, scale=_only(depth, _MLP_QUICK)
            ).reading(
                f"best test accuracy of the data-dependent initialization at {depth} layers, in %: it does not train",
                why=reading("diverges", "less than half of the test images; a diverged run counts as 0", "above 50 %"),
            )
            for depth in (50, 100, 200)
        ),
    ),
    departures=_CHOSEN,
    version=2,
    needs_data="MNIST",
)
def fig2_left(settings: Settings) -> Measurement:
    """Accuracy of MLPs over depth. Reference: wninit, section 5.1, Figure 2 left."""
    sweep = _mlps(settings)
    return Measurement(
        values=_accuracies(sweep).named(_NAMES),
        panels=sweep.panels(_EMBEDDED if settings.quick else "MNIST"),
        notes=(*sweep.notes(), "a diverged run counts as 0, as in the paper"),
    )


def _accuracies(sweep: Sweep) -> NumbersByRow:
    """Accuracy of every initialization and depth at its best rate."""
    return NumbersByRow({place: sweep.accuracies(*place) for place in product(sweep.labels, sweep.depths)})


@training_claim(
    id="wninit/fig2_right",
    where="Figure 2, right",
    statement="More settings of the sweep train with the proposed initialization, which allows learning rates up to "
    "ten times larger for most depths.",
    paper_value="a plot of the accuracy of every job; rates up to 10 times larger for most depths",
    how="The runs of wninit/fig2_left: all depths and learning rates; the paper's sweep is in a supplement that is not "
    "available.",
    cost=Cost(quick_seconds=100, full_seconds=12100, device="gpu"),
    checks=(
        expect("share, proposed - data-dependent", paper="more robust", low=0.0).reading(
            "share of settings that train: proposed less data-dependent",
            why=reading("robust", "more of the settings reach half of the test images", "below 0"),
        ),
        expect("share, proposed", paper="a plot", low=0.04).reading(
            "share of settings that train with the proposed initialization: two that never train are not robust",
            why=reading("robust", "at least one of the 25 settings trains", "below 0.04"),
        ),
        aside("depths with a rate ten times larger", paper="most depths", low=0.5).reading(
            "the share of depths at which the largest rate that trains is at least ten times larger",
            why=reading(
                "most", "at least half of the depths, with those where the other trains at no rate", "below 0.5"
            ),
        ),
    ),
    departures=_CHOSEN,
    version=2,
    needs_data="MNIST",
)
def fig2_right(settings: Settings) -> Measurement:
    """The accuracy of every job of the sweep. Reference: wninit, section 5.1, Figure 2 right."""
    sweep = _mlps(settings)
    shares = NumbersByRow({label: sweep.shares(label) for label in sweep.labels})
    curves = []
    for label in sweep.labels:
        runs = [run for (row, *_), seeds in sweep.runs.items() if row == label for run in seeds.values()]
        runs.sort(key=lambda run: (run.diverged, -accuracy(run)))
        crossed = tuple(i for i, run in enumerate(runs) if run.diverged)
        curves += [Curve(label, tuple(map(accuracy, runs)), crossed=crossed)] if runs else []
    title, x_label = f"test accuracy of every job, {_EMBEDDED if settings.quick else 'MNIST'}", "job, the best first"
    drawn: dict[str, Any] = {"levels": (CHANCE_LINE,), "note": DIVERGED}
    return Measurement(
        values={
            **shares.named("share, {}"),
            **shares.differences(("proposed", "data-dependent")).named("share, {}"),
            "depths with a rate ten times larger": sweep.allows("proposed", "data-dependent", 10),
        },
        panels=(Panel(title, tuple(curves), "%", x_label, log_y=False, **drawn),) if curves else (),
        notes=sweep.notes(),
    )


# Figure 3: plain convolutional networks, and residual ones

_CNN_DEPTHS, _CNN_QUICK = (10, 50, 100), (10, 20)


@training_claim(
    id="wninit/fig3_left",
    where="Figure 3, left",
    statement="The proposed initialization trains very deep plain CNNs on CIFAR-10, where the data-dependent one "
    "fails.",
    paper_value="a plot: the same trend as for MLPs, the data-dependent one fails at very deep networks",
    how="Recipe wninit_cnn, 3×3 layers with stride 2 in the first two, at rates from 0.1 to 1e-5; width 128, 10 epochs "
    "and the depths 10, 50 and 100 are chosen; 10 and 20 layers of width 32 on the embedded images (quick).",
    cost=Cost(quick_seconds=60, full_seconds=4360, device="gpu"),
    checks=(
        *(_trains("proposed", depth, _CNN_QUICK) for depth in _CNN_DEPTHS),
        _trains("data-dependent", 10, _CNN_QUICK),
        _stand_in_trains(20),
        expect("data-dependent, 100 layers", paper="fails", high=DEAD, scale="full").reading(
            "best test accuracy of the data-dependent initialization at 100 layers, in %: it does not train",
            why=does_not_train("failing"),
        ),
    ),
    departures=_CHOSEN,
    version=2,
    needs_data="CIFAR-10",
)
def fig3_left(settings: Settings) -> Measurement:
    """Accuracy of plain CNNs over depth. Reference: wninit, section 5.1, Figure 3 left."""
    if settings.quick:
        networks, rates = _networks("cnn", _CNN_QUICK, 32, **_SMALL, epochs=3, batch_size=64), _DECADES[1:3]
    else:
        networks, rates = _networks("cnn", _CNN_DEPTHS, 128), _DECADES
    sweep = Sweep.run(settings, _PLAIN, networks, rates, diverged=CHANCE, trains=DEAD)
    return Measurement(
        values=_accuracies(sweep).named(_NAMES),
        panels=sweep.panels(_EMBEDDED if settings.quick else _CIFAR),
        notes=(*sweep.notes(), "a diverged run counts as chance"),
    )


_WRN_DEPTHS, _WRN_QUICK = (100, 1_000, 10_000), (16, 40)
_WRN_RATES: tuple[float, ...] = (0.1, 0.03, 0.01, 0.003, 0.001)
_DEEP = "PyTorch default, share of depths that train"
SIMILAR = 9.19 / 7.87  # ResNet-56 of Table 1
_SIMILAR = reading(
    "similar",
    "less than 16.8 % more errors, the smallest difference that Table 1 counts as better (9.19 against 7.87 %)",
    "of the ratio of errors above 1.168",
)


@training_claim(
    id="wninit/fig3_right",
    where="Figure 3, right",
    statement="After one epoch WRN-d-1 with the proposed initialization is as accurate at 10,000 layers as at 100; "
    "PyTorch's default diverges for most depths, the data-dependent one learns slower the deeper it is, and stage-wise "
    "Hanin needs rates ten times smaller.",
    paper_value="a plot over depths to 10,000, five seeds; similar accuracy at all depths",
    how="Recipe wninit_depth at five rates from 0.1 to 0.001, the best chosen on held-out images, at the chosen depths "
    "100, 1,000 and 10,000; 16 and 40 layers on the embedded images at 0.03 and 0.01 (quick).",
    cost=Cost(quick_seconds=60, full_seconds=5630, device="gpu"),
    checks=(
        *(_trains("proposed", depth, _WRN_QUICK) for depth in _WRN_DEPTHS),
        _stand_in_trains(40),
        expect("proposed, most errors over fewest", paper="similar accuracy", high=SIMILAR, scale="full").reading(
            "largest over smallest test error of the proposed initialization over all depths", why=_SIMILAR
        ),
        expect(_DEEP, paper="diverges for most depths", high=0.5).reading(
            "share of depths that PyTorch's default trains at some rate: it diverges for most",
            why=reading("most", "at least half of the depths", "above 0.5"),
        ),
        expect(
            "proposed - data-dependent, 10000 layers",
            paper="significantly slower for deeper networks",
            low=0.0,
            scale="full",
        ).reading(
            "accuracy at 10,000 layers, proposed less data-dependent, in points: the data-dependent one learns slower",
            why=reading("slower", "a lower accuracy after one epoch", "below 0"),
        ),
        aside(
            "errors over stage-wise Hanin's, mean over depths",
            paper="similar accuracy",
            low=1 / SIMILAR,
            high=SIMILAR,
            scale="full",
        ).reading(
            "test error of the proposed initialization over that of stage-wise Hanin: they are similar", why=_SIMILAR
        ),
        expect(
            "depths with a rate ten times Hanin's",
            paper="an order of magnitude larger learning rates",
            low=0.5,
            scale="full",
        ).reading(
            "the share of depths that train at ten times the largest rate of stage-wise Hanin",
            why=reading("order", "a factor of ten at half of the depths at least", "below 0.5"),
        ),
    ),
    departures=("bf16 or mixed precision on a GPU", "three seeds and five rates; the paper has five seeds"),
    version=2,
    needs_data="CIFAR-10",
)
def fig3_right(settings: Settings) -> Measurement:
    """Accuracy of WRN-d-1 after one epoch. Reference: wninit, section 5.1, Figure 3 right."""
    small, depths, rates = (_SMALL, _WRN_QUICK, _WRN_RATES[1:3]) if settings.quick else ({}, _WRN_DEPTHS, _WRN_RATES)
    networks = {d: recipe("wninit_depth", model=f"wrn-{d}-1", **small) for d in depths}
    sweep = Sweep.run(settings, _RESIDUAL, networks, rates, diverged=CHANCE, trains=DEAD)
    found = _accuracies(sweep)
    columns = found.named(_NAMES)
    for label, depth in product(list(_RESIDUAL)[1:], depths):
        columns[f"proposed - {label}, {depth} layers"] = found["proposed", depth] - found[label, depth]
    own, hanin, default = (
        [found[label, depth] for depth in depths] for label in ("proposed", "stage-wise Hanin", "PyTorch default")
    )
    columns["proposed, most errors over fewest"] = combined(own, lambda xs: (100 - min(xs)) / (100 - max(xs)))
    ratios = [combined(pair, lambda xs: (100 - xs[0]) / (100 - xs[1])) for pair in zip(own, hanin, strict=True)]
    columns["errors over stage-wise Hanin's, mean over depths"] = combined(ratios, mean)
    columns[_DEEP] = combined(default, lambda xs: mean([float(x >= sweep.trains) for x in xs]))
    columns["depths with a rate ten times Hanin's"] = sweep.allows("proposed", "stage-wise Hanin", 10)
    return Measurement(
        values=columns,
        panels=sweep.panels(f"one epoch of {_EMBEDDED if settings.quick else _CIFAR}"),
        notes=(*sweep.notes(), "a diverged run counts as chance"),
    )
