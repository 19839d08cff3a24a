"""The claims of `normdead` on trained NF-ResNets: on par with batch norm, with adaptive clipping in its place, RegNets.

The survey quotes Brock et al., who train on ImageNet; CIFAR-10 stands in for it. All accuracies are in per cent.

Reference: Hoedt, Hochreiter, Klambauer 2022, sections 4.3 and 5.2; Brock 2021a and 2021b.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from normfree.models.third_party import create_model
from normfree.report.panels import ReferenceLine
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Check, Cost, Measurement, Scale, aside, expect, rows_claim
from normfree_papers.claims.seed_metrics import (
    CHANCE_LINE,
    DEAD,
    QUICK_SETTINGS,
    NumbersByRow,
    Runs,
    combined,
    points_panel,
)

_BATCH_NORM, _NF, _CLIPPED = "batch norm", "NF", "NF, clipped"
_ARMS: dict[str, dict[str, Any]] = {
    _BATCH_NORM: {"method": "batchnorm", "clip": "none"},
    _NF: {"method": "nf", "clip": "none"},
    _CLIPPED: {"method": "nf", "clip": "agc"},
}
_SMALL: dict[str, Any] = {**QUICK_SETTINGS, "model": "resnet8", "form": "pre", "flip": False, "warmup": 0.0}
_PROXY = "CIFAR-10 in place of ImageNet"

# Section 4.3: on par

_MIXUP = 0.2


def _regularized(row: str) -> str:
    return f"{row}, mixup"


def _rows(scale: Scale) -> dict[str, TrainConfig]:
    """Batch norm and NF, plain and with adaptive clipping, each without and (at full scale) with mixup."""
    base = recipe("nfnet_cifar")
    if scale == "quick":
        return {row: base.with_changes(**_SMALL, epochs=3, **arm) for row, arm in _ARMS.items()}
    plain = {row: base.with_changes(**arm) for row, arm in _ARMS.items()}
    return plain | {_regularized(row): config.with_changes(mixup=_MIXUP) for row, config in plain.items()}


def _on_par() -> tuple[Check, ...]:
    par = partial(expect, paper="on par", low=-1.0, high=1.0, scale="full")
    why = "our reading of the word 'on par': within one point of test accuracy; a larger gap refutes it"
    better = partial(expect, paper="outperform", low=0.0, scale="full")
    why_better = "our reading of the word 'outperform': above batch norm; a negative lead refutes it"
    regular, normed = _regularized(_NF), _regularized(_BATCH_NORM)
    return (
        par(f"{regular} - {normed}").reading(
            "test accuracy of NF less that of batch norm, both with mixup, in points", why=why
        ),
        better(f"{_regularized(_CLIPPED)} - {normed}").reading(
            "test accuracy of NF with adaptive clipping less that of batch norm, both with mixup, in points",
            why=why_better,
        ),
        par(f"{_NF} - {_BATCH_NORM}", main=False).reading("the same without mixup", why=why),
        better(f"{_CLIPPED} - {_BATCH_NORM}", main=False).reading(
            "the same with adaptive clipping and without mixup", why=why_better
        ),
        aside("gain by mixup, NF less batch norm", paper="can be replaced by explicit", low=0.0, scale="full").reading(
            "explicit regularization helps NF at least as much as batch norm, which regularizes by itself, in points",
            why="our reading of the word 'replaced': NF lacks what mixup gives; a negative number refutes it",
        ),
        *(
            expect(f"test accuracy, {row}", paper="on par", low=DEAD, scale="quick").reading(
                f"test accuracy of {row}, in %: it trains",
                why="our reading of the word 'perform': more than twice chance after 3 epochs of small images; less "
                "refutes it",
            )
            for row in _ARMS
        ),
    )


@rows_claim(
    _rows,
    id="normdead/sec4_3",
    where="Section 4.3",
    statement="NF-ResNets with standard regularization perform on par with ResNets that use batch norm, and outperform "
    "them in combination with adaptive gradient clipping.",
    paper_value="no numbers; the survey quotes Brock et al. on ImageNet",
    how="Pre-activation ResNet-50 on CIFAR-10 by the recipe nfnet_cifar, 200 epochs, with batch norm, NF, and NF with "
    "adaptive clipping, each with and without mixup; ResNet-8, 3 epochs of the embedded images (quick).",
    cost=Cost(quick_seconds=60, full_seconds=5960, device="gpu"),
    checks=_on_par(),
    quick_seeds=3,
    needs_data="CIFAR-10",
    stand_in=_PROXY,
    departures=(
        "mixup of 0.2 stands for standard regularization",
        "one rate of 0.1 for all rows; beyond/equal_time tunes it",
    ),
)
def sec4_3(runs: Runs, scale: Scale) -> Measurement:
    """Test accuracy of NF beside batch norm. Reference: normdead, section 4.3."""
    found = runs.accuracies()
    columns = found.named("test accuracy, {}") | runs.training_accuracies().named("training accuracy, {}")
    columns |= found.differences((_NF, _BATCH_NORM), (_CLIPPED, _BATCH_NORM))
    if scale == "full":
        columns |= found.differences(*((_regularized(row), _regularized(_BATCH_NORM)) for row in (_NF, _CLIPPED)))
        gains = {row: found[_regularized(row)] - found[row] for row in (_NF, _BATCH_NORM)}
        columns["gain by mixup, NF less batch norm"] = gains[_NF] - gains[_BATCH_NORM]
    return Measurement(
        values=columns,
        panels=runs.learning_panel("training accuracy"),
        tables=found.accuracy_table(),
        notes=("the order is BN → ReLU, as in Brock's baseline; training accuracy is on augmented images",),
    )


# Section 5.2: adaptive clipping in place of what batch norm does in the backward pass

_RATES: dict[Scale, tuple[float, ...]] = {"quick": (0.1, 1.6), "full": (0.1, 0.4, 1.6, 6.4)}


def _clipping_rows(scale: Scale) -> dict[tuple[str, float], TrainConfig]:
    base = recipe("nfnet_cifar", model="preact_resnet18", epochs=20, batch_size=512, warmup=0.0)
    if scale == "quick":
        base = base.with_changes(**_SMALL, epochs=1, batch_size=128)
    return {(row, rate): base.with_changes(lr=rate, **arm) for row, arm in _ARMS.items() for rate in _RATES[scale]}


def steps_that_train(accuracies: list[float], trains: float) -> float:
    """The place, counted from 1, of the largest rate that trains; 0 if none does.

    >>> steps_that_train([60.0, 70.0, 10.0], trains=50.0)
    2.0
    """
    return float(max((place for place, value in enumerate(accuracies, 1) if value >= trains), default=0))


def _clipping_checks() -> tuple[Check, ...]:
    checks = []
    for scale in ("quick", "full"):
        grid = "4" if scale == "full" else "16"
        checks += [
            expect(
                f"steps of the rate, {_CLIPPED} - {_BATCH_NORM}", paper="effective alternative", low=0.0, scale=scale
            ).reading(
                f"NF with clipping trains at the largest rate at which batch norm does, in steps of a factor of {grid}",
                why="our reading of the word 'alternative': a rate as large as batch norm's; a smaller one refutes it",
            ),
            aside(f"steps of the rate, {_CLIPPED} - {_NF}", paper="effective", low=1.0, scale=scale).reading(
                f"clipping raises the largest rate at which NF trains, in steps of a factor of {grid}",
                why="our reading of the word 'effective': by a step of the grid or more; less refutes it",
            ),
        ]
    return tuple(checks)


@rows_claim(
    _clipping_rows,
    "{}, lr {:g}",
    id="normdead/sec5_2_clipping",
    where="Section 5.2 (backward pass)",
    statement="Adaptive gradient clipping is an effective alternative to what batch norm does in the backward pass: NF "
    "with it trains at rates as large as batch norm does.",
    paper_value="a sentence: seems to provide an effective alternative",
    how="Pre-activation ResNet-18 on CIFAR-10, 20 epochs at batch 512 and rates of 0.1, 0.4, 1.6 and 6.4, with batch "
    "norm, NF and NF with clipping; ResNet-8, one epoch of the embedded images at two rates (quick).",
    cost=Cost(quick_seconds=60, full_seconds=1560, device="gpu"),
    checks=_clipping_checks(),
    quick_seeds=3,
    needs_data="CIFAR-10",
    stand_in=_PROXY,
    departures=("a rate trains if the test accuracy is at least 50 % (quick: 20 %)",),
)
def sec5_2_clipping(runs: Runs, scale: Scale) -> Measurement:
    """The largest rate that trains with and without clipping. Reference: normdead, section 5.2; Brock 2021b."""
    found, rates, trains = runs.accuracies(), _RATES[scale], DEAD if scale == "quick" else 50.0
    drawn = {row: [found[row, rate] for rate in rates] for row in _ARMS}
    steps = NumbersByRow({row: combined(of, lambda ones: steps_that_train(ones, trains)) for row, of in drawn.items()})
    columns = steps | steps.differences((_CLIPPED, _BATCH_NORM), (_CLIPPED, _NF))
    levels = (CHANCE_LINE, ReferenceLine("trains", trains))
    title, x_label = "test accuracy over the learning rate", "learning rate"
    panels = points_panel(title, drawn, at=rates, x_label=x_label, levels=levels)
    return Measurement(values=NumbersByRow(columns).named("steps of the rate, {}"), panels=panels)


# Section 4.3: NF-RegNets, which need ImageNet; without it only a small run shows that they train

_NF_REGNET, _NAIVE, _EFFICIENT = "NF-RegNet-B0", "RegNetY-400MF", "EfficientNet-B0"
_MODELS = {_NF_REGNET: "timm:nf_regnet_b0", _NAIVE: "timm:regnety_004", _EFFICIENT: "timm:efficientnet_b0"}


def grey_nf_regnet() -> nn.Module:
    """NF-RegNet-B0 for the embedded images: one channel in, ten classes out."""
    create_model(_MODELS[_NF_REGNET])  # imports timm, or says how to install it
    model: nn.Module = import_module("timm").create_model("nf_regnet_b0", in_chans=1, num_classes=10)
    return model


def _regnet_configs(scale: Scale) -> dict[str, TrainConfig]:
    if scale == "quick":
        small = recipe(
            "nfnet_cifar", **QUICK_SETTINGS, method="as built", flip=False, epochs=1, batch_size=64, warmup=0.0
        )
        return {_NF_REGNET: small.with_changes(model=f"{__name__}:{grey_nf_regnet.__name__}")}
    base = recipe("fixup_imagenet", method="as built", mixup=0.2, nesterov=True)
    return {
        row: base.with_changes(model=model, clip="agc" if row == _NF_REGNET else "none")
        for row, model in _MODELS.items()
    }


@rows_claim(
    _regnet_configs,
    id="normdead/sec4_3_regnet",
    where="Section 4.3 (RegNets)",
    statement="Introducing the NF-ResNet scheme into naive RegNets reduces their performance gap to EfficientNets.",
    paper_value="a sentence; the survey quotes Brock et al. on ImageNet",
    how="timm's NF-RegNet-B0, a RegNetY of as many operations with batch norm, and EfficientNet-B0 on ImageNet in "
    ".data/imagenet, 100 epochs (full); NF-RegNet-B0 alone, one epoch of the embedded images (quick).",
    # Three rows and seeds, 100 epochs of 1.28 million images, at an assumed 5,000 images per second
    cost=Cost(quick_seconds=110, full_seconds=230_000, device="gpu"),
    checks=(
        expect(f"test accuracy, {_NF_REGNET}", paper="applied to RegNets", low=DEAD, scale="quick").reading(
            "test accuracy of NF-RegNet-B0, in %: it trains without normalizers",
            why="our reading of the word 'applied': more than twice chance after an epoch; less refutes it",
        ),
        expect("gap to EfficientNet-B0, naive less NF", paper="can be reduced", low=0.0, scale="full").reading(
            "points of test accuracy by which NF reduces the gap of a RegNet to EfficientNet-B0",
            why="our reading of the word 'reduced': more than none; a negative number refutes it",
            lacks="ImageNet",
        ),
    ),
    quick_seeds=3,
    needs_data="ImageNet",
    lacks="ImageNet",
    departures=("the recipe, with mixup of 0.2 and without stronger augmentation, is ours",),
)
def sec4_3_regnet(runs: Runs, scale: Scale) -> Measurement:
    """Gaps of RegNets to EfficientNet-B0, and their normalizers. Reference: normdead, section 4.3."""
    found = runs.accuracies()
    columns = found.named("test accuracy, {}")
    if scale == "full":
        naive, free = (found[_EFFICIENT] - found[row] for row in (_NAIVE, _NF_REGNET))
        columns["gap to EfficientNet-B0, naive less NF"] = naive - free
    return Measurement(
        values=columns,
        panels=runs.learning_panel("training accuracy", chance=None),
        notes=("converting a RegNet with ReLU after its sums would not give NF-RegNets: the scheme is pre-activation",),
    )
