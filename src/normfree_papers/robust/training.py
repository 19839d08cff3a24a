"""The claims of `robust` on trained networks: Figures 3, 6 and 7, ResNet-50, 18 and 101 on CIFAR-10.

The paper prints no accuracy, so the checks follow the text about the plots. All accuracies are in per cent.

Reference: "A robust initialization of residual blocks", ICLR 2022 submission, section 4 and appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from normfree.report import Table
from normfree.report.panels import Panel, ReferenceLine
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import SCALES, Check, Cost, Measurement, Scale, aside, expect, rows_claim
from normfree_papers.claims.depth_curves import mean, table
from normfree_papers.claims.seed_metrics import (
    CHANCE_LINE,
    DEAD,
    DIVERGED,
    QUICK_SETTINGS,
    NumbersByRow,
    Runs,
    combined,
    diverged_points,
    points_panel,
)
from normfree_papers.claims.shared_ranges import it_trains
from normfree_papers.robust.signal import BROCK, PROPOSED

_NORMED = "BatchNorm"
_CONV, _OTHERS = PROPOSED["convshort"], (PROPOSED["idshort"], PROPOSED["learnscalar"])
_FAN_IN, _ISOGRAD = "ConvShort (He fan-in, the control)", "ConvShort (isograd, ours)"
ROWS = {_NORMED: "batchnorm_convshort", **{label: name for name, label in (PROPOSED | BROCK).items()}}
BESIDE = {_FAN_IN: "convshort:fan=in", _ISOGRAD: "isograd:shortcut=conv"}  # of Figure 3; not in the paper

EPOCHS = 30  # the paper gives none; the three figures then take about an hour on one H200
_TRAINED = 50.0
_GAP = 1.0  # points
_SMALL: dict[str, Any] = {**QUICK_SETTINGS, "form": "pre", "epochs": 12, "flip": False}


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """One of the three figures: its network, the stand-in of the quick scale, and the text about it."""

    number: int
    depth: int
    stand_in: str  # with as many blocks, and as many layers per block
    brock_trains: bool
    conv_is_best: bool
    rank: int | None  # of ConvShort among all rows, if the text gives one
    reading: str  # the plot in words
    cost: Cost  # of the full scale by `gpu_seconds`; a diverged run is shorter

    def network(self, scale: Scale) -> str:
        """The name of the network that is trained."""
        return self.stand_in if scale == "quick" else f"ResNet-{self.depth}"

    def config(self, row: str, scale: Scale) -> TrainConfig:
        """The run of a row of the caption."""
        name = "robust_cifar_batchnorm" if row == _NORMED else "robust_cifar"
        run = recipe(name, method=(ROWS | BESIDE)[row])
        if scale == "quick":
            return run.with_changes(model=self.stand_in, randaugment=(0, 0), **_SMALL)
        return run.with_changes(model=f"preact_resnet{self.depth}", epochs=EPOCHS)

    def rows(self, scale: Scale) -> dict[str, TrainConfig]:
        """The runs of the caption, and with Figure 3 at full scale those beside it."""
        rows = ROWS | BESIDE if self.number == 3 and scale == "full" else ROWS
        return {row: self.config(row, scale) for row in rows}


FIGURES = (
    _Figure(
        number=3,
        depth=50,
        stand_in="resmlp-16-64-3",
        brock_trains=False,
        conv_is_best=True,
        rank=None,
        reading="Brock's rows are absent, and ConvShort outperforms batch norm at the last epochs",
        cost=Cost(quick_seconds=70, full_seconds=2_290, device="gpu"),
    ),
    _Figure(
        number=6,
        depth=18,
        stand_in="resmlp-8-64-2",
        brock_trains=True,
        conv_is_best=False,
        rank=2,
        reading="all seven rows train, and ConvShort is the second-best",
        cost=Cost(quick_seconds=40, full_seconds=1_140, device="gpu"),
    ),
    _Figure(
        number=7,
        depth=101,
        stand_in="resmlp-33-64-3",
        brock_trains=False,
        conv_is_best=True,
        rank=1,
        reading="Brock's rows are absent, and ConvShort is the best",
        cost=Cost(quick_seconds=140, full_seconds=2_770, device="gpu"),
    ),
)


# Checks

_ACCURACY = "test accuracy, {}, {}"  # the name of a number: row and network


def _checks(figure: _Figure) -> tuple[Check, ...]:
    checks = [
        _row_check(figure, label, scale) for rows in (PROPOSED, BROCK) for scale in SCALES for label in rows.values()
    ]
    checks.append(
        expect(_lead(_NORMED, _CONV), paper="closes the gap", high=_GAP, scale="full").reading(
            "ConvShort closes the gap to batch norm: points of test accuracy that are left",
            why="our reading of the word 'close the gap': at most one point is left; more refutes it",
        )
    )
    if figure.conv_is_best:
        checks += [
            expect(_lead(_CONV, label), paper="only ConvShort closes the gap", low=0.0, scale="full").reading(
                f"only ConvShort closes it: points of test accuracy by which it leads {_short(label)}",
                why="our reading of the word 'only': ConvShort leads the other two; a negative lead refutes it",
            )
            for label in _OTHERS
        ]
    if figure.number == 3:
        checks += [
            aside(_lead(_CONV, _NORMED), paper="outperforms", low=0.0, scale="full").reading(
                "test accuracy of ConvShort less that of batch norm at the last epochs, in points: it even outperforms "
                "it",
                why="our reading of the word 'outperform': above batch norm; a negative difference refutes it",
            ),
            aside(_lead(_CONV, _FAN_IN), paper="gradient preserving initialization", low=0.0, scale="full").reading(
                "points of test accuracy by which fan-out leads fan-in: the initialization that preserves the gradient "
                "is the better one (the control)",
                why="our reading of the word 'thanks to': training is possible thanks to fan-out, so fan-in must not "
                "do better; a negative lead refutes it",
            ),
        ]
    if figure.rank is not None:
        place = "the best" if figure.rank == 1 else "the second-best"
        checks.append(
            aside("rank of ConvShort", paper=place, low=figure.rank, high=figure.rank, scale="full").printed(
                "the place of ConvShort among all seven rows, by test accuracy",
                why="the place that appendix A gives; a remark, since rows that are close change places",
            )
        )
    return tuple(checks)


def _row_check(figure: _Figure, label: str, scale: Scale) -> Check:
    """A row of the caption trains; with Brock's weights, it does so only where the paper says so."""
    name, what = _ACCURACY.format(label, figure.network(scale)), f"test accuracy of {label}"
    if label in BROCK.values() and not figure.brock_trains:
        return expect(name, paper="unable to train, absent from the plot", high=DEAD, scale=scale).reading(
            f"{what}, in %: it does not train",
            why="our reading of the word 'unable': at most twice chance, where a diverged run counts as chance; more "
            "refutes it",
        )
    low, why = DEAD, "our reading of the word 'train': more than twice chance, for a small network on small images"
    if scale == "full":
        low = _TRAINED
        why = "our reading of the word 'satisfactory': half of the images, five times chance; less refutes it"
    paper = "able to train all" if figure.brock_trains else "satisfactory"
    return it_trains(name, what, low=low, why=why, paper=paper, scale=scale)


