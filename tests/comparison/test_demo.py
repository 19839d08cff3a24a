"""The demo in small: the same path in seconds."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normfree.comparison import compare_runs as runs
from normfree.comparison import demo as room
from normfree.comparison.demo import Demo, DemoSettings, run_demo
from normfree.comparison.demo_page import page, picture, save
from normfree.train.engine import loop as engine

TINY = DemoSettings(
    signal_model="wrn-40-1",
    models=("resmlp-1-8", "resmlp-49-8"),
    epochs=1,
    rates={"fixup": 0.1, "batchnorm": 0.1, "sqrt_half": 0.01, "he_in": 0.01},
    seeds=(0, 1),
    batch_model="resmlp-1-8",
    batch_sizes=(64, 128),
    batch_rates=(0.1,),
    batch_held_out=0.9,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder: Path) -> Demo:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "write_curves", lambda *_: None)
        found = run_demo(folder, TINY)
    assert found is not None
    return found


def test_demo_is_read_the_second_time(demo: Demo, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("expected nothing to be computed again")

    monkeypatch.setattr(runs, "fit", refuse)
    monkeypatch.setattr(room, "measure_signal", refuse)
    told: list[tuple[int, int]] = []
    assert run_demo(folder, TINY, progress=lambda done, total, _: told.append((done, total))) == demo
    assert told[0] == (0, 100)
    assert told[-1] == (100, 100)  # hundredths


def test_progress_counts_what_a_run_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number the 3 deepest of 52 would be 6 % of the work, and the time left more than what it is."""
    told: list[int] = []
    texts: list[str] = []

    def update(done: int, total: int, text: str) -> None:
        told.append(done)
        texts.append(text)

    calls: list[str] = []

    def stopped(*_: object, methods: list[str], progress: Callable[[int, int, str], None], **__: object) -> Any:
        for done in (0, 3, 9):
            progress(done, 9, "about 1 min 2 s left, a run")
        calls.extend(methods)
        return SimpleNamespace(signal=1 if len(calls) == 4 else None)

    monkeypatch.setattr(room, "compare", stopped)
    monkeypatch.setattr(room, "measure_signal", lambda _: ([1.0], [1.0]))
    assert run_demo(tmp_path, progress=update) == 1
    assert texts[1:] == ["a run"] * 12  # one estimate of the time left: that of the demo
    assert calls == ["fixup", "batchnorm", "sqrt_half", "he_in"]
    start, signals, deepest, fixup, _, _, batchnorm, _, _, _, _, _, depths = told
    assert (start, signals) == (0, pytest.approx(6, abs=4))  # of 201 s of one core: about 11
    assert deepest - signals == pytest.approx(12, abs=6)  # the shares of the time of all runs, under load
    assert fixup - signals == pytest.approx(14, abs=6)
    assert batchnorm - signals == pytest.approx(38, abs=8)
    assert depths - signals == pytest.approx(60, abs=8)


def test_demo_page_says_what_was_measured(demo: Demo) -> None:
    shown = page(demo)
    assert [len(section.panels) for section in shown.sections] == [2, 1, 1]
    assert "100 layers" in shown.title
    networks = [demo.settings.signal_model] * 2 + ["resmlp-N-8", demo.settings.batch_model]
    assert all(name in panel.title for name, panel in zip(networks, shown.all_panels, strict=True))
    cards = {card.name: card for card in shown.cards}
    assert list(cards) == ["fixup", "batchnorm", "sqrt_half", "he_in"]
    last = next(p for p in demo.depth.points if (p.method, p.depth) == ("fixup", 100))
    assert f"fixup {100 * last.test:.1f} %" in shown.sections[1].text[1]
    assert "he_in diverges" in shown.sections[1].text[1]
    depths = [
        shown.sections[1].text[1].index(f"At {depth} layers:") for depth in sorted({p.depth for p in demo.depth.points})
    ]
    assert depths == sorted(depths)
    two = {p.method: p.test for p in demo.batches[64].points}
    assert f"batchnorm reaches {100 * two['batchnorm']:.1f} %" in shown.sections[2].text[0]


def test_cards_compare_the_deepest_network_with_shallower_ones(demo: Demo) -> None:
    tests = {("he_in", 4): 0.9, ("fixup", 4): 0.9, ("fixup", 100): 0.95, ("sqrt_half", 4): 0.9, ("sqrt_half", 100): 0.5}
    tests |= {("batchnorm", 4): 0.2, ("batchnorm", 100): 0.2}
    runs = tuple(
        run
        if (run.method, run.depth) == ("he_in", 100)
        else replace(run, status="finished", test=found, validation=found)
        for run in demo.depth.runs
        for found in (tests.get((run.method, run.depth)),)
    )
    cards = page(replace(demo, depth=replace(demo.depth, runs=runs))).cards
    assert {card.name: (card.status, card.headline) for card in cards} == {
        "fixup": ("good", "95.0 % at 100 layers"),
        "batchnorm": ("bad", "trains at no depth"),
        "sqrt_half": ("warn", "50.0 % at 100 layers"),
        "he_in": ("bad", "diverges at 100 layers"),
    }


def test_demo_signal_explodes_without_a_method(demo: Demo) -> None:
    assert demo.forward["he_in"][-1] > 1e3
    assert all(0.01 < value < 10 for value in demo.forward["fixup"])
    assert all(map(math.isfinite, demo.backward["batchnorm"]))


def test_demo_writes_one_page_and_its_picture(demo: Demo, tmp_path: Path) -> None:
    written, picture = save(demo, tmp_path / "new")
    assert written.read_text().startswith("<!doctype html>")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert {path.name for path in written.parent.iterdir()} == {"index.html", "demo.png"}


def test_picture_explains_its_crosses_and_the_methods_it_leaves_out(demo: Demo) -> None:
    signal, depth, batches = picture(demo)
    assert signal.curves[0].name == "fixup (no normalization, Fixup)"
    assert "× diverged" in depth.note  # he_in at 100 layers
    assert "×" not in batches.note
    assert "Only batchnorm and fixup were run here" in batches.note
    assert [level.name for level in batches.levels] == ["chance, 10.0 %"]  # linear learned from ten times the images
    assert len(depth.levels) == 2


def test_demo_draws_no_gradient_behind_numbers_that_are_not_finite(demo: Demo) -> None:
    ended = [1.0, math.inf, math.nan]
    forward, backward = {**demo.forward, "he_in": ended}, {**demo.backward, "he_in": [math.nan] * 3}
    section = page(replace(demo, forward=forward, backward=backward)).sections[0]
    assert "he_in leaves the range of float32 at block 2" in section.text[1]
    assert [panel.note for panel in section.panels] == [
        "",
        "Not measured, because the forward signal does not stay finite: he_in.",
    ]
    assert [curve.name for curve in section.panels[1].curves] == ["fixup", "batchnorm", "sqrt_half"]
    assert page(demo).sections[0].panels[1].note == ""
