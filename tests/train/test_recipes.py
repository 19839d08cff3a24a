"""Recipes: valid, buildable, and what the papers and their code say."""

from typing import Any

import pytest

from normfree.methods import get
from normfree.models import build
from normfree.optim import param_groups
from normfree.train.config import TrainConfig
from normfree.train.recipes import recipe, recipes

CIFAR: dict[str, Any] = {"data": "cifar10", "optimizer": "sgd", "momentum": 0.9, "batch_size": 128}

# What the table of the authors' settings says, recipe by recipe; what it does not give is not here.
TABLE: dict[str, dict[str, Any]] = {
    "fixup_cifar": {
        **CIFAR, "model": "resnet110", "method": "fixup", "lr": 0.1, "epochs": 200, "weight_decay": 1e-4, "mixup": 0.0,
        "nesterov": False, "validation": 0.0, "crop": 4, "flip": True, "clip": "none",
    },
    "fixup_cifar_mixup": {**CIFAR, "lr": 0.1, "epochs": 200, "weight_decay": 1e-4, "mixup": 1.0},
    "xavier_cifar": {**CIFAR, "model": "resnet110", "method": "xavier", "epochs": 200, "weight_decay": 1e-4},
    "fixup_ablation": {**CIFAR, "model": "resnet110", "method": "fixup", "lr": 0.1, "epochs": 3, "weight_decay": 1e-4},
    "fixup_wrn": {**CIFAR, "model": "wrn-40-10", "method": "fixup", "mixup": 1.0, "cutout": 16, "lr": 0.1},
    "fixup_imagenet": {
        "model": "resnet50", "method": "fixup", "batch_size": 256, "lr": 0.1, "epochs": 100, "weight_decay": 1e-4,
        "mixup": 0.7, "momentum": 0.9,
    },
    "depth_test": {**CIFAR, "lr": 0.1, "weight_decay": 5e-4, "epochs": 1, "validation": 0.0},
    "depth_test_10000": {**CIFAR, "lr": 0.1, "weight_decay": 5e-4, "epochs": 1, "batch_size": 64},
    "wninit_cifar": {
        **CIFAR, "model": "resnet110", "method": "wn", "epochs": 182, "weight_decay": 1e-4, "validation": 0.1,
        "warmup_shape": "quadratic",
    },
    "wninit_wrn": {**CIFAR, "model": "wrn-40-10", "method": "wn", "weight_decay": 5e-4, "cutout": 16, "decay": 0.2},
    "wninit_mlp": {"model": "mlp-201-500", "method": "wn", "data": "mnist", "validation": 0.1, "batch_size": 128},
    "wninit_cnn": {**CIFAR, "model": "cnn-101-128", "method": "wn", "validation": 0.1},
    "wninit_depth": {**CIFAR, "method": "wn", "epochs": 1, "validation": 0.1},
    "wninit_seeds": {**CIFAR, "model": "wrn-40-10", "method": "wn", "epochs": 3},
    "robust_cifar": {**CIFAR, "lr": 0.01, "schedule": "cosine", "cosine_by": "epoch", "crop": 4, "flip": True},
    "translation_iwslt": {
        "method": "fixup", "optimizer": "adam", "betas": (0.9, 0.98), "lr": 5e-4, "schedule": "inverse_sqrt",
        "warmup": 4000, "warmup_in": "steps", "dropout": 0.5, "inner_dropout": 0.0, "weight_decay": 1e-4,
        "label_smoothing": 0.1, "batch_size": 4000,
    },
    "nfnet_cifar": {**CIFAR, "nesterov": True, "clip": "agc", "clip_at": 0.01, "method": "nf"},
}  # fmt: skip

# Epochs at which the rate drops, and by how much.
DROPS = {
    "fixup_cifar": ((100, 150), 0.1),
    "fixup_cifar_mixup": ((100, 150), 0.1),
    "batchnorm_cifar": ((100, 150), 0.1),
    "xavier_cifar": ((100, 150), 0.1),
    "fixup_wrn": ((60, 120, 160), 0.2),
    "batchnorm_wrn": ((60, 120, 160), 0.2),
    "fixup_imagenet": ((30, 60, 90), 0.1),
    "wninit_cifar": ((91, 136), 0.1),
    "wninit_wrn": ((60, 120, 160), 0.2),
}


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_what_its_source_says(name: str) -> None:
    config = recipe(name)
    assert {field: getattr(config, field) for field in TABLE[name]} == TABLE[name]


@pytest.mark.parametrize("name", DROPS)
def test_rate_drops_where_its_source_says(name: str) -> None:
    config, steps = recipe(name), 391
    milestones, decay = DROPS[name]
    for k, epoch in enumerate(milestones):
        before, after = (config.lr_schedule.factor(epoch * steps + i, steps, config.epochs) for i in (-1, 0))
        assert (before, after) == pytest.approx((decay**k, decay ** (k + 1)))


