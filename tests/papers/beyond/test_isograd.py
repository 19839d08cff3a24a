"""isograd beside fan-out, fan-in and batch norm: its runs, and verdicts from made-up ones."""

import pytest

from made_up_runs import checks_that, measure
from normfree.train.recipes import recipe
from normfree_papers.claims.registry import get
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun
from normfree_papers.robust.training import EPOCHS

CLAIM = get("beyond/isograd")
BETTER = {"convshort": 0.92, "convshort:fan=in": 0.915, "isograd:shortcut=conv": 0.93, "batchnorm_convshort": 0.935}


def measured(accuracies, **fields):
    """With the run of every method at a test accuracy."""

    def make(_, config):
        if config.method not in accuracies:
            return None
        tested = {"accuracy": accuracies[config.method], "loss": 1.0}
        epoch = {"step": 1, "epoch": 1, "train_accuracy": 0.5}
        return EndedRun({"status": "finished", "test": tested, "steps": 1}, [epoch])

    return measure(CLAIM, make, **{"seeds": (0, 1, 2), **fields})


def test_full_runs_are_the_recipe_of_robust():
    asked = measured({})[2].asked
    assert len(asked) == 4 * 3
    for config in asked.values():
        assert config == recipe("robust_cifar", method=config.method, seed=config.seed, epochs=EPOCHS)
    assert {config.method for config in asked.values()} == BETTER.keys()
    assert CLAIM.cost.full_seconds == pytest.approx(sum(map(gpu_seconds, asked.values())), rel=0.02)


def test_claim_does_not_fail_where_isograd_leads():
    measurement, judgement, _ = measured(BETTER)
    assert not checks_that(judgement, "fails")
    assert measurement.values["isograd - fan-in"] == pytest.approx([1.5] * 3)


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({"convshort": 0.94}, {"isograd - fan-out"}),
        ({"convshort:fan=in": 0.94}, {"isograd - fan-in", "fan-out - fan-in"}),
        ({"batchnorm_convshort": 0.95}, {"isograd - batch norm"}),
    ],
)
def test_claim_fails_where_another_leads(change, failed):
    _, judgement, _ = measured(BETTER | change)
    assert judgement.status == "fails"
    assert checks_that(judgement, "fails") == failed


def test_quick_run_fails_where_isograd_does_not_train():
    _, judgement, _ = measured(BETTER | {"isograd:shortcut=conv": 0.1}, scale="quick")
    assert checks_that(judgement, "fails") == {"test accuracy, isograd"}
