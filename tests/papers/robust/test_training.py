"""Figures 3, 6 and 7 of robust: numbers and verdicts from made-up runs, and short real ones of the stand-ins."""

import math
from pathlib import Path
from typing import Any

import pytest

from made_up_runs import MadeUpRuns, checks_that, measure
from normfree.models import build
from normfree.train import TrainConfig
from normfree.train.recipes import recipe
from normfree_papers.claims.claim import Measurement, Settings
from normfree_papers.claims.judgement import Judgement, admits, checks_at, judge
from normfree_papers.claims.registry import get
from normfree_papers.claims.reproduction import collect
from normfree_papers.claims.run_cache import RunCache
from normfree_papers.claims.run_training import gpu_seconds
from normfree_papers.claims.seed_metrics import EndedRun
from normfree_papers.robust.training import BESIDE, FIGURES, ROWS

PROPOSED = {"idshort", "learnscalar", "convshort"}
BROCK = {f"{name}_brock" for name in PROPOSED}
FIGS = {f"robust/fig{figure.number}": figure for figure in FIGURES}
DEEP = ("robust/fig3", "robust/fig7")
# What the paper says of the deeper networks, and of ResNet-18; test accuracies by method
BESIDE_ROWS = {"convshort:fan=in": 0.92, "isograd:shortcut=conv": 0.93}
HOLDS_DEEP = BESIDE_ROWS | {"batchnorm_convshort": 0.92, "idshort": 0.89, "learnscalar": 0.9, "convshort": 0.93}
HOLDS_18 = {"convshort": 0.915, "batchnorm_convshort": 0.92, "idshort": 0.9, "learnscalar": 0.9} | dict.fromkeys(
    BROCK, 0.88
)


def made_up(accuracy: float | None) -> EndedRun:
    """A run that ended with this test accuracy, or diverged in its first epoch."""
    if accuracy is None:
        return EndedRun({"status": "diverged", "test": None, "steps": 7}, ())
    metrics = [{"step": i, "epoch": i, "train_accuracy": accuracy * i / 2} for i in (1, 2)]
    return EndedRun({"status": "finished", "test": {"accuracy": accuracy, "loss": 1.0}, "steps": 2}, metrics)


def measured(claim_id: str, found: Any, **fields: Any) -> tuple[Measurement, Judgement, MadeUpRuns]:
    """With the run of every method, or what a function makes of a configuration; those not named were not run."""

    def make(_: str, config: TrainConfig) -> EndedRun | None:
        if callable(found):
            return found(config)
        return made_up(found[config.method]) if config.method in found else None

    return measure(get(claim_id), make, **{"seeds": (0, 1, 2), **fields})


# The runs that are asked for


@pytest.mark.parametrize("claim_id", FIGS)
def test_full_runs_are_the_recipe(claim_id):
    _, _, fake = measured(claim_id, {}, seeds=(0,))
    depth = {"robust/fig3": 50, "robust/fig6": 18, "robust/fig7": 101}[claim_id]
    beside = set(BESIDE.values()) if claim_id == "robust/fig3" else set()
    assert {config.method for config in fake.asked.values()} == {"batchnorm_convshort", *PROPOSED, *BROCK} | beside
    for config in fake.asked.values():
        assert config == recipe("robust_cifar", model=f"preact_resnet{depth}", method=config.method, seed=0, epochs=30)
    # section 4: "SGD with an initial learning rate of 0.01, a momentum of 0.9 and a batch size of 128", cosine
    config = next(iter(fake.asked.values()))
    assert (config.lr, config.momentum, config.batch_size, config.schedule) == (0.01, 0.9, 128, "cosine")
    assert config.cosine_by == "epoch"
    assert config.randaugment[0] > 0


@pytest.mark.parametrize("claim_id", FIGS)
def test_every_run_has_its_own_name_and_folder(claim_id):
    _, _, fake = measured(claim_id, {}, seeds=(0, 1))
    rows = len(ROWS) + (len(BESIDE) if claim_id == "robust/fig3" else 0)
    assert len(fake.asked) == 2 * rows
    assert len({config.fingerprint() for config in fake.asked.values()}) == 2 * rows


@pytest.mark.parametrize("claim_id", FIGS)
def test_stand_in_has_as_many_blocks_and_layers_a_block(claim_id):
    figure = FIGS[claim_id]
    plans = [
        build(name, "idshort", form="pre", device="meta").plan
        for name in (f"preact_resnet{figure.depth}", figure.stand_in)
    ]
    shapes = [[len(branch.layers) for branch in plan.branches] for plan in plans]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("claim_id", FIGS)
