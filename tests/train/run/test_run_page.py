"""The page of a run and the page over many: verdicts in words, the right curves, links that lead to the runs."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normfree.report.page import page_data, render_page, write_page
from normfree.report.tables import narrowed
from normfree.train.run.run_list import RunList, WatchedRun
from normfree.train.run.run_page import EXPENDABLE, drawn_runs, judge_run, run_names, run_page, runs_page, runs_table
from watched_folders import records, write_run

RUNNING = WatchedRun(
    folder=Path("runs/a"), state="running", model="resnet8", method="fixup", data="fashion14", epochs=4, epoch=2.5,
    loss=0.7, accuracy=0.71, validation=(1.2, 0.4), throughput=800.0, classes=10, seconds=5.0, left=60.0, updated=100.0,
)  # fmt: skip
GUESS = math.log(10)
SIGNAL: dict[str, Any] = {
    "step": 0, "epoch": 0, "status": "preserved", "sentence": "the signal is preserved", "forward": [1.0, 1.1, 1.2],
    "backward": [1.0, 0.9, 0.8], "forward_in_all": 1.2, "backward_in_all": 0.8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rating", "headline"),
    [
        ({}, "good", "learning"),
        ({"validation": (GUESS, 0.1)}, "warn", "not learning so far"),
        ({"validation": (GUESS, 0.1), "epoch": 0.5}, "info", "too early to tell"),
        ({"validation": (GUESS, 0.5)}, "good", "learning"),  # many are right, and a few are very wrong
        ({"validation": (GUESS, 0.5), "unit": "tokens"}, "warn", "not learning so far"),
        ({"validation": None, "loss": GUESS, "accuracy": 0.1}, "warn", "not learning so far"),
        ({"classes": 0, "validation": (99.0, 0.0)}, "good", "learning"),  # a guess is not known
        ({"state": "starting", "epoch": None, "loss": None}, "info", "starting"),
        ({"state": "running", "loss": None}, "info", "running"),
        ({"state": "finished"}, "good", "finished"),
        ({"state": "finished", "test": (GUESS, 0.1)}, "warn", "finished at chance"),
        ({"state": "diverged", "loss": math.nan}, "bad", "diverged"),
        ({"state": "stopped"}, "warn", "stopped"),
        ({"state": "damaged", "note": "why"}, "bad", "damaged"),
    ],
)
def test_verdict_is_in_words(changes: dict[str, Any], rating: str, headline: str) -> None:
    assert judge_run(replace(RUNNING, **changes))[:2] == (rating, headline)


def test_verdict_names_the_guess_beside_the_loss() -> None:
    assert judge_run(RUNNING)[2] == "The validation loss is 1.2; a guess among 10 classes has 2.303."
    assert "tokens" in judge_run(replace(RUNNING, unit="tokens", classes=8000))[2]


def test_page_of_a_running_run_loads_itself_again_and_shows_the_epoch_so_far() -> None:
    page = run_page(RUNNING, "a", records(2), [SIGNAL])
    assert page.refresh > 0
    loss, accuracy, _ = page.panels
    assert [curve.name for curve in loss.curves] == ["training", "validation"]
    assert (loss.curves[0].x, loss.curves[0].values) == ((1.0, 2.0, 2.5), (2.0, 1.0, 0.7))
    assert loss.curves[1].x == (1.0, 2.0)
    assert accuracy.curves[0].values[-1] == pytest.approx(71.0)
    cards = {card.name: card for card in page.cards}
    assert cards["verdict"].headline == "running: learning"
    assert cards["progress"].headline == "epoch 2.5 of 4"
    assert cards["progress"].text == "about 1 min 0 s left, 5 s so far, 800 images/s"
    assert cards["validation"].headline == "40.00 %"
    assert cards["signal"].headline == "preserved at the start"


def test_page_of_a_finished_run_does_not_load_itself_again() -> None:
    page = run_page(replace(RUNNING, state="finished", epoch=2.0, left=None), "a", records(2))
    assert page.refresh == 0
    assert page.panels[0].curves[0].x == (1.0, 2.0)
    text = render_page(page)
    assert 'http-equiv="refresh"' not in text
    assert 'http-equiv="refresh"' in render_page(replace(page, refresh=5))


def test_page_before_the_first_step_has_no_curves_and_says_so() -> None:
    page = run_page(replace(RUNNING, state="starting", epoch=None, loss=None, accuracy=None, validation=None), "a", [])
    assert not page.panels
    assert page.notes == ("The curves begin when training does.",)
    render_page(page)


def test_page_of_a_diverged_run_can_be_drawn() -> None:
    bad = [{**records(1)[0], "train_loss": math.nan, "validation_loss": math.inf}]
    run = replace(RUNNING, state="diverged", loss=math.nan, accuracy=0.1, validation=(math.inf, 0.1), left=None)
    text = render_page(run_page(run, "a", bad))
    assert "diverged" in text
    assert "loss nan" in text


def test_page_of_a_text_run_has_perplexity_and_bleu() -> None:
    run = replace(RUNNING, state="finished", unit="tokens", test=(1.0, 0.6), bleu=31.456)
    cards = {card.name: card for card in run_page(run, "a", records(1)).cards}
    assert cards["test"].text == "loss 1, perplexity 2.72, BLEU 31.46"
    assert cards["validation"].text == "loss 1.2, perplexity 3.32"
    assert "perplexity" not in cards["training"].text


def test_signal_is_drawn_at_a_few_moments_the_first_and_the_last_among_them() -> None:
    signals = [{**SIGNAL, "step": 10 * e, "epoch": e, "forward": [1.0, 1.0 + e]} for e in (0, 1, 2, 4, 8, 16, 32, 64)]
    signals.append({**signals[2], "forward": [5.0, 5.0]})  # measured again by a resumed run
    (section,) = run_page(RUNNING, "a", [], signals).sections
    forward, backward = section.panels
    names = [curve.name for curve in forward.curves]
    assert (names[0], names[-1], len(names)) == ("at the start", "epoch 64", 5)
    assert [curve.name for curve in backward.curves] == names
    assert next(curve for curve in forward.curves if curve.name == "epoch 2").values == (5.0, 5.0)
    card = next(card for card in run_page(RUNNING, "a", [], signals).cards if card.name == "signal")
    assert card.text.startswith("After epoch ")


def test_markup_in_names_is_text() -> None:
    evil = "<script>alert(1)</script>"
    text = render_page(run_page(replace(RUNNING, model=evil, method=evil, data=evil), evil, records(1)))
    assert evil not in text


# Many runs


def test_table_has_one_row_per_run_and_leaves_out_empty_columns() -> None:
    damaged = WatchedRun(folder=Path("b"), state="damaged", note="why", updated=90.0)
    table = runs_table([RUNNING, damaged], ["a", "b"], now=160.0)
    names = [column.name for column in table.columns]
    assert names == ["run", "state", "epoch", "loss", "training", "validation", "speed", "left", "updated"]
    assert table.rows[0] == ("a", "running", "2.5/4", "0.7", "71.0 %", "40.0 %", "800/s", "1 min 0 s", "1 min ago")
    assert table.rows[1][:3] == ("b", "✗ damaged", "")


def test_table_shows_bleu_and_perplexity_of_text() -> None:
    run = replace(RUNNING, state="finished", unit="tokens", bleu=31.456, test=(1.0, 0.6))
    row = dict(zip(("run", "state"), runs_table([run], ["a"]).rows[0], strict=False))
    assert row["state"] == "✓ finished"
    assert "40.0 %, ppl 3.32" in runs_table([run], ["a"]).rows[0]
    assert "BLEU 31.5" in runs_table([run], ["a"]).rows[0]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_narrow_terminal_leaves_out_columns_and_shortens_names(width: int) -> None:
    names = ["a/rather/long/name/of/a/run-seed0-2e83829dbe3d", "b"]
    table = narrowed(runs_table([RUNNING, RUNNING], names, now=100.0), width, EXPENDABLE)
    lines = [[column.name for column in table.columns], *table.rows]
    lengths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    assert sum(lengths) + 2 * (len(lengths) - 1) <= width
    assert [column.name for column in table.columns][:2] == ["run", "state"]
    assert ("validation" in [column.name for column in table.columns]) == (width >= 40)
    assert table.rows[0][0].endswith("3d")


def test_names_leave_out_what_all_runs_have_in_common() -> None:
    assert run_names([]) == []
    assert run_names([Path("/x/runs/a"), Path("/x/runs/b/c")]) == ["a", "b/c"]
    assert run_names([Path("/x/one"), Path("/y/two")]) == ["x/one", "y/two"]


def test_page_over_many_runs_links_to_their_own_pages(tmp_path: Path) -> None:
    for name in ("a", "b:c d%", "no page"):
        write_run(tmp_path / "runs" / name, records(3), result={"status": "finished"})
        if name != "no page":
            (tmp_path / "runs" / name / "page.html").write_text("x")
    found = RunList([tmp_path / "runs"]).read()
    names = run_names([run.folder for run in found])
    page = runs_page(found, names, {run.folder: records(3) for run in found}, tmp_path)
    (table,) = page.summary
    links = {row[0]: [link.href for link in row_links] for row, row_links in zip(table.rows, table.links, strict=True)}
    assert links == {"a": ["runs/a/page.html"], "b:c d%": ["runs/b%3Ac%20d%25/page.html"], "no page": []}
    titles = [panel.title for panel in page.panels]
    assert titles == ["validation accuracy", "validation loss", "training accuracy", "training loss"]
    assert {curve.name for curve in page.panels[0].curves} == set(names)
    assert page.refresh == 0
    assert page_data(page)["summary"][0]["columns"][0] == "run"
    assert 'href="runs/b%3Ac%20d%25/page.html"' in render_page(page)


def test_page_over_runs_without_validation_has_training_curves_only() -> None:
    plain = [{k: v for k, v in record.items() if not k.startswith("validation")} for record in records(2)]
    page = runs_page([RUNNING], ["a"], {RUNNING.folder: plain}, Path())
    assert [panel.title for panel in page.panels] == ["training accuracy", "training loss"]
    assert page.refresh > 0
    render_page(page)


def test_page_over_no_run_and_over_a_thousand_can_be_made() -> None:
    assert render_page(runs_page([], [], {}, Path()))
    many = [replace(RUNNING, folder=Path(f"runs/{i}")) for i in range(1000)]
    drawn = drawn_runs(many)
    assert len(drawn) == 32
    page = runs_page(many, [str(i) for i in range(1000)], {run.folder: records(3) for run in drawn}, Path())
    assert len(page.summary[0].rows) == 1000
    assert len(page.panels[0].curves) == 32
    assert "curves are those of 32 runs" in page.notes[0]


def test_names_that_are_not_text_are_one_line_and_link_to_their_pages(tmp_path: Path) -> None:
    for name in (b"bad\xff", b"two\nlines"):
        folder = write_run(tmp_path / os.fsdecode(name), records(1), result={"status": "finished"})
        (folder / "page.html").write_text("x")
    found = sorted(RunList([tmp_path]).read(), key=lambda run: run.folder)
    names = run_names([run.folder for run in found])
    assert sorted(names) == ["bad\ufffd", "two lines"]
    page = runs_page(found, names, {run.folder: records(1) for run in found}, tmp_path)
    hrefs = sorted(link.href for links in page.summary[0].links for link in links)
    assert hrefs == ["bad%FF/page.html", "two%0Alines/page.html"]
    write_page(page, tmp_path / "all.html")
    assert "bad%FF/page.html" in (tmp_path / "all.html").read_text()