def _short(label: str) -> str:
    return label.removesuffix(" (proposed)")


def _lead(first: str, second: str) -> str:
    return f"{_short(first)} - {_short(second)}"


# Measurement


def _measure(figure: _Figure, runs: Runs, scale: Scale) -> Measurement:
    """Train every row of the caption, and measure test and training accuracy.

    Reference: robust, section 4, Figure 3; appendix A, Figures 6 and 7.
    Differs: the test accuracy is measured once, at the end; the paper plots it for every epoch.
    """
    network, found = figure.network(scale), runs.accuracies()
    columns = found.named(_ACCURACY.format("{}", network))
    others = (_NORMED, *_OTHERS, *(row for row in BESIDE if row in found))
    for first, second in ((_NORMED, _CONV), *((_CONV, row) for row in others)):
        columns[_lead(first, second)] = found[first] - found[second]
    columns["rank of ConvShort"] = combined(
        [found[_CONV], *(found[row] for row in ROWS)], lambda a: 1.0 + sum(other > a[0] for other in a)
    )
    return Measurement(
        values=columns,
        panels=(*runs.learning_panel(f"{network}: training accuracy"), *_tested(network, runs, found)),
        tables=_table(network, runs, found),
        notes=_notes(figure, scale),
    )


def _tested(network: str, runs: Runs, found: NumbersByRow) -> tuple[Panel, ...]:
    """The panel of final test accuracies by kind of shortcut; diverged runs are crossed, and batch norm is a line."""
    drawn = {"proposed": PROPOSED.values(), "Brock": BROCK.values()}
    normed = found[_NORMED].values()
    return points_panel(
        f"{network}: test accuracy at the end",
        {name: [found[row] for row in rows] for name, rows in drawn.items()},
        names=tuple(map(_short, PROPOSED.values())),
        crossed={name: diverged_points(runs[row] for row in rows) for name, rows in drawn.items()},
        levels=(CHANCE_LINE, *([ReferenceLine(_NORMED, mean(normed))] if normed else [])),
        note=DIVERGED,
    )