def test_cost_is_that_of_the_runs(claim_id):
    _, _, fake = measured(claim_id, {}, seeds=get(claim_id).seeds_at("full"))
    planned = math.fsum(gpu_seconds(config) for config in fake.asked.values())
    assert get(claim_id).cost.full_seconds == pytest.approx(planned, rel=0.02)


# Numbers and verdicts


@pytest.mark.parametrize("claim_id", DEEP)
def test_deep_figure_holds_where_brock_diverges_and_convshort_leads(claim_id):
    measurement, judgement, _ = measured(claim_id, HOLDS_DEEP | dict.fromkeys(BROCK, None))
    assert judgement.status == "holds", judgement.rows
    network = f"ResNet-{FIGS[claim_id].depth}"
    assert measurement.values[f"test accuracy, IdShort (proposed), {network}"] == pytest.approx([89.0] * 3)
    assert measurement.values[f"test accuracy, ConvShort (Brock), {network}"] == pytest.approx([10.0] * 3)  # chance
    assert measurement.values["BatchNorm - ConvShort"] == pytest.approx([-1.0] * 3)
    assert measurement.values["ConvShort - LearnScalar"] == pytest.approx([3.0] * 3)
    assert measurement.values["rank of ConvShort"] == [1.0] * 3


@pytest.mark.parametrize("claim_id", DEEP)
def test_deep_figure_fails_where_brock_trains(claim_id):
    _, judgement, _ = measured(claim_id, HOLDS_DEEP | dict.fromkeys(BROCK, 0.85))
    assert judgement.status == "fails"
    failed = {name for name in checks_that(judgement, "fails") if "Brock" in name}
    assert len(failed) == 3
    assert checks_that(judgement, "fails") == failed


@pytest.mark.parametrize("claim_id", FIGS)
def test_figure_fails_where_a_gap_to_batch_norm_is_left(claim_id):
    holds = HOLDS_18 if claim_id == "robust/fig6" else HOLDS_DEEP | dict.fromkeys(BROCK, None)
    _, judgement, _ = measured(claim_id, holds | {"batchnorm_convshort": holds["convshort"] + 0.02})
    assert judgement.status == "fails"
    assert "BatchNorm - ConvShort" in checks_that(judgement, "fails")


@pytest.mark.parametrize("claim_id", DEEP)
def test_deep_figure_fails_where_identity_shortcuts_do_better(claim_id):
    _, judgement, _ = measured(claim_id, HOLDS_DEEP | dict.fromkeys(BROCK, None) | {"idshort": 0.935})
    assert judgement.status == "fails"
    assert "ConvShort - IdShort" in checks_that(judgement, "fails")


@pytest.mark.parametrize("claim_id", FIGS)
def test_figure_fails_where_a_proposed_row_diverges(claim_id):
    holds = HOLDS_18 if claim_id == "robust/fig6" else HOLDS_DEEP | dict.fromkeys(BROCK, None)
    _, judgement, _ = measured(claim_id, holds | {"learnscalar": None})
    network = f"ResNet-{FIGS[claim_id].depth}"
    assert judgement.status == "fails"
    assert checks_that(judgement, "fails") == {f"test accuracy, LearnScalar (proposed), {network}"}


def test_fig3_does_not_fail_where_batch_norm_stays_ahead_by_less_than_a_point():
    rows = HOLDS_DEEP | dict.fromkeys(BROCK, None) | {"batchnorm_convshort": 0.935}
    _, judgement, _ = measured("robust/fig3", rows)
    assert judgement.status == "holds"
    assert checks_that(judgement, "fails") == {"ConvShort - BatchNorm"}


def test_fig3_remarks_where_fan_in_does_better():
    _, judgement, _ = measured("robust/fig3", HOLDS_DEEP | dict.fromkeys(BROCK, None) | {"convshort:fan=in": 0.935})
    assert judgement.status != "fails"
    assert checks_that(judgement, "fails") == {"ConvShort - ConvShort (He fan-in, the control)"}


def test_fig6_holds_where_all_train_and_convshort_is_second():
    measurement, judgement, _ = measured("robust/fig6", HOLDS_18)
    assert judgement.status == "holds", judgement.rows
    assert measurement.values["rank of ConvShort"] == [2.0] * 3


