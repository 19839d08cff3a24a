"""The training claims of `fixup`: numbers from made-up runs, what is missing left out, and checks that can fail."""

from collections.abc import Callable

import pytest
import torch

from made_up_runs import MadeUpRuns, checks_that, measure
from normfree.models import build
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Measurement
from normfree_papers.claims.judgement import Judgement, checks_at
from normfree_papers.claims.registry import get
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun
from normfree_papers.fixup import training

TRAINED = ("fixup/fig3", "fixup/table1", "fixup/fig4", "fixup/table4", "fixup/sec3")
SEEDS = (0, 1, 2)
# What one run is made to end with: test accuracy, None for a diverged one; "gone" for one that was not made.
Ends = Callable[[str, TrainConfig], float | str | None]


def measured(
    claim_id: str, ends: Ends, scale: str = "full", seeds: tuple[int, ...] = SEEDS
) -> tuple[Measurement, Judgement, MadeUpRuns]:
    def make(name: str, config: TrainConfig) -> EndedRun | None:
        end = ends(name, config)
        if isinstance(end, str):
            return None
        if end is None:
            return EndedRun({"status": "diverged", "test": None}, [])
        fitted = 1.0 if config.epochs == 200 else end  # long runs learn their training images by heart
        metrics = [{"epoch": e + 1, "train_accuracy": fitted} for e in range(config.epochs)]
        return EndedRun({"status": "finished", "test": {"accuracy": end}}, metrics)

    return measure(get(claim_id), make, scale=scale, seeds=seeds)


def depth_as_printed(name: str, config: TrainConfig) -> float | None:
    """What the text of section 4.1 says."""
    if "LSUV" in name or "√½" in name:
        return 0.4 if config.model in ("wrn-10-1", "wrn-100-1") else None
    return 0.38 if "Fixup" in name else 0.4


def table1_as_printed(name: str, config: TrainConfig) -> float | None:
    if "rate 0.01" in name:
        return None
    return 1 - (6.61 if "batch norm" in name else 7.24 if "Fixup" in name else 7.78) / 100


def fig4_as_printed(name: str, config: TrainConfig) -> float | None:
    accuracies = {"batchnorm": 0.7, "fixup": 0.68, "fixup:bias=false": 0.6, "fixup:scale=0.1,bias=false": 0.5}
    return {**accuracies, "fixup:scale=10,bias=false": None, "fixup:branches=false": 0.3}[config.method]


def table4_as_printed(name: str, config: TrainConfig) -> float:
    return 1 - (2.3 if "Fixup" in name else 2.5) / 100


def rules_as_written(name: str, config: TrainConfig) -> float | None:
    """What section 3 says: only without rule 2 a deep network fails, and all rules together are best."""
    if "without rule 2" in name:
        return None
    return 0.9 if config.method == "fixup" else 0.8


PRINTED = {
    "fixup/sec3": rules_as_written,
    "fixup/fig3": depth_as_printed,
    "fixup/table1": table1_as_printed,
    "fixup/fig4": fig4_as_printed,
    "fixup/table4": table4_as_printed,
}


# Every claim


@pytest.mark.parametrize("claim_id", TRAINED)
@pytest.mark.parametrize("scale", ["quick", "full"])
def test_paper_s_own_numbers_hold(claim_id, scale):
    result, judgement, _ = measured(claim_id, PRINTED[claim_id], scale)
    asked = checks_at(get(claim_id), scale)
    assert all(row.verdict == "holds" for row in judgement.rows if row.check in asked), judgement.rows
    assert result.panels


@pytest.mark.parametrize("claim_id", TRAINED)
@pytest.mark.parametrize("scale", ["quick", "full"])
def test_without_runs_nothing_is_measured_and_nothing_fails(claim_id, scale):
    result, judgement, fake = measured(claim_id, lambda name, config: "gone", scale)
    assert (result.values, result.panels) == ({}, ())
    assert {row.verdict for row in judgement.rows} == {"missing"}
    assert judgement.status == "not run"
    assert fake.missing == fake.asked


