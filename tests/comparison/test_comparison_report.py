"""Points of a comparison, and its tables, plots, pages and files."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from normfree.comparison.comparison_report import page, panel, panel_over_rates, redraw, save, table
from normfree.comparison.comparison_result import ComparedRun, Comparison


def run(method: str, depth: int, lr: float, validation: float, test: float | None, seed: int = 0) -> ComparedRun:
    return ComparedRun(
        method=method,
        model=f"resmlp-{depth}-8",
        depth=depth,
        lr=lr,
        seed=seed,
        status="diverged" if test is None else "finished",
        validation=validation,
        test=test,
        seconds=1.0,
        folder=f"{method}-{depth}-{lr}-{seed}",
    )


def made(*runs: ComparedRun, lrs: tuple[float, ...] = (0.1, 0.01), seeds: tuple[int, ...] = (0,)) -> Comparison:
    return Comparison(
        runs=runs,
        settings={"data": "fashion14", "epochs": 1, "batch_size": 64},
        methods=tuple(dict.fromkeys(run.method for run in runs)),
        lrs=lrs,
        seeds=seeds,
        chance=0.1,
        linear_accuracy=0.8,
    )


@pytest.mark.parametrize(
    ("tests", "drawn"),
    [
        ((0.69, 0.78), ["linear"]),  # chance would take six times the room of the curves
        ((0.30, 0.78), ["linear", "chance"]),
        ((0.775, 0.78), ["linear", "chance"]),  # a small difference shall look like one
    ],
)
def test_line_far_below_the_curves_is_said_and_not_drawn(tests: tuple[float, float], drawn: list[str]) -> None:
    found = made(
        *(run(method, 10, lr, 0.5, test) for method, test in zip("ab", tests, strict=True) for lr in (0.1, 0.01))
    )
    for shown in (panel(found), panel_over_rates(found)):
        assert [level.name.split()[0].strip(",") for level in shown.levels] == drawn
        assert ("The axis begins above chance, 10.0 %." in shown.note) == ("chance" not in drawn)


@pytest.mark.parametrize("lrs", [(0.1,), (0.1, 0.01)])
def test_comparison_on_text_speaks_of_tokens(lrs: tuple[float, ...]) -> None:
    settings = {"data": "pairs:.data/multi30k-8000", "epochs": 6, "batch_size": 4000}
    found = dataclasses.replace(made(run("fixup", 10, 0.1, 0.5, 0.5), lrs=lrs), settings=settings, chance=1 / 8000)
    assert table(found).title == "Test accuracy on multi30k-8000 after 6 epochs, batches of 4,000 tokens"
    book = dataclasses.replace(found, settings={**found.settings, "data": "text:.data/book-8000", "batch_size": 32})
    assert table(book).title == "Test accuracy on book-8000 after 6 epochs, batches of 32 blocks"
    (shown,) = page(dataclasses.replace(found, linear_accuracy=None), "title").panels
    assert shown.y_label == "target tokens predicted in the test, %"


def test_learning_rate_is_chosen_by_validation() -> None:
    found = made(run("fixup", 4, 0.1, 0.7, 0.2), run("fixup", 4, 0.01, 0.6, 0.9))
    assert [(p.lr, p.test) for p in found.points] == [(0.1, 0.2)]


def test_validation_of_a_diverged_run_does_not_count() -> None:
    found = made(run("fixup", 4, 0.1, 0.9, None), run("fixup", 4, 0.01, 0.3, 0.3))
    assert [p.lr for p in found.points] == [0.01]
    both = made(run("fixup", 4, 0.1, 0.9, None), run("fixup", 4, 0.01, 0.9, None))
    assert [(p.lr, p.test, p.diverged) for p in both.points] == [(0.01, 0.1, 1)]


def test_panel_shows_single_seeds_levels_and_one_curve_a_shape() -> None:
    runs = [run("fixup", d, 0.1, 0.5, 0.5 + 0.2 * seed, seed) for d in (4, 40) for seed in (0, 1)]
    drawn = panel(made(*runs, lrs=(0.1,), seeds=(0, 1)))
    assert drawn.log_x
    assert [level.value for level in drawn.levels] == [80.0, 10.0]
    (curve,) = drawn.curves
    assert curve.x == (4.0, 40.0)
    assert curve.values == pytest.approx((60.0, 60.0))
    assert sorted(curve.singles) == [pytest.approx((50.0, 50.0)), pytest.approx((70.0, 70.0))]


def test_save_writes_every_kind(tmp_path: Path) -> None:
    found = made(run("fixup", 4, 0.1, 0.5, 0.5), run("he_in", 4, 0.1, 0.5, None), lrs=(0.1,))
    paths = save(found, tmp_path / "new")
    assert [path.read_bytes()[:4] for path in paths] == [b'{\n "', b"<!do", b"\x89PNG", b"<?xm"]
    assert [path.name for path in paths] == [f"comparison.{kind}" for kind in ("json", "html", "png", "svg")]
    assert json.loads(paths[0].read_text())["points"][1]["diverged"] == 1
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)
    assert [card.status for card in page(found, "").cards] == ["good", "bad"]


def test_stored_comparison_is_drawn_again(tmp_path: Path) -> None:
    found = made(run("a", 4, 0.1, 0.5, 0.5), run("a", 8, 0.1, 0.5, 0.5))
    data, page, picture, drawing = save(found, tmp_path, command="normfree compare")
    before = {path: path.read_bytes() for path in (data, page, picture)}
    page.write_text("old")
    picture.unlink()
    drawing.unlink()
    assert redraw(data) == (page, picture)
    assert {path: path.read_bytes() for path in before} == before
    assert not drawing.exists()


@pytest.mark.parametrize("text", [None, "{}", "[1]", "no JSON"])
def test_what_is_no_comparison_is_not_drawn(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "comparison.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"expected a comparison in .* found none"):
        redraw(path)


def test_bleu_has_a_column_where_runs_translate() -> None:
    runs = [run("a", 2, 0.1, 0.5, 0.5, seed) for seed in (0, 1)] + [run("b", 2, 0.1, 0.5, None)]
    told = table(made(*(dataclasses.replace(r, bleu=b) for r, b in zip(runs, (20.0, 25.0, None), strict=True))))
    place = [column.name for column in told.columns].index("BLEU")
    assert [row[place] for row in told.rows] == ["22.5", ""]
    assert "BLEU" not in [column.name for column in table(made(*runs)).columns]


def test_single_model_is_drawn_over_the_learning_rate(tmp_path: Path) -> None:
    """Over depth it would be dots above each other."""
    runs = [
        run(m, 3, lr, 0.5, t) for m, lr, t in [("a", 0.1, 0.6), ("a", 0.01, 0.7), ("b", 0.1, None), ("b", 0.01, 0.4)]
    ]
    comparison = made(*runs)
    drawn = panel_over_rates(comparison)
    assert {c.name: (c.x, c.values, c.crossed) for c in drawn.curves} == {
        "a": ((0.01, 0.1), pytest.approx((70.0, 60.0)), ()),
        "b": ((0.01, 0.1), pytest.approx((40.0, 100 * comparison.chance)), (1,)),
    }
    assert "best" not in drawn.note
    page = save(comparison, tmp_path)[1].read_text()
    assert "against the learning rate" in page
    deeper = save(made(*runs, run("a", 5, 0.1, 0.5, 0.5)), tmp_path)[1].read_text()
    assert "against the learning rate" not in deeper


def test_run_without_a_test_split_is_blank_and_not_diverged(tmp_path: Path) -> None:
    finished = dataclasses.replace(run("fixup", 4, 0.1, 0.5, 0.5), test=None)
    wild = run("he_in", 4, 0.1, 0.5, None)
    assert str(finished) == "fixup, resmlp-4-8, lr 0.1: not tested"
    found = made(finished, wild, lrs=(0.1,))
    assert [(p.test, p.spread, p.diverged) for p in found.points] == [(None, None, 0), (0.1, None, 1)]
    assert [row[5] for row in table(found).rows] == ["", "10.0 %"]
    assert math.isnan(panel(found).curves[0].values[0])
    assert [card.name for card in page(found, "").cards] == ["he_in"]
    half = made(finished, dataclasses.replace(wild, method="fixup", seed=1), lrs=(0.1,), seeds=(0, 1))
    assert [(p.test, p.diverged) for p in half.points] == [(None, 1)]  # not the chance of the other seed alone
    assert all(path.exists() for path in save(made(finished, lrs=(0.1,)), tmp_path))