def test_fig6_remarks_where_convshort_is_the_best():
    _, judgement, _ = measured("robust/fig6", HOLDS_18 | {"convshort": 0.95})
    assert judgement.status == "holds"
    assert checks_that(judgement, "fails") == {"rank of ConvShort"}


def test_fig6_fails_where_brock_diverges():
    _, judgement, _ = measured("robust/fig6", HOLDS_18 | {"idshort_brock": None})
    assert judgement.status == "fails"


@pytest.mark.parametrize("claim_id", FIGS)
@pytest.mark.parametrize("scale", ["quick", "full"])
def test_without_runs_nothing_is_measured(claim_id, scale):
    measurement, judgement, fake = measured(claim_id, {}, scale=scale)
    assert measurement.values == {}
    assert measurement.panels == measurement.tables == ()
    assert fake.missing == fake.asked
    assert {row.verdict for row in judgement.rows} == {"missing"}


def test_missing_run_leaves_out_only_what_needs_it():
    rows = HOLDS_DEEP | dict.fromkeys(BROCK, None)
    del rows["batchnorm_convshort"], rows["idshort_brock"]
    measurement, judgement, _ = measured("robust/fig7", rows)
    assert judgement.status == "undecided"
    missing = {"test accuracy, IdShort (Brock), ResNet-101", "BatchNorm - ConvShort", "rank of ConvShort"}
    assert checks_that(judgement, "missing") == missing
    assert not checks_that(judgement, "fails")
    assert measurement.panels[1].levels[0].name == "chance"
    assert len(measurement.panels[1].levels) == 1  # no batch norm to hold the curves against


def test_differences_are_taken_within_a_seed():
    def found(config: TrainConfig) -> EndedRun | None:
        if (config.method, config.seed) == ("batchnorm_convshort", 0):
            return None
        base = HOLDS_18[config.method]
        return made_up(base + 0.01 * config.seed if config.method == "convshort" else base)

    measurement, _, _ = measured("robust/fig6", found, seeds=(0, 1, 2))
    assert measurement.values["BatchNorm - ConvShort"] == pytest.approx([0.5 - 1.0, 0.5 - 2.0])
    assert measurement.values["ConvShort - IdShort"] == pytest.approx([1.5, 2.5, 3.5])
    assert measurement.values["rank of ConvShort"] == [1.0, 1.0]


def test_panels_show_training_curves_and_mark_what_diverged():
    measurement, _, _ = measured("robust/fig3", HOLDS_DEEP | dict.fromkeys(BROCK, None))
    learning, tested = measurement.panels
    assert [curve.name for curve in learning.curves] == [row for row in ROWS | BESIDE if "Brock" not in row]
    assert learning.curves[0].values == pytest.approx((46.0, 92.0))
    assert all(row in learning.note for row in ROWS if "Brock" in row)
    proposed, brock = tested.curves
    assert tested.names == ("IdShort", "LearnScalar", "ConvShort")
    assert proposed.values == pytest.approx((89.0, 90.0, 93.0))
    assert (proposed.crossed, brock.crossed) == ((), (0, 1, 2))
    assert [level.value for level in tested.levels] == pytest.approx([10.0, 92.0])
    assert len(measurement.tables[0].rows) == len(ROWS) + len(BESIDE)
    assert "diverged at step 7, diverged at step 7" in measurement.tables[0].rows[len(ROWS) - 1][-1]


# Real runs


@pytest.mark.parametrize(
    ("claim_id", "brock"), [("robust/fig3", "diverged"), ("robust/fig7", "diverged"), ("robust/fig6", "finished")]
)
def test_brock_stand_in_diverges_where_it_is_deep_only(claim_id, brock, tmp_path):
    row = next(row for row, method in ROWS.items() if method == "idshort_brock")
    config = FIGS[claim_id].config(row, "quick").with_changes(epochs=1)
    found = RunCache(tmp_path / "kept", tmp_path / "work")({"one": config})["one"]
    assert found is not None
    assert found.result["status"] == brock


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("claim_id", FIGS)
def test_quick_run_holds(claim_id: str, tmp_path: Path):
    claim = get(claim_id)
    settings = Settings(scale="quick", runs=RunCache(tmp_path / "kept", tmp_path / "work"))
    judgement = judge(claim, collect(claim, settings, claim.measure(settings), 1.0))
    tested = [row for row in judgement.rows if row.check in checks_at(claim, "quick")]
    assert all(row.measured is not None and admits(row.check, row.measured) for row in tested), tested