@pytest.mark.parametrize("claim_id", TRAINED)
@pytest.mark.parametrize("scale", ["quick", "full"])
def test_any_single_run_is_enough_to_come_back(claim_id, scale):
    asked = measured(claim_id, lambda name, config: "gone", scale)[2].asked
    for only in list(asked)[::3]:
        result, _, _ = measured(claim_id, lambda name, config, only=only: 0.5 if name == only else "gone", scale)
        assert result.values
        assert not any(" - " in name or " over " in name for name in result.values)  # they need two runs


@pytest.mark.parametrize("claim_id", TRAINED)
def test_networks_that_all_diverge_fail_it(claim_id):
    for scale in ("quick", "full"):
        assert measured(claim_id, lambda name, config: None, scale)[1].status == "fails"


@pytest.mark.parametrize("claim_id", TRAINED)
def test_quick_runs_are_small_and_need_no_download(claim_id):
    asked = measured(claim_id, lambda name, config: "gone", "quick")[2].asked
    assert {config.data for config in asked.values()} == {"fashion14"}
    assert all(config.epochs <= 5 for config in asked.values())


@pytest.mark.parametrize("claim_id", TRAINED)
def test_full_cost_is_that_of_its_runs(claim_id):
    asked = measured(claim_id, lambda name, config: "gone", seeds=get(claim_id).seeds_at("full"))[2].asked
    assert get(claim_id).cost.full_seconds == pytest.approx(sum(map(gpu_seconds, asked.values())), rel=0.02)


def test_seeds_are_paired_in_a_difference():
    def ends(name: str, config: TrainConfig) -> float | str:
        if config.seed == 1 and "batch norm" in name:
            return "gone"
        return (0.98 if "Fixup" in name else 0.97) - 0.01 * config.seed

    result, _, fake = measured("fixup/table4", ends, seeds=(0, 1))
    assert result.values["test error, Fixup"] == pytest.approx([2.0, 3.0])
    assert result.values["Fixup - batch norm"] == pytest.approx([-1.0])  # seed 0 alone has both
    assert set(fake.asked) == {f"{row}, seed {seed}" for row in ("Fixup", "batch norm") for seed in (0, 1)}
    assert {name: config.seed for name, config in fake.asked.items()} == {n: int(n[-1]) for n in fake.asked}


# Figure 3


def test_depths_and_rates_are_the_paper_s():
    asked = measured("fixup/fig3", lambda name, config: "gone")[2].asked
    assert len(asked) == (4 * 4 + 2) * len(SEEDS)
    for name, config in asked.items():
        depth = int(name.split(" layers")[0].rpartition(" ")[2].replace(",", ""))
        assert config.model == f"wrn-{depth}-1"
        assert (config.lr, config.epochs, config.weight_decay) == (0.1, 1, 5e-4)
        assert config.batch_size == (64 if depth == 10_000 else 128)
    asked = {name: config for name, config in asked.items() if config.seed == 0}
    assert asked["Fixup, 100 layers, seed 0"] == recipe("depth_test")
    assert asked["Fixup with scalars at 10/L, 10,000 layers, seed 0"] == recipe("depth_test_10000")
    at_1000 = recipe("depth_test", model="wrn-1000-1", method="fixup:scalar_lr=10/L")
    assert asked["Fixup with scalars at 10/L, 1,000 layers, seed 0"] == at_1000
    assert asked["Fixup, 10,000 layers, seed 0"].method == "fixup"


def test_fixup_dead_at_10000_layers_fails_whatever_the_other_rate_does():
    def ends(name: str, config: TrainConfig) -> float | None:
        return None if name.startswith("Fixup, 10,000") else depth_as_printed(name, config)

    result, judgement, _ = measured("fixup/fig3", ends)
    assert judgement.status == "fails"
    assert result.values["accuracy, Fixup, 10,000 layers"] == pytest.approx([10.0] * 3)  # a diverged run is chance
    assert result.values["errors over batch norm's, Fixup, 10,000 layers"] == pytest.approx([90 / 60] * 3)
    found = checks_that(judgement, "holds")
    assert "accuracy, Fixup with scalars at 10/L, 10,000 layers" in found
    assert "accuracy, Fixup, 1,000 layers" in found


