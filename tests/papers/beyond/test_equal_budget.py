"""NF beside batch norm at equal budget and time: the runs, the choice of a rate, and verdicts from made-up runs."""

import pytest

from made_up_runs import checks_that, measure
from normfree_papers.beyond.accuracy import BATCHES, EPOCHS, RATES, affordable_epochs, config_of
from normfree_papers.claims.claim import get
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import Trained

CLAIM = get("beyond/equal_budget")


def run(accuracy, held_out=0.5, seconds=10.0):
    """A run that ended, or diverged if it has no accuracy."""
    if accuracy is None:
        return Trained({"status": "diverged", "test": None, "steps": 7}, ())
    result = {"status": "finished", "test": {"accuracy": accuracy}, "validation": {"accuracy": held_out}, "steps": 1}
    return Trained(result, [{"step": 1, "epoch": 1, "train_accuracy": accuracy, "seconds": seconds}])


def measured(make, **fields):
    return measure(CLAIM, make, **{"seeds": (0, 1, 2), **fields})


def good(_, config):
    """NF leads by 2 points at a batch of 4 and is level elsewhere; it takes twice as long."""
    lead = 0.02 if (config.method, config.batch_size) == ("nf", 4) else 0.0
    return run(0.9 + lead, seconds=20.0 if config.method == "nf" else 10.0)


def test_rate_is_in_proportion_to_the_batch_and_only_nf_is_clipped():
    small, large = (config_of("NF", batch, 0.1, quick=False) for batch in (4, 256))
    assert (small.lr, large.lr) == pytest.approx((0.1 / 64, 0.1))
    assert (small.batch_size, large.clip, large.method) == (4, "agc", "nf")
    assert config_of("batch norm", 64, 0.1, quick=False).clip == "none"


@pytest.mark.parametrize(("ours", "theirs", "epochs"), [(20.0, 10.0, 5), (10.0, 20.0, 20), (1000.0, 1.0, 1)])
def test_affordable_epochs_fill_the_seconds_of_the_other_run(ours, theirs, epochs):
    assert affordable_epochs(10, run(0.9, seconds=ours), run(0.9, seconds=theirs)) == epochs


def test_affordable_epochs_of_a_diverged_run_are_all():
    assert affordable_epochs(10, run(None), run(0.9)) == affordable_epochs(10, run(0.9), run(None)) == 10


def test_both_arms_get_the_same_budget_and_nf_half_of_the_epochs_at_equal_time():
    asked = measured(good)[2].asked
    timed = {name: config for name, config in asked.items() if "equal time" in name}
    assert len(asked) == (2 * len(BATCHES) * len(RATES) + len(BATCHES)) * 3
    assert {config.epochs for config in timed.values()} == {EPOCHS // 2}
    rest = [config for name, config in asked.items() if name not in timed]
    assert {config.epochs for config in rest} == {EPOCHS}
    arms = [{c.with_changes(method="nf", clip="agc") for c in rest if c.method == m} for m in ("nf", "batchnorm")]
    assert arms[0] == arms[1]
    planned = sum(map(gpu_seconds, rest)) + len(timed) * gpu_seconds(rest[0])
    assert CLAIM.cost.full_seconds == pytest.approx(planned, rel=0.02)


def test_claim_does_not_fail_where_nf_is_level_and_ahead_at_a_batch_of_four():
    measurement, judgement, _ = measured(good)
    assert not checks_that(judgement, "fails")
    assert measurement.values["NF - batch norm, batch 4"] == pytest.approx([2.0] * 3)


def test_claim_fails_where_nf_is_behind():
    _, judgement, _ = measured(lambda _, config: run(0.88 if config.method == "nf" else 0.9))
    assert judgement.status == "fails"
    assert {name for name in checks_that(judgement, "fails") if "equal time" not in name} == {
        f"NF - batch norm, batch {batch}" for batch in BATCHES
    }


def test_rate_is_chosen_on_held_out_images():
    def make(_, config):
        best = config.lr == pytest.approx(0.1 * config.batch_size / 256)
        return run(0.8 if best else 0.9, held_out=0.7 if best else 0.5)

    values = measured(make)[0].values
    assert values["test accuracy, NF, batch 16"] == pytest.approx([80.0] * 3)


def test_seed_without_all_rates_is_left_out():
    def make(_, config):
        return None if (config.seed, config.lr) == (1, 0.4) else good(_, config)

    values = measured(make)[0].values
    assert len(values["test accuracy, NF, batch 256"]) == 2
    assert len(values["test accuracy, NF, batch 64"]) == 3
