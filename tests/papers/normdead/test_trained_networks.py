"""Sections 4.3 and 5.2 of normdead on trained networks: the runs, and verdicts from made-up ones."""

import pytest

from made_up_runs import checks_that, measure
from normfree.train.recipes import recipe
from normfree_papers.claims.registry import get
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun
from normfree_papers.normdead.trained_networks import grey_nf_regnet, steps_that_train

PAR, CLIPPING, REGNETS = (get(f"normdead/{name}") for name in ("sec4_3", "sec5_2_clipping", "sec4_3_regnet"))


def run(accuracy):
    """A run that ended, or diverged if it has no accuracy."""
    if accuracy is None:
        return EndedRun({"status": "diverged", "test": None, "steps": 7}, ())
    result = {"status": "finished", "test": {"accuracy": accuracy}, "steps": 1}
    return EndedRun(result, [{"step": 1, "epoch": 1, "train_accuracy": accuracy}])


def measured(claim, make, **fields):
    return measure(claim, make, **{"seeds": (0, 1, 2), **fields})


def accuracies(normed=0.94, free=0.94, clipped=0.95):
    def make(_, config):
        if config.method == "batchnorm":
            return run(normed)
        return run(clipped if config.clip == "agc" else free)

    return make


def test_rows_are_the_recipe_with_and_without_mixup_and_cost_what_is_said():
    asked = measured(PAR, lambda *_: None)[2].asked
    assert len(asked) == 6 * 3
    for config in asked.values():
        assert config.mixup in (0.0, 0.2)
        same = {"method": config.method, "clip": config.clip, "mixup": config.mixup, "seed": config.seed}
        assert config == recipe("nfnet_cifar", **same)
    assert PAR.cost.full_seconds == pytest.approx(sum(map(gpu_seconds, asked.values())), rel=0.02)


def test_on_par_does_not_fail_where_it_is():
    measurement, judgement, _ = measured(PAR, accuracies())
    assert not checks_that(judgement, "fails")
    assert measurement.values["NF, clipped, mixup - batch norm, mixup"] == pytest.approx([1.0] * 3)
    assert measurement.values["gain by mixup, NF less batch norm"] == pytest.approx([0.0] * 3)


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"free": 0.92}, {"NF, mixup - batch norm, mixup", "NF - batch norm"}),
        ({"clipped": 0.93}, {"NF, clipped, mixup - batch norm, mixup", "NF, clipped - batch norm"}),
    ],
)
def test_on_par_fails_where_nf_is_behind(change, failed):
    _, judgement, _ = measured(PAR, accuracies(**change))
    assert judgement.status == "fails"
    assert checks_that(judgement, "fails") == failed


@pytest.mark.parametrize(("found", "steps"), [([60, 70, 10], 2), ([10, 10, 60], 3), ([10, 10, 10], 0)])
def test_steps_that_train_are_the_place_of_the_largest_rate(found, steps):
    assert steps_that_train(found, trains=50) == steps


def up_to(limits):
    def make(_, config):
        arm = "batch norm" if config.method == "batchnorm" else "clipped" if config.clip == "agc" else "free"
        return run(0.8) if config.lr <= limits[arm] else run(None)

    return make


def test_clipping_does_not_fail_where_it_reaches_the_rate_of_batch_norm():
    measurement, judgement, fake = measured(CLIPPING, up_to({"batch norm": 1.6, "clipped": 1.6, "free": 0.4}))
    assert not checks_that(judgement, "fails")
    assert measurement.values["steps of the rate, NF, clipped - NF"] == [1.0] * 3
    assert CLIPPING.cost.full_seconds == pytest.approx(sum(map(gpu_seconds, fake.asked.values())), rel=0.02)


def test_clipping_fails_where_batch_norm_trains_at_larger_rates():
    _, judgement, _ = measured(CLIPPING, up_to({"batch norm": 6.4, "clipped": 1.6, "free": 0.4}))
    assert judgement.status == "fails"
    assert checks_that(judgement, "fails") == {"steps of the rate, NF, clipped - batch norm"}


def test_seed_with_a_missing_rate_is_left_out():
    def make(name, config):
        return (
            None
            if (config.seed, config.lr) == (2, 6.4)
            else up_to({"batch norm": 9, "clipped": 9, "free": 9})(name, config)
        )

    values = measured(CLIPPING, make)[0].values
    assert values["steps of the rate, NF"] == [4.0, 4.0]


def test_regnets_need_imagenet():
    asked = measured(REGNETS, lambda *_: None)[2].asked
    assert {config.model for config in asked.values()} == {
        "timm:nf_regnet_b0",
        "timm:regnety_004",
        "timm:efficientnet_b0",
    }
    assert {config.data for config in asked.values()} == {"folder:.data/imagenet"}
    assert REGNETS.lacks == "ImageNet"


def test_small_regnet_has_no_normalizer_and_takes_grey_images():
    timm = pytest.importorskip("timm")
    model = grey_nf_regnet()
    assert isinstance(model, timm.models.nfnet.NormFreeNet)
    assert not [m for m in model.modules() if "BatchNorm" in type(m).__name__]
    assert next(model.parameters()).shape[1] == 1