@pytest.mark.parametrize("name", recipes())
def test_recipe_is_valid_and_its_model_can_be_built(name: str) -> None:
    config = recipe(name)
    small = config.model.replace("10000", "100")
    model = build(small, config.method, form=config.form, device="meta")
    assert sum(len(g["params"]) for g in param_groups(model, lr=config.lr)) == len(list(model.parameters()))
    assert TrainConfig(**TrainConfig.parse_changes(f"{k}={v}" for k, v in vars(config).items())) == config


@pytest.mark.parametrize("name", recipes())
def test_recipe_says_what_it_is_and_where_it_comes_from(name: str) -> None:
    entry = recipes()[name]
    assert entry.name == name
    assert entry.summary
    assert "\n" not in entry.summary
    assert entry.reference
    assert entry.config == recipe(name)


@pytest.mark.parametrize(
    ("name", "base", "differs"),
    [
        ("fashion_batchnorm", "fashion", {"method"}),
        ("batchnorm_cifar", "fixup_cifar", {"method"}),
        ("batchnorm_cifar_mixup", "batchnorm_cifar", {"mixup"}),
        ("fixup_cifar_mixup", "fixup_cifar", {"mixup"}),
        ("xavier_cifar", "fixup_cifar", {"method", "lr"}),
        ("fixup_ablation", "fixup_cifar", {"epochs", "schedule"}),
        ("fixup_wrn", "fixup_cifar_mixup", {"model", "cutout", "nesterov", "weight_decay", "milestones", "decay"}),
        ("batchnorm_wrn", "fixup_wrn", {"method"}),
        ("depth_test_10000", "depth_test", {"model", "method", "batch_size"}),
        ("wninit_wrn", "wninit_cifar", {"model", "cutout", "epochs", "weight_decay", "milestones", "decay"}),
        ("wninit_cnn", "wninit_mlp", {"model", "data", "crop", "flip", "epochs", "lr"}),
        ("wninit_depth", "depth_test", {"method", "validation", "lr"}),
        ("wninit_seeds", "wninit_wrn", {"epochs", "schedule", "warmup"}),
        ("robust_cifar_batchnorm", "robust_cifar", {"method"}),
        ("translation_layernorm", "translation", {"method", "form"}),
        ("translation_iwslt", "translation", {"model", "data", "dropout", "epochs", "lr", "warmup"}),
    ],
)
def test_variant_differs_from_its_base_only_where_it_says(name: str, base: str, differs: set[str]) -> None:
    ours, bases = vars(recipe(name)), vars(recipe(base))
    assert {field for field in ours if ours[field] != bases[field]} == differs


def test_scalars_at_10000_layers_learn_at_the_rate_that_works() -> None:
    config = recipe("depth_test_10000")
    branches = 3 * (10_000 - 4) // 6
    assert config.lr * get(config.method).scalar_rate.factor(branches) == pytest.approx(2e-4, rel=1e-3)
    # Control: the paper's tenth, at which nothing is learned, is fifty times as much.
    assert config.lr * get("fixup").scalar_rate.factor(branches) == pytest.approx(1e-2)


@pytest.mark.parametrize("name", ["depth_test", "fixup_ablation", "wninit_mlp", "wninit_depth", "wninit_seeds"])
def test_rate_of_a_short_run_stays(name: str) -> None:
    config, steps = recipe(name), 391
    assert {config.lr_schedule.factor(i, steps, config.epochs) for i in range(config.epochs * steps)} == {1.0}


def test_rate_of_xavier_is_below_the_one_that_failed_in_the_paper() -> None:
    assert recipe("xavier_cifar").lr < 0.01  # section 4.2


def test_held_out_images_of_wninit_leave_45000() -> None:
    assert 50_000 * (1 - recipe("wninit_cifar").validation) == 45_000


def test_changes_are_applied_and_checked() -> None:
    assert recipe("fixup_cifar", lr=0.2, epochs=3) == recipe("fixup_cifar").with_changes(lr=0.2, epochs=3)
    with pytest.raises(ValueError, match=r"unknown setting 'lrr'; did you mean 'lr'\?"):
        recipe("fixup_cifar", lrr=0.2)
    with pytest.raises(ValueError, match="expected 'lr' above 0"):
        recipe("fixup_cifar", lr=-0.2)


def test_unknown_recipe_is_refused_with_the_closest() -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'fixup_cifa'; did you mean 'fixup_cifar'"):
        recipe("fixup_cifa")


def test_table_of_recipes_is_a_copy() -> None:
    recipes().clear()
    assert "fixup_cifar" in recipes()
