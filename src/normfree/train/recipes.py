"""Named configurations: the experiments of the papers as their authors ran them.

A variant calls its base and changes what differs, so that the difference can be read. What a paper does not give is
chosen here, and said where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normfree.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration, what it is in one line, and where it comes from."""

    name: str
    summary: str
    reference: str
    make: Callable[[], TrainConfig]


_RECIPES: dict[str, Recipe] = {}


def _named(reference: str) -> Callable[[Callable[[], TrainConfig]], Callable[[], TrainConfig]]:
    """Add a function to the recipes under its own name, with its docstring as the summary."""

    def add(make: Callable[[], TrainConfig]) -> Callable[[], TrainConfig]:
        name, summary = make.__name__, (make.__doc__ or "").strip().rstrip(".")
        _RECIPES[name] = Recipe(name=name, summary=summary, reference=reference, make=make)
        return make

    return add


def recipes() -> dict[str, Recipe]:
    """All recipes by name, in the order of this file."""
    return dict(_RECIPES)


def recipe(name: str, **changes: Any) -> TrainConfig:
    """The configuration of a recipe, with changes.

    >>> recipe("fixup_cifar", lr=0.2).lr
    0.2

    Raises `ValueError` for an unknown recipe or field, naming the closest, and for a bad value.
    """
    if name not in _RECIPES:
        from normfree.methods.registry import unknown  # here, because it loads torch

        raise unknown("recipe", name, _RECIPES)
    return _RECIPES[name].make().with_changes(**changes)


@_named("none; small enough for two CPU cores, and needs no network")
def fashion() -> TrainConfig:
    """Fixup ResNet-20 on the embedded images, in minutes on a CPU."""
    return TrainConfig(model="resnet20", method="fixup", data="fashion14")


@_named("none; the comparison for fashion")
def fashion_batchnorm() -> TrainConfig:
    """Batch norm in the place of Fixup, on the embedded images."""
    return fashion().with_changes(method="batchnorm")


@_named("fixup, section 4.2, Table 1")
def fixup_cifar() -> TrainConfig:
    """Fixup ResNet-110 on CIFAR-10, the paper's 7.24 % error."""
    return TrainConfig(
        model="resnet110",
        method="fixup",
        data="cifar10",
        validation=0.0,
        crop=4,
        flip=True,
        epochs=200,
        batch_size=128,
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-4,
        schedule="step",
        milestones=(100 / 200, 150 / 200),
        decay=0.1,
    )


@_named("fixup, section 4.2 and appendix C.2")
def fixup_cifar_mixup() -> TrainConfig:
    """Fixup ResNet-110 on CIFAR-10, regularized with mixup."""
    return fixup_cifar().with_changes(mixup=1.0)


@_named("fixup, section 4.2, Table 1; He 2016a, section 4.2")
def batchnorm_cifar() -> TrainConfig:
    """Batch norm ResNet-110 on CIFAR-10, the comparison for fixup_cifar."""
    return fixup_cifar().with_changes(method="batchnorm")


@_named("fixup, section 4.2 and appendix C.2")
def batchnorm_cifar_mixup() -> TrainConfig:
    """Batch norm ResNet-110 on CIFAR-10 with mixup, the comparison for fixup_cifar_mixup."""
    return fixup_cifar_mixup().with_changes(method="batchnorm")


@_named("fixup, section 4.2, Table 2")
def fixup_imagenet() -> TrainConfig:
    """Fixup ResNet-50 with mixup on an ImageNet folder, the paper's 24.0 % error."""
    return TrainConfig(
        model="resnet50",
        method="fixup",
        data="folder:.data/imagenet",
        validation=0.0,
        flip=True,
        mixup=0.7,
        epochs=100,
        batch_size=256,
        lr=0.1,
        weight_decay=1e-4,
        schedule="step",
        milestones=(30 / 100, 60 / 100, 90 / 100),
        decay=0.1,
    )