def test_our_rate_of_the_scalars_is_an_aside():
    def ends(name: str, config: TrainConfig) -> float | None:
        return None if "10/L" in name else depth_as_printed(name, config)

    judgement = measured("fixup/fig3", ends)[1]
    assert {name for name in checks_that(judgement, "fails") if "10/L" not in name} == set()
    assert judgement.status == "holds"


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.35, "holds"), (0.34, "fails")])
def test_match_is_less_than_the_gap_of_table_1(accuracy, verdict):
    """Batch norm at 40 %: 9.5 % more errors are 65.7 %."""

    def ends(name: str, config: TrainConfig) -> float | None:
        return accuracy if name.startswith("Fixup, 100 layers") else depth_as_printed(name, config)

    assert "errors over batch norm's, Fixup, 100 layers" in checks_that(measured("fixup/fig3", ends)[1], verdict)


@pytest.mark.parametrize("method", ["LSUV", "√½ scaling"])
def test_baseline_that_trains_1000_layers_fails(method):
    def ends(name: str, config: TrainConfig) -> float | None:
        return 0.4 if name.startswith(f"{method}, 1,000") else depth_as_printed(name, config)

    judgement = measured("fixup/fig3", ends)[1]
    assert checks_that(judgement, "fails") == {f"accuracy, {method}, 1,000 layers"}


# Table 1


def test_errors_of_table_1_are_those_of_the_runs():
    result, _, fake = measured("fixup/table1", table1_as_printed)
    assert result.values["test error, Fixup"] == pytest.approx([7.24] * 3)
    assert result.values["Fixup - batch norm"] == pytest.approx([7.24 - 6.61] * 3)
    assert result.values["Xavier - Fixup"] == pytest.approx([7.78 - 7.24] * 3)
    assert result.values["accuracy, Xavier, rate 0.01"] == pytest.approx([10.0] * 3)
    assert fake.asked["Fixup, seed 0"] == recipe("fixup_cifar")
    assert fake.asked["Xavier, rate 0.01, seed 0"].lr == pytest.approx(0.1 * recipe("fixup_cifar").lr)
    panel, printed = result.panels[0], {"Fixup": 7.24, "batch norm": 6.61, "Xavier, small rate": 7.78}
    for curve in panel.curves:  # the paper's, and ours
        drawn = {panel.names[int(x) - 1]: value for x, value in zip(curve.x, curve.values, strict=True)}
        assert {row: drawn[row] for row in printed} == pytest.approx(printed)


@pytest.mark.parametrize(("error", "status"), [(7.7, "holds"), (7.8, "fails"), (6.7, "fails")])
def test_fixup_s_error_is_judged_by_the_printed_one(error, status):
    def ends(name: str, config: TrainConfig) -> float | None:
        if "Xavier, small" in name:
            return 1 - 0.0778
        return 1 - error / 100 if name.startswith("Fixup") else table1_as_printed(name, config)

    assert "test error, Fixup" in checks_that(measured("fixup/table1", ends)[1], status)


def test_xavier_s_chosen_rate_cannot_fail_the_table():
    def ends(name: str, config: TrainConfig) -> float | None:
        return 0.1 if "Xavier" in name else table1_as_printed(name, config)

    judgement = measured("fixup/table1", ends)[1]
    failed = checks_that(judgement, "fails")
    assert failed == {"test error, Xavier, small rate", "Xavier - Fixup"}  # one that does not train is no comparison
    assert judgement.status == "holds"


# Figure 4


def test_ablations_are_three_epochs_at_a_constant_rate():
    asked = measured("fixup/fig4", lambda name, config: "gone")[2].asked
    assert [config.method for config in asked.values() if config.seed == 0] == list(training._ABLATIONS.values())
    for config in asked.values():
        steps = 391
        assert (config.model, config.epochs, config.batch_size) == ("resnet110", 3, 128)
        assert {config.lr_schedule.factor(i, steps, 3) for i in range(3 * steps)} == {1.0}


@pytest.mark.parametrize("method", ["fixup:bias=false", "fixup:scale=0.1,bias=false", "fixup:branches=false"])
def test_part_that_is_not_missed_fails_figure_4(method):
    def ends(name: str, config: TrainConfig) -> float | None:
        return 0.9 if config.method == method else fig4_as_printed(name, config)

    assert measured("fixup/fig4", ends)[1].status == "fails"


