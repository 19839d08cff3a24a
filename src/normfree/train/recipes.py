"""Recipes: named configurations, such as the experiments of the papers as their authors ran them.

A variant calls its base and changes a few settings, so that the difference is visible. A setting that the paper does
not give is chosen here, and a comment says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from normfree.errors import unknown_name
from normfree.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration with a one-line summary and its source."""

    name: str
    summary: str
    reference: str
    make: Callable[[], TrainConfig]


_RECIPES: dict[str, Recipe] = {}


def _named(reference: str) -> Callable[[Callable[[], TrainConfig]], Callable[[], TrainConfig]]:
    """Register a function as a recipe under its own name; its docstring is the summary."""

    def add(make: Callable[[], TrainConfig]) -> Callable[[], TrainConfig]:
        name, summary = make.__name__, (make.__doc__ or "").strip().rstrip(".")
        _RECIPES[name] = Recipe(name=name, summary=summary, reference=reference, make=make)
        return make

    return add


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in the order of this file."""
    return dict(_RECIPES)


def recipe(name: str, **changes: Any) -> TrainConfig:
    """Return the configuration of a recipe, with changes.

    >>> recipe("fixup_cifar", lr=0.2).lr
    0.2

    Args:
        name: The recipe's name; see `normfree train --list`.
        changes: New values of settings, by name.

    Returns:
        The configuration.

    Raises:
        ValueError: If the recipe or a setting is unknown (the message names the closest one) or a value is bad.
    """
    if name not in _RECIPES:
        raise unknown_name("recipe", name, _RECIPES)
    return _RECIPES[name].make().with_changes(**changes)


@_named("none; small enough for two CPU cores, and needs no network")
def fashion() -> TrainConfig:
    """Fixup ResNet-20 on the embedded images, in minutes on a CPU."""
    return TrainConfig(model="resnet20", method="fixup", data="fashion14")


@_named("none; the comparison for fashion")
def fashion_batchnorm() -> TrainConfig:
    """Batch norm in place of Fixup, on the embedded images."""
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


@_named("fixup, section 4.2, Table 1; Shang 2017")
def xavier_cifar() -> TrainConfig:
    """Xavier ResNet-110 without normalization on CIFAR-10 at a small rate; the paper quotes 7.78 % error."""
    # Chosen: the paper calls the rate small and does not give it; 0.01 did not train there. Tried on the embedded
    # images with one seed, 2 epochs (6 at 0.0001): 0.01 diverges; 0.001 collapses the output to one value for all
    # images; 0.0003, 0.0001 and 0.00001 do not, but stay at chance. 200 epochs at 0.0001 came to an error
    # of 78 %; the paper's footnote says that more epochs were needed.
    return fixup_cifar().with_changes(method="xavier", lr=1e-4)


@_named("fixup, appendix C.1, Figure 4")
def fixup_ablation() -> TrainConfig:
    """The first three epochs of fixup_cifar; ablations with method=fixup:bias=false and the like."""
    return fixup_cifar().with_changes(epochs=3, schedule="constant")  # the rate first drops much later


@_named("fixup, appendix C.2, Table 4; Zagoruyko & Komodakis 2016")
def fixup_wrn() -> TrainConfig:
    """Fixup WRN-40-10 on CIFAR-10 with mixup and Cutout, the paper's 2.3 % error."""
    return fixup_cifar_mixup().with_changes(
        model="wrn-40-10",
        cutout=16,
        nesterov=True,  # chosen, as are weight decay and schedule: "default hyperparameters" of the wide ResNet
        weight_decay=5e-4,
        milestones=(60 / 200, 120 / 200, 160 / 200),
        decay=0.2,
    )


@_named("fixup, appendix C.2, Table 4")
def batchnorm_wrn() -> TrainConfig:
    """Batch norm WRN-40-10 with mixup and Cutout, the comparison for fixup_wrn."""
    return fixup_wrn().with_changes(method="batchnorm")


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
    # A tenth, as in the authors' code, does not train at this depth; 10/L is a tenth at 100 branches, and 2e-3 here.
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