@_named("fixup, section 4.1, Figure 3")
def depth_test() -> TrainConfig:
    """Fixup at 100 layers after one epoch of CIFAR-10; other depths with model=wrn-1000-1."""
    return TrainConfig(
        model="wrn-100-1",
        method="fixup",
        data="cifar10",
        validation=0.0,
        crop=4,
        flip=True,
        epochs=1,
        batch_size=128,
        lr=0.1,
        momentum=0.9,
        weight_decay=5e-4,
        schedule="constant",
    )


@_named("fixup, section 4.1, Figure 3; the rate of the scalars is measured here")
def depth_test_10000() -> TrainConfig:
    """Fixup at 10,000 layers after one epoch of CIFAR-10, its scalars at a rate ∝ 1/L."""
    # The paper's tenth does not train at this depth; 10/L is a tenth at 100 branches, and lr · 10/4998 = 2e-4 here.
    return depth_test().with_changes(model="wrn-10000-1", method="fixup:scalar_lr=10/L", batch_size=64)


@_named("wninit, section 5.2, Table 1")
def wninit_cifar() -> TrainConfig:
    """Weight norm ResNet-110 on 45,000 images of CIFAR-10."""
    return TrainConfig(
        model="resnet110",
        method="wn",
        data="cifar10",
        validation=0.1,
        crop=4,  # chosen, as is flip: "default hyperparameters reported in literature", which is He 2016a
        flip=True,
        epochs=182,
        batch_size=128,  # chosen, from He 2016a
        lr=0.1,  # chosen: tuned in the paper and not given
        momentum=0.9,
        weight_decay=1e-4,
        schedule="step",
        milestones=(91 / 182, 136 / 182),
        decay=0.1,
        warmup=1.0,  # chosen: the length is not given, the shape is
        warmup_shape="quadratic",
    )


@_named("wninit, section 5.2, Table 1")
def wninit_wrn() -> TrainConfig:
    """Weight norm WRN-40-10 with Cutout on 45,000 images of CIFAR-10."""
    return wninit_cifar().with_changes(
        model="wrn-40-10",
        cutout=16,
        epochs=200,  # chosen, from Zagoruyko & Komodakis 2016, as the milestones are
        weight_decay=5e-4,
        milestones=(0.3, 0.6, 0.8),
        decay=0.2,
    )


@_named("robust, section 4, Figure 3")
def robust_cifar() -> TrainConfig:
    """ConvShort ResNet-50 on CIFAR-10 with RandAugment."""
    return TrainConfig(
        model="preact_resnet50",
        method="convshort",
        data="cifar10",
        validation=0.0,
        crop=4,
        flip=True,
        randaugment=(2, 9),  # chosen: neither operations nor magnitude are given
        epochs=200,  # chosen: not given
        batch_size=128,
        lr=0.01,
        momentum=0.9,
        weight_decay=5e-4,  # chosen: not given
        schedule="cosine",
        cosine_by="epoch",
    )


@_named("robust, section 4, Figure 3")
def robust_cifar_batchnorm() -> TrainConfig:
    """Batch norm with convolutional shortcuts, the comparison for robust_cifar."""
    return robust_cifar().with_changes(method="batchnorm_convshort")


@_named("Brock 2021, sections 4 and 5; normdead, section 4.2")
def nfnet_cifar() -> TrainConfig:
    """Normalizer-free ResNet-50 on CIFAR-10 with adaptive gradient clipping."""
    return TrainConfig(
        model="preact_resnet50",  # chosen, as in robust_cifar: the source trains on ImageNet only
        method="nf",
        data="cifar10",
        validation=0.0,
        crop=4,
        flip=True,
        epochs=200,  # chosen, as is the batch size
        batch_size=128,
        lr=0.1,  # the source's, which it scales with the batch of 256
        momentum=0.9,
        nesterov=True,
        weight_decay=5e-4,  # chosen, for CIFAR; gains and biases are not decayed
        clip="agc",
        clip_at=0.01,
        schedule="cosine",
        warmup=5.0,
    )
