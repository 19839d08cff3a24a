"""Figure 4 and Table 1 of wninit: numbers and verdicts from made-up runs."""

import pytest

from made_up_runs import checks_that
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.seed_metrics import EndedRun
from wninit_runs import DIVERGED, asked_for, made_up, measured


def test_figure_4_has_20_seeds_and_three_epochs():
    asked = asked_for("fig4")
    assert {config.seed for config in asked.values()} == set(range(20))
    assert {(config.model, config.epochs) for config in asked.values()} == {("wrn-40-10", 3)}
    assert {config.warmup for config in asked.values()} == {0.0, 1.0}


def test_table_1_is_trained_by_the_recipes_that_train_alone():
    asked = asked_for("table1")
    assert asked["ResNet-110, proposed + warm-up, lr 0.1, seed 0"] == recipe("wninit_cifar")
    assert asked["ResNet-56, proposed + warm-up, lr 0.1, seed 0"] == recipe("wninit_cifar", model="resnet56")
    assert asked["WRN-40-10, proposed + warm-up, lr 0.1, seed 0"] == recipe("wninit_wrn")
    warm = {name: config.warmup > 0 for name, config in asked.items()}
    assert all(("warm-up" in name) == warmed for name, warmed in warm.items())


# Seeds and warm-up


def survivors(config: TrainConfig) -> EndedRun:
    """Five seeds: the proposed survives all but one, the others only with warm-up and a small rate."""
    if config.method == "wn":
        return DIVERGED if (config.lr, config.warmup, config.seed) == (0.1, 0.0, 4) else made_up(50.0)
    return made_up(50.0) if config.warmup and config.lr < 0.1 else DIVERGED


def test_share_of_seeds_that_survive_is_counted():
    values, judgement = (found := measured("fig4", survivors, seeds=range(5)))[0].values, found[1]
    assert values["survive, proposed, lr 0.1, no warm-up"] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert values["proposed - best other, lr 0.1, no warm-up"] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert values["proposed - best other, lr 0.03, warm-up"] == [0.0] * 5
    assert values["survive, proposed, mean over settings"] == pytest.approx([1.0] * 4 + [5 / 6])
    # gains of the last seed: 0, 0, 1 for the proposed; 1, 1, 0 for each of three others
    assert values["warm-up - no warm-up"] == pytest.approx([6 / 12] * 4 + [7 / 12])
    assert judgement.status == "holds"


def test_survival_fails_where_another_is_more_robust_and_warm_up_does_nothing():
    def make(config: TrainConfig) -> EndedRun:
        return DIVERGED if config.method == "wn" or config.warmup else made_up(50.0)

    _, judgement, _ = measured("fig4", make, seeds=(0, 1, 2))
    leads = {row.check.name for row in judgement.rows if row.check.name.startswith("proposed -")}
    assert len(leads) == 6
    failed = checks_that(judgement, "fails")
    assert {name for name in leads if "no warm-up" in name} <= failed
    assert {"survive, proposed, mean over settings", "warm-up - no warm-up"} <= failed


def test_seed_with_a_missing_run_is_left_out_of_what_needs_it():
    gone = ("wn_data", 0.1, 1.0, 1)
    measurement, _, _ = measured(
        "fig4", lambda c: None if (c.method, c.lr, c.warmup, c.seed) == gone else survivors(c), seeds=(0, 1)
    )
    assert measurement.values["survive, data-dependent, lr 0.1, warm-up"] == [0.0]
    assert len(measurement.values["warm-up - no warm-up"]) == 1  # of the seed that is whole
    assert len(measurement.values["proposed - best other, lr 0.01, warm-up"]) == 2


# The error in the end

PRINTED = {  # Table 1, typed again
    ("resnet56", "wn_data", 0): 9.19, ("resnet56", "wn", 0): 7.87, ("resnet56", "wn", 1): 7.20,
    ("resnet110", "wn_data", 0): 9.33, ("resnet110", "wn", 0): 7.71, ("resnet110", "wn", 1): 6.69,
    ("wrn-40-10", "wn_data", 0): 6.10, ("wrn-40-10", "wn", 0): 4.74, ("wrn-40-10", "wn", 1): 4.75,
    ("resnet56", "batchnorm", 0): 6.97, ("resnet110", "batchnorm", 0): 6.61, ("wrn-40-10", "batchnorm", 0): 3.53,
}  # fmt: skip


def printed(config: TrainConfig) -> EndedRun:
    return made_up(100 - PRINTED[config.model, config.method, int(config.warmup > 0)])


def test_table_1_holds_with_the_printed_errors():
    measurement, judgement, _ = measured("table1", printed)
    assert judgement.status == "undecided"
    assert checks_that(judgement, "missing") == {row.check.name for row in judgement.rows if row.check.lacks}
    for row in judgement.rows:  # the paper's number of each check is what its own errors give
        if not row.check.lacks:
            assert row.measured == pytest.approx(row.check.paper, abs=1e-6)
    for panel in measurement.panels:
        assert len(panel.names) == 4
        paper, here = (curve.values for curve in panel.curves)
        assert here == pytest.approx(paper)
    assert len(measurement.tables[0].rows) == 12


def test_table_1_takes_the_better_rate_and_a_diverged_run_as_chance():
    def make(config: TrainConfig) -> EndedRun:
        return DIVERGED if (config.model == "resnet56" and config.warmup) or config.lr == 0.1 else printed(config)

    values = measured("table1", make)[0].values
    assert values["ResNet-56, proposed + warm-up"] == [pytest.approx(90.0)]
    assert values["ResNet-110, proposed + warm-up"] == [pytest.approx(6.69)]  # at 0.03


def test_table_1_fails_with_a_large_error_and_a_reversed_order():
    def make(config: TrainConfig) -> EndedRun:
        if config.model == "resnet56" and config.warmup:
            return made_up(92.2)  # 0.6 above the printed error
        return made_up(95.5) if (config.model, config.method) == ("wrn-40-10", "wn_data") else printed(config)

    _, judgement, _ = measured("table1", make)
    assert checks_that(judgement, "fails") == {
        "ResNet-56, proposed + warm-up",
        "ResNet-56, proposed - proposed + warm-up",
        "ResNet-56, proposed + warm-up - batch norm",
        "WRN-40-10, data-dependent - proposed",
    }


def test_table_1_with_the_headline_rows_alone():
    measurement, judgement, _ = measured("table1", lambda c: printed(c) if c.warmup and c.lr == 0.1 else None)
    assert set(measurement.values) == {f"{net}, proposed + warm-up" for net in ("ResNet-56", "ResNet-110", "WRN-40-10")}
    assert checks_that(judgement, "holds") == set(measurement.values)
    assert judgement.status == "undecided"
