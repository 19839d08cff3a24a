"""The picture of a run: the right numbers in the right panel, whatever the records lack."""

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from normfree.train.run import run_page
from normfree.train.run.run_page import training_panels, write_curves

NAN, INF = math.nan, math.inf
RECORDS: list[dict[str, Any]] = [
    {"step": 5, "epoch": 0.5, "train_loss": 2.0, "lr": 0.1},
    {
        "step": 10, "epoch": 1.0, "train_loss": 1.0, "train_accuracy": 0.5, "validation_loss": 1.5,
        "validation_accuracy": 0.4, "lr": 0.1,
    },
    {"step": 15, "epoch": 1.5, "train_loss": 0.9, "lr": 0.01},
    {"step": 20, "epoch": 2.0, "train_loss": 0.8, "train_accuracy": 0.75, "validation_loss": 1.6,
     "validation_accuracy": 0.625, "lr": 0.01},
]  # fmt: skip


def test_panels_hold_each_number_at_its_epoch() -> None:
    loss, accuracy, rate = training_panels(RECORDS)
    assert [panel.title for panel in (loss, accuracy, rate)] == ["loss", "accuracy", "learning rate"]
    training, validation = loss.curves
    assert (training.name, training.x, training.values) == ("training", (0.5, 1.0, 1.5, 2.0), (2.0, 1.0, 0.9, 0.8))
    assert (validation.name, validation.x, validation.values) == ("validation", (1.0, 2.0), (1.5, 1.6))
    assert [curve.values for curve in accuracy.curves] == [(50.0, 75.0), (40.0, 62.5)]
    assert rate.curves[0].values == (0.1, 0.1, 0.01, 0.01)
    assert {panel.x for panel in (loss, accuracy, rate)} == {(0.5, 2.0)}  # one axis for all


def test_panels_say_the_best() -> None:
    loss, accuracy, _ = training_panels(RECORDS)
    assert loss.note == "lowest validation 1.5 at epoch 1"
    assert accuracy.note == "best validation 62.5 % at epoch 2"
    assert training_panels([{"epoch": 1, "train_loss": 2.0}])[0].note == "lowest training 2 at epoch 1"
    assert training_panels([{"epoch": 1, "train_loss": NAN}])[0].note == ""


def test_records_out_of_order_are_sorted() -> None:
    (loss,) = training_panels([{"epoch": e, "train_loss": float(e)} for e in (3, 1, 2)])
    assert loss.curves[0].x == loss.curves[0].values == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("losses", "log"),
    [((2.3, 1.0), False), ((2.3, 0.01), True), ((2.3, 1e12, INF), True), ((2.3, 0.0), False), ((-5.0, 100.0), False)],
)
def test_steep_loss_is_drawn_in_the_logarithm(losses: tuple[float, ...], log: bool, tmp_path: Path) -> None:
    records = [{"epoch": i, "train_loss": loss} for i, loss in enumerate(losses)]
    assert training_panels(records)[0].log_y is log
    write_curves(records, "", tmp_path / "curves.png")


def test_many_records_are_thinned_but_keep_the_end() -> None:
    records = [{"epoch": i / 100, "train_loss": INF if i == 777 else 1.0} for i in range(10_001)]
    (curve,) = training_panels(records)[0].curves
    assert 1000 < len(curve.x) <= 2100
    assert curve.x[-1] == 100.0
    assert INF in curve.values


@pytest.mark.parametrize(("name", "magic"), [("curves.png", b"\x89PNG"), ("curves.svg", b"<?xml")])
def test_picture_is_of_the_kind_its_suffix_names(name: str, magic: bytes, tmp_path: Path) -> None:
    write_curves(RECORDS, "a run", tmp_path / "new" / name)
    assert (tmp_path / "new" / name).read_bytes().startswith(magic)


def test_picture_holds_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [*RECORDS, {"epoch": 2.5, "train_loss": INF}, {"epoch": 3.0, "train_loss": NAN}]
    write_curves(records, "resnet20 $fixup$", tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    ElementTree.fromstring(text)
    for word in (
        "resnet20 $fixup$",
        "training",
        "validation",
        "learning rate",
        "best validation 62.5 %",
        "infinite at 2.5",
    ):
        assert f"<!-- {word}" in text or word in text, word


def test_learning_rate_is_the_small_panel() -> None:
    from normfree.report.plots import _figure

    figure = _figure(training_panels(RECORDS), "", 3, (1.0, 1.0, run_page._SMALL))
    figure.draw_without_rendering()
    widths = [axes.get_position().width for axes in figure.axes]
    assert widths[2] < 0.75 * widths[0]
    assert widths[0] == pytest.approx(widths[1], rel=0.1)
    assert len({axes.get_xlim() for axes in figure.axes}) == 1


@pytest.mark.parametrize(
    "records",
    [[], [{}], [{"train_loss": 1.0}], [{"epoch": NAN, "train_loss": 1.0}], [{"epoch": 1, "train_loss": "high"}]],
)
def test_nothing_is_drawn_without_numbers(records: list[dict[str, Any]], tmp_path: Path) -> None:
    assert write_curves(records, "", tmp_path / "curves.png") is None
    assert not list(tmp_path.iterdir())


def test_other_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a file ending in .png or .svg, got 'curves.pdf'"):
        write_curves(RECORDS, "", tmp_path / "curves.pdf")
