"""Rows that are trained: named by row and seed, numbers by seed, panels of what is there."""

import math

import pytest

from made_up_runs import MadeUpRuns
from normfree.train import TrainConfig
from normfree_papers.claims import seed_metrics as rows
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.seed_metrics import EndedRun

BASE = TrainConfig()
ROWS = {"one": BASE, "two": BASE.with_changes(lr=0.01)}
DIVERGED = EndedRun({"status": "diverged", "test": None}, [])


def finished(accuracy: float) -> EndedRun:
    return EndedRun({"status": "finished", "test": {"accuracy": accuracy}}, [{"train_accuracy": accuracy / 2}])


def test_rows_are_trained_with_every_seed_and_what_is_missing_is_left_out():
    runs = MadeUpRuns(lambda name, config: None if name == "two, seed 3" else finished(config.lr + config.seed / 10))
    found = Settings(seeds=(0, 3), runs=runs).train_rows(ROWS)  # type: ignore[arg-type]
    assert runs.asked == {f"{row}, seed {n}": ROWS[row].with_changes(seed=n) for row in ROWS for n in (0, 3)}
    assert {row: list(seeds) for row, seeds in found.items()} == {"one": [0, 3], "two": [0]}
    accuracies = found.numbers(rows.accuracy)
    assert accuracies["one"] == pytest.approx({0: 10.0, 3: 40.0})
    assert accuracies["one"] - accuracies["two"] == pytest.approx({0: 9.0})


def test_diverged_run_counts_as_chance_unless_told_otherwise():
    assert (rows.accuracy(DIVERGED), rows.error(DIVERGED), rows.training_accuracy(DIVERGED)) == (10.0, 90.0, 10.0)
    assert (rows.accuracy(DIVERGED, 0.0), rows.training_accuracy(DIVERGED, 0.0)) == (0.0, 0.0)
    assert (rows.accuracy(finished(0.5)), rows.error(finished(0.5)), rows.training_accuracy(finished(0.5))) == (
        50.0,
        50.0,
        25.0,
    )


def test_learning_names_what_diverged_before_its_first_epoch():
    (panel,) = rows.Runs({"one": {0: DIVERGED, 1: finished(0.5)}, "two": {0: DIVERGED}}).learning_panel("training")
    assert [(curve.name, curve.values) for curve in panel.curves] == [("one", (25.0,))]
    assert panel.note == "diverged in the first epoch: one (1 of 2 seeds), two"
    assert rows.Runs({"one": {0: DIVERGED}, "two": {}}).learning_panel("training") == ()


def test_learning_is_the_median_of_the_seeds_that_ended_an_epoch_beside_each_of_them():
    shares = {0: (0.1, 0.2, 0.6), 1: (0.3,), 2: (0.9, 0.4)}
    seeds = {seed: [{"train_accuracy": share} for share in of] for seed, of in shares.items()}
    runs = {seed: EndedRun({"status": "finished"}, metrics) for seed, metrics in seeds.items()}
    (panel,) = rows.Runs({"one": runs}).learning_panel("training")
    assert panel.curves[0].values == pytest.approx((30.0, 30.0, 60.0))
    singles = [10.0, 20.0, 60.0, 30.0, math.nan, math.nan, 90.0, 40.0, math.nan]
    assert [v for single in panel.curves[0].singles for v in single] == pytest.approx(singles, nan_ok=True)
    assert panel.note == "pale: single seeds; strong: their median"
    (alone,) = rows.Runs({"one": {0: runs[0]}}).learning_panel("training")
    assert (alone.curves[0].singles, alone.note) == ((), "")


def test_points_are_medians_beside_the_single_seeds():
    (curve,) = rows.point_curve("here", [{0: 7.0, 1: 7.5, 2: 90.0}, {}, {0: 5.0}], crossed=(1, 2))
    assert (curve.x, curve.values) == ((1.0, 3.0), (7.5, 5.0))  # the mean of 34.8 is where no seed is
    singles = [7.0, 5.0, 7.5, math.nan, 90.0, math.nan]
    assert [v for single in curve.singles for v in single] == pytest.approx(singles, nan_ok=True)
    assert curve.crossed == (1,)  # the third column is the second point
    assert rows.seeds_note([curve]) == "pale: single seeds; strong: their median"
    assert rows.seeds_note(rows.point_curve("here", [{0: 1.0}])) == ""
    assert rows.point_curve("here", [{}, {}]) == []
    assert rows.point_curve("here", [{0: 1.0}, {}, {0: 2.0}], at=(10, 100, 1_000))[0].x == (10.0, 1_000.0)


def test_rows_show_what_is_printed_beside_what_was_measured():
    (panel,) = rows.NumbersByRow({"one": {0: 1.0, 1: 3.0}, "none": {}, "two": {}, "three": {0: 5.0}}).paper_panel(
        "error", {"one": 4.0, "two": 6.0}
    )
    assert panel.names == ("one", "two", "three")
    assert [(curve.name, curve.x, curve.values) for curve in panel.curves] == [
        ("paper", (1.0, 2.0), (4.0, 6.0)),
        ("measured here", (1.0, 3.0), (2.0, 5.0)),
    ]
    assert panel.curves[1].singles[0] == (1.0, 5.0)
    assert rows.NumbersByRow({"one": {}}).paper_panel("error", {"one": 4.0}) == ()
    assert rows.NumbersByRow({"one": {0: 1.0}}).paper_panel("error", {}) == ()
