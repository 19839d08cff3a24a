"""The claim of `normdead` on NF-RegNets, which needs ImageNet; without it only a small run shows that they train.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 4.3; Brock 2021a. All accuracies are in per cent.
"""

from __future__ import annotations

from importlib import import_module

from torch import nn

from normfree.models.third_party import create_model
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Cost, Measurement, Scale, Settings, expect, training_claim
from normfree_papers.claims.seed_metrics import DEAD, EMBEDDED, accuracy, minus

_NF, _NAIVE, _EFFICIENT = "NF-RegNet-B0", "RegNetY-400MF", "EfficientNet-B0"
_MODELS = {_NF: "timm:nf_regnet_b0", _NAIVE: "timm:regnety_004", _EFFICIENT: "timm:efficientnet_b0"}


def grey_nf_regnet() -> nn.Module:
    """NF-RegNet-B0 for the embedded images: one channel in, ten classes out."""
    create_model(_MODELS[_NF])  # imports timm, or says how to install it
    model: nn.Module = import_module("timm").create_model("nf_regnet_b0", in_chans=1, num_classes=10)
    return model


def _configs(scale: Scale) -> dict[str, TrainConfig]:
    if scale == "quick":
        small = recipe("nfnet_cifar", **EMBEDDED, method="as built", flip=False, epochs=1, batch_size=64, warmup=0.0)
        return {_NF: small.with_changes(model=f"{__name__}:{grey_nf_regnet.__name__}")}
    base = recipe("fixup_imagenet", method="as built", mixup=0.2, nesterov=True)
    return {row: base.with_changes(model=model, clip="agc" if row == _NF else "none") for row, model in _MODELS.items()}


@training_claim(
    id="normdead/sec4_3_regnet",
    where="Section 4.3 (RegNets)",
    statement="Introducing the NF-ResNet scheme into naive RegNets reduces their performance gap to EfficientNets.",
    paper_value="a sentence; the survey quotes Brock et al. on ImageNet",
    how="timm's NF-RegNet-B0, a RegNetY of as many operations with batch norm, and EfficientNet-B0 on ImageNet in "
    ".data/imagenet, 100 epochs (full); NF-RegNet-B0 alone, one epoch of the embedded images (quick).",
    # Three rows and seeds, 100 epochs of 1.28 million images, at an assumed 5,000 images per second
    cost=Cost(quick_seconds=110, full_seconds=230_000, device="gpu"),
    checks=(
        expect(f"test accuracy, {_NF}", paper="applied to RegNets", low=DEAD, scale="quick").reading(
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
def sec4_3_regnet(settings: Settings) -> Measurement:
    """Gaps of RegNets to EfficientNet-B0, and their normalizers. Reference: normdead, section 4.3."""
    runs = settings.train_rows(_configs(settings.scale))
    found = runs.numbers(accuracy)
    columns = found.named("test accuracy, {}")
    if not settings.quick:
        gaps = [minus(found[_EFFICIENT], found[row]) for row in (_NAIVE, _NF)]
        columns["gap to EfficientNet-B0, naive less NF"] = minus(*gaps)
    return Measurement(
        values=columns,
        panels=runs.learning_panel("training accuracy", chance=None),
        notes=("converting a RegNet with ReLU after its sums would not give NF-RegNets: the scheme is pre-activation",),
    )
