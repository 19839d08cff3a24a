"""The table and the page over many runs: the right columns and curves, links that lead to the runs."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from normfree.report.page import page_data, render_page, write_page
from normfree.report.tables import narrowed
from normfree.train.run.run_list import EXPENDABLE, RunList, drawn_runs, run_names, runs_page, runs_table
from normfree.train.run.run_page import WatchedRun
from watched_folders import RUNNING, records, write_run


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