@_named("wninit, section 5.1, Figure 2; the supplement with the settings is not at hand")
def wninit_mlp() -> TrainConfig:
    """Weight norm MLP of 200 hidden layers on MNIST; other depths with model=mlp-21-500."""
    return TrainConfig(
        model="mlp-201-500",  # the paper does not count the classifier; chosen: width, epochs, rate, momentum and decay
        method="wn",
        data="mnist",
        validation=0.1,  # the fraction in the authors' code, as is the batch size
        epochs=20,
        batch_size=128,
        lr=1e-3,
        momentum=0.9,
        weight_decay=0.0,
        schedule="constant",
        precision="float32",  # as the paper's: 200 roundings follow one another with nothing added to a stream
    )


@_named("wninit, section 5.1, Figure 3 left; the supplement with the settings is not at hand")
def wninit_cnn() -> TrainConfig:
    """Weight norm plain CNN of 100 convolutions on CIFAR-10; other depths with model=cnn-11-128."""
    return wninit_mlp().with_changes(model="cnn-101-128", data="cifar10", crop=4, flip=True, epochs=10, lr=1e-2)


@_named("wninit, section 5.1, Figure 3 right; the rate was tuned and is not given")
def wninit_depth() -> TrainConfig:
    """Weight norm WRN at 100 layers after one epoch of CIFAR-10; other depths with model=wrn-1000-1."""
    return depth_test().with_changes(method="wn", validation=0.1, lr=0.03)  # the rate is chosen


@_named("wninit, section 5.1, Figure 4; the rates are not given")
def wninit_seeds() -> TrainConfig:
    """The first three epochs of wninit_wrn, without warm-up; with it by warmup=1."""
    return wninit_wrn().with_changes(epochs=3, schedule="constant", warmup=0.0)  # the rate first drops much later


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


@_named("fixup, section 4.3, Table 3; Multi30k is not in the paper, and the size and settings are chosen")
def translation() -> TrainConfig:
    """A small Fixup Transformer for some ten thousand pairs of sentences, such as Multi30k."""
    return TrainConfig(
        model="transformer-4-4-256-512-4",
        method="fixup",
        data="pairs:.data/multi30k-8000",
        dropout=0.3,
        inner_dropout=0.0,  # as in the authors' code
        validation=0.0,  # a file of its own
        epochs=60,
        batch_size=4000,
        optimizer="adam",
        lr=1e-3,
        betas=(0.9, 0.98),
        weight_decay=1e-4,  # of every parameter, in the gradient, as in the authors' code
        label_smoothing=0.1,
        schedule="inverse_sqrt",
        warmup=1000,
        warmup_in="steps",
    )


@_named("fixup, section 4.3, Table 3; the comparison for translation")
def translation_layernorm() -> TrainConfig:
    """Layer norm after each sum in place of Fixup, for the same pairs."""
    return translation().with_changes(method="layernorm:xavier=true", form="post")  # as in the authors' baseline


@_named("fixup, section 4.3, Table 3: IWSLT, for which Europarl stands in")
def translation_iwslt() -> TrainConfig:
    """The paper's Fixup Transformer for IWSLT: 6 + 6 layers, 512 wide."""
    return translation().with_changes(
        model="transformer-6-6-512-1024-4",
        data="pairs:.data/europarl-200k-10000",
        dropout=0.5,
        epochs=20,  # chosen; the paper's 200,000 updates would be 110
        lr=5e-4,
        warmup=4000,
    )


@_named("none; a small language model for anyone's text")
def language_model() -> TrainConfig:
    """A small Fixup decoder that continues text, with --text FILE."""
    return TrainConfig(
        model="decoder-6-256-1024-4",
        method="fixup",
        data="text:.data/text-8000",
        dropout=0.1,
        validation=0.0,
        epochs=10,
        batch_size=32,
        block=128,
        optimizer="adam",
        lr=1e-3,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        schedule="cosine",
        warmup=200,
        warmup_in="steps",
    )