def test_large_scale_that_trains_fails_figure_4():
    def ends(name: str, config: TrainConfig) -> float | None:
        return 0.25 if "scale=10" in config.method else fig4_as_printed(name, config)

    failed = checks_that(measured("fixup/fig4", ends)[1], "fails")
    assert failed == {"training accuracy, 10 × scale, no bias"}


# The three rules


def test_unscaled_weights_are_he_s():
    """`without_rule_2` undoes the factor: the weights are those of He fan-out, whatever the depth."""
    for depth in (22, 58):
        model = build(f"wrn-{depth}-1", training.without_rule_2(depth), generator=torch.Generator().manual_seed(0))
        for branch in model.plan.branches[1:]:
            w = model.get_submodule(branch.layers[0].name).weight.detach()
            assert float(w.square().mean()) * 9 * w.shape[0] / 2 == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize(
    ("row", "end", "failed"),
    [
        ("rule 2 alone, deep", None, "accuracy, rule 2 alone"),
        ("rules 1 and 3 without rule 2", 0.5, "accuracy, rules 1 and 3 without rule 2"),
        ("rule 2 alone, early", 0.95, "Fixup - rule 2 alone"),
        ("no multipliers", 0.95, "test error, no multipliers - Fixup"),
        ("no zeros", 0.95, "test error, no zeros - Fixup"),
    ],
)
def test_every_rule_can_fail(row, end, failed):
    def ends(name: str, config: TrainConfig) -> float | None:
        return end if name.startswith(row) else rules_as_written(name, config)

    assert checks_that(measured("fixup/sec3", ends)[1], "fails") == {failed}


# ImageNet, and the recipes


def test_imagenet_is_judged_by_what_is_printed():
    claim = get("fixup/table2")
    printed = {check.name: check.paper for check in claim.checks if isinstance(check.paper, float)}

    def ends_at(error: Callable[[str], float], fitted: float) -> tuple[Measurement, Judgement, MadeUpRuns]:
        def make(name: str, _: TrainConfig) -> EndedRun:
            row = name.rpartition(", seed")[0]
            train = fitted if row == "ResNet-50, Fixup" else 0.75
            return EndedRun(
                {"status": "finished", "test": {"accuracy": 1 - error(row) / 100}}, [{"train_accuracy": train}]
            )

        return measure(claim, make, scale="full", seeds=SEEDS)

    measurement, judgement, runs = ends_at(lambda row: printed[f"test error, {row}"], 0.8)
    assert {row.verdict for row in judgement.rows if row.check.scale == "full"} == {"holds"}
    assert measurement.values["ResNet-50, Fixup + mixup - group norm + mixup"] == pytest.approx([0.1] * 3)
    assert measurement.values["ResNet-50, training error, batch norm - Fixup"] == pytest.approx([5.0] * 3)
    assert {(c.epochs, c.data) for c in runs.asked.values()} == {(n, "folder:.data/imagenet") for n in (100, 200)}
    coefficients = {config.method: config.mixup for config in runs.asked.values() if config.mixup}
    assert coefficients == {"batchnorm": 0.2, "groupnorm": 0.1, "fixup": 0.7}
    _, judgement, _ = ends_at(lambda row: 24.0, 0.7)
    overfits, deep = "ResNet-50, training error, batch norm - Fixup", "test error, ResNet-101, Fixup + mixup"
    assert {overfits, deep} <= checks_that(judgement, "fails")


def test_wide_network_has_the_defaults_of_its_paper():
    config = recipe("fixup_wrn")
    assert (config.model, config.mixup, config.cutout, config.weight_decay) == ("wrn-40-10", 1.0, 16, 5e-4)
    drops = [config.lr_schedule.factor(epoch * 391, 391, 200) for epoch in (0, 60, 120, 160)]
    assert drops == pytest.approx([1.0, 0.2, 0.04, 0.008])
    assert recipe("batchnorm_wrn") == config.with_changes(method="batchnorm")
