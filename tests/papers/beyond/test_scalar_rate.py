"""Our questions on the scalars' rate and on precision: fits with closed forms, and verdicts from made-up runs."""

import pytest

from made_up_runs import MadeUpRuns, checks_that, measure
from normfree.models import build
from normfree.train import TrainConfig
from normfree_papers.beyond.scalar_rate import branches, extrapolated, largest_stable
from normfree_papers.claims.claim import Measurement
from normfree_papers.claims.judgement import Judgement
from normfree_papers.claims.registry import get
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun

SEEDS = (0, 1, 2)


def ended(accuracy: float | None) -> EndedRun:
    if accuracy is None:
        return EndedRun({"status": "diverged", "test": None}, [])
    return EndedRun({"status": "finished", "test": {"accuracy": accuracy}}, [{"train_accuracy": accuracy}])


def measured(name: str, accuracy, scale: str = "full") -> tuple[Measurement, Judgement, MadeUpRuns]:
    return measure(get(f"beyond/{name}"), lambda row, c: ended(accuracy(row, c)), scale=scale, seeds=SEEDS)


# Fits


@pytest.mark.parametrize("depth", [16, 40, 100])
def test_branches_are_those_of_the_network(depth):
    assert branches(depth) == len(build(f"wrn-{depth}-1", "fixup", device="meta").plan.branches)


def test_largest_rate_stops_at_the_first_that_does_not_train():
    assert largest_stable({100.0: False, 3.0: True, 10.0: True}) == 10.0
    assert largest_stable({3.0: False, 10.0: True}) is None
    assert largest_stable({3.0: True, 10.0: True}) == 10.0


@pytest.mark.parametrize("slope", [-1.0, -0.5, 0.1])
def test_power_law_is_continued(slope):
    points = {L: 7.0 * L**slope for L in (15, 48, 150, 498)}
    assert extrapolated(points, 5000) == pytest.approx(7.0 * 5000**slope)


# The law


def rate_of(config: TrainConfig) -> float:
    """The rate of the scalars relative to that of the weights."""
    text = config.method.partition("scalar_lr=")[2]
    return float(text.partition("/")[0]) / (branches(int(config.model.split("-")[1])) if "/" in text else 1)


def by_law(slope: float):
    def accuracy(row: str, config: TrainConfig) -> float | None:
        L = branches(int(config.model.split("-")[1]))
        return 0.38 if rate_of(config) <= 0.11 * (L / 498) ** slope else None

    return accuracy


def test_law_of_one_over_depth_holds_and_predicts():
    measurement, judgement, runs = measured("scalar_rate_law", by_law(-1.0))
    assert judgement.status == "holds"
    assert measurement.values["exponent in L"] == pytest.approx([-1.0] * 3)  # 30/L at every depth
    far = {name: config for name, config in runs.asked.items() if "10,000" in name}
    assert {config.method for config in far.values()} == {"fixup:scalar_lr=10/L", "fixup:scalar_lr=300/L"}
    assert len(far) == 6
    cost = get("beyond/scalar_rate_law").cost.full_seconds
    assert cost == pytest.approx(sum(map(gpu_seconds, runs.asked.values())), rel=0.02)


def test_other_laws_fail():
    for slope in (-0.5, 0.0):
        judgement = measured("scalar_rate_law", by_law(slope))[1]
        assert "exponent in L" in checks_that(judgement, "fails"), slope


def test_limits_outside_of_the_grid_fail_and_give_no_false_exponent():
    judgement = measured("scalar_rate_law", lambda row, config: 0.38)[1]
    assert "limits inside the rates tried" in checks_that(judgement, "fails")
    measurement, judgement, _ = measured("scalar_rate_law", lambda row, config: None)
    assert judgement.status == "fails"
    assert "exponent in L" not in measurement.values


# Rates at 1,000 layers


def at_1000(row: str, config: TrainConfig) -> float | None:
    if row.startswith("rate 1,"):
        return None
    return (0.38 if config.seed < 1 else 0.1) if row.startswith("rate 0.1") else 0.36


def test_rates_at_1000_layers_hold_as_predicted_and_fail_one_by_one():
    measurement, judgement, runs = measured("scalar_rate", at_1000)
    assert checks_that(judgement, "fails") == set()
    assert measurement.values["trains, rate 0.1"] == [1.0, 0.0, 0.0] * 2
    assert measurement.values["errors in float32 over mixed"] == pytest.approx([1.0] * 3)
    assert {config.precision for config in runs.asked.values()} == {"float32", "auto"}
    for row, end, failed in (
        ("rate 0,", None, {"accuracy, rate 0, float32", "accuracy, rate 0, mixed"}),
        ("rate 1,", 0.4, {"accuracy, rate 1, float32", "accuracy, rate 1, mixed"}),
        ("rate 10/L, mixed", None, {"accuracy, rate 10/L, mixed", "errors in float32 over mixed"}),
    ):
        judgement = measured("scalar_rate", lambda r, c, row=row, end=end: end if r.startswith(row) else at_1000(r, c))[
            1
        ]
        assert failed <= checks_that(judgement, "fails")


@pytest.mark.parametrize("name", ["scalar_rate", "precision"])
def test_cost_is_that_of_the_runs(name):
    claim = get(f"beyond/{name}")
    runs = measure(claim, lambda row, c: None, scale="full", seeds=claim.seeds_at("full"))[2]
    assert claim.cost.full_seconds == pytest.approx(sum(map(gpu_seconds, runs.asked.values())), rel=0.02)


# Precision


def test_float32_that_differs_by_more_than_a_gap_fails():
    def accuracy(row: str, config: TrainConfig) -> float:
        return 0.36 if config.precision == "float32" and config.method == "wn" else 0.45

    judgement = measured("precision", accuracy)[1]
    assert checks_that(judgement, "fails") == {"errors in float32 over fast, weight norm, 100 layers"}
    assert measured("precision", lambda row, config: 0.45)[1].status == "holds"