def _table(network: str, runs: Runs, found: NumbersByRow) -> tuple[Table, ...]:
    rows = []
    for row, seeds in runs.items():
        if seeds:
            last = [
                f"{100 * run.metrics[-1]['train_accuracy']:.2f}" if run.metrics else "none" for run in seeds.values()
            ]
            ends = [f"diverged at step {run.result['steps']}" if run.diverged else "finished" for run in seeds.values()]
            rows.append((row, f"{mean(found[row].values()):.2f}", ", ".join(last), ", ".join(ends)))
    columns = ("row", "test accuracy, %", "training accuracy of the last epoch, %", "ended")
    return table(f"{network} after training", columns, rows)


def _notes(figure: _Figure, scale: Scale) -> tuple[str, ...]:
    config = figure.config(_CONV, scale)
    if scale == "quick":
        return (
            f"the stand-in {config.model} has as many blocks and layers a block, pre-activation, and is trained for "
            f"{config.epochs} epochs on small images without augmentation; it has no strides, borders or convolutions",
            "the comparison with batch norm is made at full scale only: in a deep MLP with a linear layer in every "
            "shortcut, batch norm itself is slow to train",
        )
    return (
        f"{config.epochs} epochs, RandAugment {config.randaugment} and weight decay {config.weight_decay:g} are "
        "chosen: the paper gives none of them",
        "the test accuracy is taken once, at the end; the paper draws it after every epoch, for three runs",
    )


for _figure in FIGURES:
    _brock = "so can those with Brock's at this depth" if _figure.brock_trains else "those with Brock's cannot"
    rows_claim(
        _figure.rows,
        id=f"robust/fig{_figure.number}",
        where=f"Figure {_figure.number}",
        statement=f"ResNet-{_figure.depth} with the three shortcuts and the proposed weights can be trained on "
        f"CIFAR-10, {_brock}, and ConvShort closes the gap to batch norm.",
        paper_value=f"plots of training and test accuracy, no number: {_figure.reading}",
        how=f"All seven rows of the caption, three seeds: pre-activation ResNet-{_figure.depth} by the recipe "
        f"robust_cifar, {EPOCHS} epochs, tested at the end; a residual MLP of as many blocks and layers a block on "
        "small images (quick).",
        cost=_figure.cost,
        departures=(
            "the test accuracy is taken once, at the end",
            f"epochs ({EPOCHS}), weight decay (5e-4) and RandAugment (2, 9) are ours: the paper gives none of them",
        ),
        version=2,
        needs_data="CIFAR-10",
        checks=_checks(_figure),
    )(partial(_measure, _figure))
