"""Figures 2 and 3 of wninit, and the runs of all its trained claims: made-up runs, and a short real sweep."""

from pathlib import Path

import pytest

from made_up_runs import checks_that, judge_means
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.judgement import checks_at
from normfree_papers.claims.reproduction import collect
from normfree_papers.claims.run_cache import RunCache
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun
from normfree_papers.wninit.sweep import Sweep
from wninit_runs import DIVERGED, Made, asked_for, depth_of, get, made_up, measured, nothing

NAMES = ("fig2_left", "fig2_right", "fig3_left", "fig3_right", "fig4", "table1", "sec3")


# The runs that are asked for


@pytest.mark.parametrize("scale", ["quick", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_every_run_has_its_own_name_and_fingerprint(name, scale):
    _, _, fake = measured(name, nothing, scale, (0, 1))
    assert len({config.fingerprint() for config in fake.asked.values()}) == len(fake.asked)
    assert {config.seed for config in fake.asked.values()} == {0, 1}
    assert all(config.validation == 0.1 for config in fake.asked.values())  # "a set of held-out examples"


@pytest.mark.parametrize("name", NAMES)
def test_quick_runs_need_no_data_of_others(name):
    _, _, fake = measured(name, nothing, "quick")
    assert {config.data for config in fake.asked.values()} == {"fashion14"}


def test_both_halves_of_figure_2_are_of_the_same_runs():
    asked = [asked_for(name) for name in ("fig2_left", "fig2_right")]
    assert asked[0] == asked[1]
    configs = asked[0].values()
    assert {config.data for config in configs} == {"mnist"}
    assert {21, 201} <= {depth_of(config) for config in configs}  # the depths that the text names, and the classifier
    assert 1e-5 in {config.lr for config in configs}  # and the rate
    assert {config.method for config in configs} == {"wn", "wn_data"}
    one = asked[0]["proposed, 200 layers, lr 0.001, seed 0"]
    assert one == recipe("wninit_mlp")


def test_wide_resnets_are_trained_for_one_epoch_to_10000_layers():
    asked = asked_for("fig3_right")
    assert {config.epochs for config in asked.values()} == {1}
    assert max(depth_of(config) for config in asked.values()) == 10_000
    assert {config.method for config in asked.values()} == {"wn", "wn_data", "wn_hanin", "wn_default"}
    assert asked["proposed, 100 layers, lr 0.03, seed 0"] == recipe("wninit_depth")


@pytest.mark.parametrize("name", NAMES)
def test_cost_is_what_the_runs_are_expected_to_take(name):
    claim = get(name)
    assert claim.cost.full_seconds == pytest.approx(sum(map(gpu_seconds, asked_for(name).values())), rel=0.05)
    assert claim.cost.device == "gpu"


@pytest.mark.parametrize("scale", ["quick", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_no_run_gives_no_number_and_no_picture(name, scale):
    measurement, judgement, _ = measured(name, nothing, scale)
    assert not measurement.values
    assert not measurement.panels
    assert {row.verdict for row in judgement.rows} == {"missing"}
    assert judgement.status == "not run"


# Depth


def mlps(config: TrainConfig) -> EndedRun:
    """What the paper says: the proposed trains at all depths, the data-dependent one to 20, at smaller rates."""
    if config.lr > 0.01 or (config.method == "wn_data" and (depth_of(config) > 21 or config.lr > 0.001)):
        return DIVERGED
    return made_up(97.0 if config.lr >= 0.001 else 30.0)


def test_figure_2_holds_for_what_the_paper_says():
    measurement, judgement, _ = measured("fig2_left", mlps)
    assert judgement.status == "holds"
    assert measurement.values["proposed, 200 layers"] == [97.0]
    assert measurement.values["data-dependent, 50 layers"] == [0.0]  # diverged at every rate: 0, as in the caption
    assert [panel.title for panel in measurement.panels] == ["test accuracy, MNIST", "training accuracy, MNIST"]
    curve = measurement.panels[1].curves[0]
    assert (curve.name, curve.x, curve.values) == ("proposed", (10, 20, 50, 100, 200), (99.0,) * 5)


def test_figure_2_fails_where_the_data_dependent_one_trains_deeper():
    def make(config: TrainConfig) -> EndedRun:
        return made_up(97.0) if config.method == "wn_data" and depth_of(config) == 51 else mlps(config)

    assert checks_that(measured("fig2_left", make)[1], "fails") == {"data-dependent, 50 layers"}


def test_figure_2_fails_where_the_proposed_one_does_not_train_200_layers():
    _, judgement, _ = measured("fig2_left", lambda c: made_up(60.0) if depth_of(c) == 201 else mlps(c))
    assert checks_that(judgement, "fails") == {"proposed, 200 layers", "data-dependent, 200 layers"}
    assert judgement.status == "fails"


def test_rate_is_chosen_by_the_held_out_images():
    def make(config: TrainConfig) -> EndedRun:
        return {0.1: DIVERGED, 0.01: made_up(95.0, 80.0), 0.001: made_up(91.0, 85.0)}.get(config.lr, made_up(99, 10))

    values = measured("fig2_left", make)[0].values
    assert values["proposed, 100 layers"] == [91.0]  # not the best on the test images


def test_note_names_the_rate_that_was_taken_of_equally_good_ones():
    measurement = measured("fig2_left", lambda c: made_up(90.0 if c.lr == 0.1 else 50.0, 80.0))[0]
    assert measurement.values["proposed, 200 layers"] == [90.0]
    assert "proposed 0.1 at 10 layers" in measurement.notes[0]


def test_baseline_counts_only_with_all_rates_tried():
    measurement, judgement, _ = measured("fig2_left", lambda c: None if c.lr == 1e-5 else mlps(c))
    assert {name for name in measurement.values if name.startswith("data")} == set()
    assert measurement.values["proposed, 200 layers"] == [97.0]  # that it trains is known by now
    assert judgement.status == "undecided"


def test_diverged_runs_are_crosses_at_chance_and_count_as_zero():
    measurement = measured("fig2_left", lambda c: DIVERGED if depth_of(c) > 150 else made_up(90.0))[0]
    assert measurement.values["data-dependent, 200 layers"] == [0.0]
    for panel in measurement.panels:
        curve = next(curve for curve in panel.curves if curve.name == "data-dependent")
        assert (curve.values[-1], curve.crossed) == (10.0, (len(curve.values) - 1,))
        assert "× diverged" in panel.note


def test_seeds_are_measured_one_by_one():
    values = measured("fig2_left", lambda c: made_up(80.0 + c.seed), seeds=(3, 1))[0].values
    assert values["proposed, 20 layers"] == [81.0, 83.0]  # in the order of the seeds


def test_share_of_settings_is_counted():
    measurement, judgement, _ = measured("fig2_right", mlps)
    # rates 0.01 and 0.001 of five at five depths; 0.001 of five at two depths
    assert measurement.values["share, proposed"] == [pytest.approx(10 / 25)]
    assert measurement.values["share, data-dependent"] == [pytest.approx(2 / 25)]
    assert measurement.values["share, proposed - data-dependent"] == [pytest.approx(8 / 25)]
    assert measurement.values["depths with a rate ten times larger"] == [1.0]
    assert judgement.status == "holds"
    jobs = {curve.name: curve for curve in measurement.panels[0].curves}
    assert jobs["proposed"].values == (97.0,) * 10 + (30.0,) * 10 + (10.0,) * 5
    assert jobs["proposed"].crossed == tuple(range(20, 25))  # diverged, drawn at chance


def test_share_is_missing_with_a_run_and_fails_when_equal():
    def without_one(config: TrainConfig) -> EndedRun | None:
        return None if (config.method, depth_of(config), config.lr) == ("wn", 11, 0.1) else mlps(config)

    assert "share, proposed" not in measured("fig2_right", without_one)[0].values
    _, judgement, _ = measured("fig2_right", lambda c: made_up(90.0 if c.method == "wn_data" else 40.0))
    assert checks_that(judgement, "fails") == {row.check.name for row in judgement.rows}
    _, judgement, _ = measured("fig2_right", lambda c: DIVERGED)
    assert "share, proposed" in checks_that(judgement, "fails")


def test_larger_rates_count_from_ten_times_on():
    def make(top: float, other: float) -> Made:
        return lambda c: made_up(90.0 if c.lr <= (top if c.method == "wn" else other) else 10.0)

    name = "depths with a rate ten times larger"
    assert measured("fig2_right", make(1e-2, 1e-3))[0].values[name] == [1.0]
    assert measured("fig2_right", make(1e-3, 1e-3))[0].values[name] == [0.0]
    assert measured("fig2_right", make(1e-3, 0.0))[0].values[name] == [1.0]  # the other trains at no rate
    assert measured("fig2_right", make(0.0, 0.0))[0].values[name] == [0.0]  # and neither does this one


def test_plain_cnns_hold_and_fail():
    def make(config: TrainConfig) -> EndedRun:
        deep = config.method == "wn_data" and depth_of(config) > 11
        return DIVERGED if deep or config.lr == 0.1 else made_up(60.0)

    measurement, judgement, _ = measured("fig3_left", make)
    assert judgement.status == "holds"
    assert measurement.values["data-dependent, 100 layers"] == [pytest.approx(10.0)]  # chance
    assert measured("fig3_left", lambda c: made_up(60.0))[1].status == "fails"
    quick = measured("fig3_left", make, "quick")[1]
    assert quick.status == "undecided"  # the deep ones are not tested
    assert checks_that(quick, "holds") == {check.name for check in checks_at(get("fig3_left"), "quick")}


def wide(config: TrainConfig) -> EndedRun:
    """What the paper says of one epoch: rates ten times Hanin's, the default diverges, data-dependent is slow."""
    top = {"wn": 0.03, "wn_hanin": 0.003, "wn_data": 0.001, "wn_default": 0.0}[config.method]
    return DIVERGED if config.lr > top else made_up({"wn": 38.0, "wn_hanin": 36.0}.get(config.method, 28.0))


def test_wide_resnets_hold_for_what_the_paper_says():
    values, judgement = (found := measured("fig3_right", wide))[0].values, found[1]
    assert judgement.status == "holds"
    assert values["PyTorch default, share of depths that train"] == [0.0]
    assert values["proposed - data-dependent, 10000 layers"] == [pytest.approx(10.0)]
    assert values["errors over stage-wise Hanin's, mean over depths"] == [pytest.approx(62 / 64)]
    assert values["proposed, most errors over fewest"] == [1.0]
    assert values["depths with a rate ten times Hanin's"] == [1.0]


def test_wide_resnets_fail_one_by_one():
    def worse(config: TrainConfig) -> EndedRun:
        return made_up(26.0) if (config.method, depth_of(config)) == ("wn", 10_000) else wide(config)

    assert checks_that(measured("fig3_right", worse)[1], "fails") == {
        "proposed, most errors over fewest", "proposed - data-dependent, 10000 layers",
    }  # fmt: skip

    def default_trains(config: TrainConfig) -> EndedRun:
        return made_up(30.0) if config.method == "wn_default" and depth_of(config) < 10_000 else wide(config)

    found, judgement, _ = measured("fig3_right", default_trains)
    assert found.values["PyTorch default, share of depths that train"] == [pytest.approx(2 / 3)]
    assert checks_that(judgement, "fails") == {"PyTorch default, share of depths that train"}

    def hanin_as_fast(config: TrainConfig) -> EndedRun:
        return made_up(38.0) if config.method == "wn_hanin" and config.lr <= 0.01 else wide(config)

    assert checks_that(measured("fig3_right", hanin_as_fast)[1], "fails") == {"depths with a rate ten times Hanin's"}


def test_wide_resnets_without_the_deepest_leave_out_what_needs_it():
    measurement, judgement, _ = measured("fig3_right", lambda c: wide(c) if depth_of(c) < 10_000 else None)
    assert checks_that(judgement, "holds") == {"proposed, 100 layers", "proposed, 1000 layers"}
    assert not checks_that(judgement, "fails")
    assert measurement.panels[0].curves[0].x == (100, 1000)


# The choices of section 3


def choices(config: TrainConfig) -> EndedRun:
    return made_up(60.0 if config.method == "wn" else 55.0)


def test_choices_hold_where_the_proposed_is_superior_and_fail_one_by_one():
    assert measured("sec3", choices)[1].status == "holds"
    for method, other in (
        ("wn:g=backward", "g for the backward pass"),
        ("wn:g=mean", "geometric mean of both g"),
        ("wn:directions=gaussian", "Gaussian directions"),
    ):
        judgement = measured("sec3", lambda c, m=method: made_up(61.0) if c.method == m else choices(c))[1]
        assert checks_that(judgement, "fails") == {f"proposed - {other}"}
    assert "proposed" in checks_that(measured("sec3", lambda c: DIVERGED)[1], "fails")


# Real runs


def test_sweep_trains_what_it_asks_for(tmp_path):
    cache = RunCache(tmp_path / "kept", tmp_path / "work")
    network = recipe("wninit_mlp", model="mlp-3-16", data="fashion14", epochs=1)
    settings = Settings(scale="quick", runs=cache)
    sweep = Sweep.run(settings, {"proposed": "wn"}, {3: network}, (0.01, 1e-5), diverged=0.0, trains=50.0)
    assert sweep.largest("proposed", 3, whole=True) == {0: 0.01}
    assert sweep.shares("proposed") == {0: 0.5}
    assert sweep.accuracies("proposed", 3)[0] > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quick_sweep_of_mlps_holds(tmp_path: Path):
    claim = get("fig2_left")
    settings = Settings(scale="quick", runs=RunCache(tmp_path / "kept", tmp_path / "work"))
    judgement = judge_means(claim, collect(claim, settings, claim.measure(settings), 1.0))
    tested = [row for row in judgement.rows if row.check in checks_at(claim, "quick")]
    assert all(row.verdict == "holds" for row in tested), tested
