"""Our question on converted models: is torchvision's ResNet-18 as good without its batch norm?

Every method gets the same rates, and the same recipe otherwise. A rate is chosen by the held-out images of a seed that
no final run has. All accuracies are in per cent.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product

from torch import nn

from normfree.models.third_party import create_model
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.beyond.equal_time import TUNING_SEED
from normfree_papers.claims.claim import Cost, Measurement, Settings, expect, training_claim
from normfree_papers.claims.seed_metrics import CHANCE_LINE, SMALL, NumbersByRow, best_rates, points_panel
from normfree_papers.claims.shared_ranges import it_trains, reading

_BUILT = "as built"
_FREE = {"Fixup": "fixup", "NF": "nf"}
METHODS = {**_FREE, _BUILT: _BUILT}
RATES, QUICK_RATES = (0.01, 0.03, 0.1, 0.3), (0.01, 0.03)
EPOCHS = 10
_MODEL = "torchvision:resnet18"


def small_grey_resnet() -> nn.Module:
    """Two stages of torchvision's ResNet for the embedded images: one channel in, a block each, ten classes out."""
    create_model(_MODEL)  # imports torchvision, or says how to install it
    blocks = import_module("torchvision.models.resnet")
    model: nn.Module = blocks.ResNet(blocks.BasicBlock, [1, 1, 1, 1], num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 10)
    return model


def converted_config(row: str, rate: float, *, quick: bool) -> TrainConfig:
    """The configuration of a row at a rate, without its seed."""
    method = METHODS[row]
    base = recipe("fixup_cifar", method=method, model=_MODEL, epochs=EPOCHS, validation=0.1, lr=rate)
    small = {**SMALL, "model": f"{__name__}:{small_grey_resnet.__name__}", "flip": False, "epochs": 1}
    return base.with_changes(**small) if quick else base


@training_claim(
    id="beyond/converted",
    where="Our question on conversion",
    statement="After ten epochs torchvision's ResNet-18 is better converted to Fixup or NF than with its batch norm.",
    paper_value="none: not in a paper",
    how=f"torchvision's ResNet-18 as built and converted to Fixup and NF, {EPOCHS} epochs of CIFAR-10 by the recipe "
    "fixup_cifar at 4 rates from 0.01 to 0.3; held-out images of a seed of their own choose the rate, and three other "
    "seeds judge it (full); two of its stages at two rates, an epoch of the embedded images (quick).",
    # 21 runs of 25 s to set up and 4.3 s per epoch, as in results/conversion/resnet18
    cost=Cost(quick_seconds=80, full_seconds=1_450, device="gpu"),
    checks=(
        *(
            expect(f"{row} - {_BUILT}", low=0.0, scale="full").reading(
                f"converted to {row} it is better than as built: points of test accuracy by which it leads",
                why=reading("better", "a lead above 0 points, paired by seed", "below 0"),
            )
            for row in _FREE
        ),
        *(it_trains(f"test accuracy, {row}", f"test accuracy of {row}", scale="quick") for row in METHODS),
    ),
    needs_data="CIFAR-10",
    departures=("images of 32×32 in a network for 224×224, whose stem leaves 8×8",),
)
def converted(settings: Settings) -> Measurement:
    """Test accuracy of a converted ResNet-18, each method at its best rate."""
    rates = QUICK_RATES if settings.quick else RATES
    rows = {(row, rate): converted_config(row, rate, quick=settings.quick) for row, rate in product(METHODS, rates)}
    words = "{}, rate {:g}"
    trials = replace(settings, seeds=(TUNING_SEED,)).train_rows(rows, f"tuning, {words}")
    best = {
        row: rate
        for row in METHODS
        for rate, _ in best_rates({rate: trials[row, rate] for rate in rates}, whole=True).values()
    }
    runs = settings.train_rows({(row, rate): rows[row, rate] for row, rate in best.items()}, words)
    scores = runs.accuracies()
    found = NumbersByRow({row: scores[row, best.get(row)] for row in METHODS})
    at_edge = [f"{row} ({rate:g})" for row, rate in best.items() if len(rates) > 2 and rate in (rates[0], rates[-1])]
    tried = trials.accuracies()
    drawn = {row: [tried[row, rate] for rate in rates] for row in METHODS}
    return Measurement(
        values=found.named("test accuracy, {}") | found.differences(*((row, _BUILT) for row in _FREE)),
        panels=(
            *points_panel(
                "test accuracy at the best rate", {row: [found[row]] for row in METHODS}, names=("best rate",)
            ),
            *points_panel("trials over the rate", drawn, at=rates, x_label="learning rate", levels=(CHANCE_LINE,)),
        ),
        tables=found.accuracy_table("method"),
        notes=(
            *(f"{row}: rate {rate:g}" for row, rate in best.items()),
            *([f"at an edge of the grid, so a better rate may lie beyond: {', '.join(at_edge)}"] if at_edge else []),
        ),
    )
