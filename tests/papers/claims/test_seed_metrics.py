"""Rows that are trained: named by row and seed, numbers by seed, panels of what is there."""

import pytest

from made_up_runs import MadeUpRuns
from normfree.train import TrainConfig
from normfree_papers.claims import seed_metrics as rows
from normfree_papers.claims.claim import Settings
from normfree_papers.claims.seed_metrics import Trained

BASE = TrainConfig()
ROWS = {"one": BASE, "two": BASE.with_changes(lr=0.01)}
DIVERGED = Trained({"status": "diverged", "test": None}, [])


def finished(accuracy: float) -> Trained:
    return Trained({"status": "finished", "test": {"accuracy": accuracy}}, [{"train_accuracy": accuracy / 2}])


def test_rows_are_trained_with_every_seed_and_what_is_missing_is_left_out():
    runs = MadeUpRuns(lambda name, config: None if name == "two, seed 3" else finished(config.lr + config.seed / 10))
    found = Settings(seeds=(0, 3), runs=runs).train_rows(ROWS)  # type: ignore[arg-type]
    assert runs.asked == {f"{row}, seed {n}": ROWS[row].with_changes(seed=n) for row in ROWS for n in (0, 3)}
    assert {row: list(seeds) for row, seeds in found.items()} == {"one": [0, 3], "two": [0]}
    accuracies = found.numbers(rows.accuracy)
    assert accuracies["one"] == pytest.approx({0: 10.0, 3: 40.0})
    assert rows.minus(accuracies["one"], accuracies["two"]) == pytest.approx({0: 9.0})


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


def test_learning_is_the_mean_of_the_seeds_that_ended_an_epoch():
    long, short = ([{"train_accuracy": share} for share in shares] for shares in ((0.1, 0.2, 0.6), (0.3,)))
    runs = {0: Trained({"status": "finished"}, long), 1: Trained({"status": "diverged"}, short)}
    (panel,) = rows.Runs({"one": runs}).learning_panel("training")
    assert panel.curves[0].values == pytest.approx((20.0, 20.0, 60.0))
    assert panel.note == ""


def test_points_are_means_with_the_deviation_over_the_seeds_as_their_bars():
    (curve,) = rows.point_curve("here", [{0: 1.0, 1: 3.0}, {}, {0: 5.0}], crossed=(1, 2))
    assert (curve.x, curve.values) == ((1.0, 3.0), (2.0, 5.0))
    assert curve.spread == pytest.approx((2**0.5, 0.0))
    assert curve.crossed == (1,)  # the third column is the second point
    assert rows.bars_note([curve]) == "bars: standard deviation over the seeds"
    assert rows.bars_note(rows.point_curve("here", [{0: 1.0}])) == ""
    assert rows.point_curve("here", [{}, {}]) == []
    assert rows.point_curve("here", [{0: 1.0}, {}, {0: 2.0}], at=(10, 100, 1_000))[0].x == (10.0, 1_000.0)


def test_rows_show_what_is_printed_beside_what_was_measured():
    (panel,) = rows.Columns({"one": {0: 1.0, 1: 3.0}, "none": {}, "two": {}, "three": {0: 5.0}}).paper_panel(
        "error", {"one": 4.0, "two": 6.0}
    )
    assert panel.names == ("one", "two", "three")
    assert [(curve.name, curve.x, curve.values) for curve in panel.curves] == [
        ("paper", (1.0, 2.0), (4.0, 6.0)),
        ("measured here", (1.0, 3.0), (2.0, 5.0)),
    ]
    assert panel.curves[1].spread == pytest.approx((2**0.5, 0.0))
    assert rows.Columns({"one": {}}).paper_panel("error", {"one": 4.0}) == ()
    assert rows.Columns({"one": {0: 1.0}}).paper_panel("error", {}) == ()
