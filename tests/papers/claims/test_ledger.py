"""The ledger: what it shows is what the results hold, and every number leads to where it comes from."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from chromium import Open
from normfree.cli import main
from normfree.report.page import render_page
from normfree.storage.writing import write_json
from normfree_papers.claims import claim_status
from normfree_papers.claims.claim import Check, Claim, Cost, expect
from normfree_papers.claims.claim_status import (
    CHECK_COLUMNS,
    Entry,
    cells,
    entries,
    mean_text,
    origin_of,
    range_text,
    run_cells,
)
from normfree_papers.claims.judgement import Row, judge
from normfree_papers.claims.ledger import code, escape, markdown, page, write_ledger
from normfree_papers.claims.registry import PAPERS, all_claims
from normfree_papers.claims.reproduction import result_path
from normfree_papers.claims.run_cache import Freshness

ROOT = Path(__file__).parents[3]
EVIL = "a <b>|*x* _y_ [z](w) `c` $d$ ~~e~~ &amp; \\| <script>alert(1)</script>"
FOLDER = "resmlp-2-8-fixup-lr0.1-seed0-0123456789ab"
RENDER = MarkdownIt("gfm-like", {"html": True, "linkify": False})


class Reader(HTMLParser):
    """The links, anchors, tags and text of rendered Markdown, and its tables as lists of rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.tags: set[str] = set()
        self.text = ""
        self.tables: list[list[list[str]]] = []
        self._in_cell = False
        self.feed(RENDER.render(text))
        self.words = [table for table in self.tables if table[0] == ["word", "meaning"]]
        self.tables = [table for table in self.tables if table not in self.words]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.add(tag)
        self.links += [link for link in (given.get("href"), given.get("src")) if link]
        self.anchors |= {given["id"]} if given.get("id") else set()  # type: ignore[arg-type]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def made_up(name: str = "fake", **fields: Any) -> Claim:
    claim = Claim(
        id=f"fixup/{name}",
        where="Figure 9",
        statement="One is one.",
        paper_value="1",
        how="By looking.",
        cost=Cost(quick_seconds=1, full_seconds=7200, device="gpu"),
        checks=(
            Check(name="one", statement="one is about 1", paper=1.0, low=0.8, high=1.2, why="it is 1", source="paper"),
            Check(name="two", statement="two is above 1", paper="more", low=1.0, why="it is two"),
        ),
        measure=lambda settings: None,  # type: ignore[arg-type,return-value]
        seeds=2,
    )
    return replace(claim, **fields)


def store(out: Path, claim: Claim, scale: str = "full", **fields: Any) -> None:
    panel = {"title": "numbers", "curves": [{"name": "one", "values": [1.0, 2.0]}], "log_y": False}
    result = {
        "claim": claim.id,
        "version": claim.version,
        "command": f"normfree reproduce {claim.id}",
        "commit": "0123456789abcdef0123456789abcdef01234567+dirty",
        "date": "2026-01-02T03:04:05+00:00",
        "scale": scale,
        "seeds": [0, 1],
        "versions": {"python": "3.12.1", "torch": "2.13.0"},
        "hardware": {"cpu": "a processor", "cores": 2, "gpu": "a GPU"},
        "seconds": 5400.0,
        "values": {"one": {"values": [1.0, 1.01, 1.02]}, "two": {"values": [2.5, 2.5]}},
        "panels": [panel],
        "tables": [{"title": "All", "columns": ["a", "b"], "rows": [["1", "2"]]}],
        "notes": ["a note"],
        **fields,
    }
    write_json(result_path(out, claim, scale), result)  # type: ignore[arg-type]


def keep_run(out: Path, **fields: Any) -> None:
    folder = out / "runs" / FOLDER
    folder.mkdir(parents=True)
    hardware = {"gpu": "NVIDIA H200", "cpu": "a processor", "cores": 16}
    result = {"status": "finished", "test": {"accuracy": 0.92765}, "epochs": 3.0, "seconds": 61.0, "hardware": hardware}
    result |= {"commit": "fedcba98765432100123456789abcdef01234567", "config": {"precision": "bf16"}}
    write_json(folder / "result.json", {**result, **fields})
    (folder / "config.toml").write_text('normfree = "0.2"\nmodel = "resmlp-2-8"\nmethod = "fixup"\nlr = 0.1\n')
    (folder / "metrics.jsonl").write_text("")


def text_of(out: Path, *claims: Claim) -> str:
    return markdown(entries(out, claims), out.parent / "docs")


def sections(text: str) -> dict[str, str]:
    """The parts of the claims by id."""
    parts = re.split(r"^### ", text.partition('<a id="not-run">')[0], flags=re.M)[1:]
    return {part.partition(":")[0].replace("\\", ""): part for part in parts}


# The document of this repository


@pytest.fixture(scope="module")
def document() -> str:
    return (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def test_document_is_made_from_the_results(document: str) -> None:
    made = markdown(entries(ROOT / "results"), ROOT / "docs")
    assert made == document, "docs/claims.md is not what the claims and results say; write it again with: make claims"


def test_document_does_not_depend_on_where_it_is_made(monkeypatch: pytest.MonkeyPatch, document: str) -> None:
    monkeypatch.chdir(ROOT)
    assert markdown(entries("results"), "docs") == document


def test_every_link_of_the_document_leads_somewhere(document: str) -> None:
    seen = Reader(document)
    assert len(seen.links) > 3 * len(all_claims())
    for link in seen.links:
        if link.startswith("#"):
            assert link[1:] in seen.anchors, link
        else:
            assert (ROOT / "docs" / unquote(link)).is_file(), link
            assert not link.startswith(("/", "http"))


def test_every_claim_is_in_the_document(document: str) -> None:
    known = [claim.id for claim in all_claims()]
    assert list(sections(document)) == known
    contents = [table[1:] for table in Reader(document).tables if table[0][:2] == ["claim", "where"]]
    assert [row[0] for rows in contents for row in rows] == known


def digits(text: str) -> float:
    """Half of the last digit that a number shows."""
    mantissa, _, power = text.lower().partition("e")
    return 0.5 * 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2])) * (1 + 1e-6)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif not isinstance(value, bool):
        yield float(value)  # also of 'nan' and 'inf'


def test_every_measured_number_is_in_the_json_beside_it(document: str) -> None:
    checked = 0
    for part in sections(document).values():
        seen = Reader(part)
        files = [link for link in seen.links if link.endswith(".json") and "/runs/" not in link]
        if not files:
            continue
        found = list(numbers(json.loads((ROOT / "docs" / files[0]).read_text())["values"]))
        header, *rows = seen.tables[0]
        assert header == ["verdict", "check", "paper", "expected", "by", "measured [95 %]", "n"]
        for row in filter(lambda row: row[5], rows):
            shown = row[5].partition(" ")[0]
            value = float(shown)
            assert any(
                x == value or (math.isnan(x) and math.isnan(value)) or abs(x - value) <= digits(shown) for x in found
            ), (part.splitlines()[0], row)
            checked += 1
    assert checked > 100


def test_results_on_the_page_name_command_and_commit(document: str) -> None:
    for claim_id, part in sections(document).items():
        if "*From*" in part:
            assert f"`normfree reproduce {claim_id}" in part
            assert re.search(r"commit [0-9a-f]{10}(\+dirty)? · date \d{4}-\d\d-\d\d · seeds \d", part), claim_id


# Made-up results


def test_claim_that_holds_is_shown_with_its_origin(tmp_path: Path) -> None:
    out = tmp_path / "results"
    store(out, made_up())
    result_path(out, made_up(), "full", ".png").write_bytes(b"")
    text = text_of(out, made_up())
    seen = Reader(text)
    assert "1 claim: 1 holds." in text
    assert "a figure of the paper" in dict(seen.words[0])["by"]
    assert seen.tables[0][1] == ["fixup/fake", "Figure 9", "One is one.", "✓ holds", "2 of 2 checks hold"]
    assert seen.tables[1][1:] == [
        ["✓ holds", "one is about 1", "1", "0.8 to 1.2", "paper", "1.010 [0.985, 1.035]", "3"],
        ["✓ holds", "two is above 1", "more", "≥ 1", "", "2.5 [± 0]", "2"],
    ]
    assert seen.tables[2] == [["a", "b"], ["1", "2"]]
    assert {"../results/fixup/fake.json", "../results/fixup/fake.png"} <= set(seen.links)
    for words in (
        "The paper: 1",
        "Measured: By looking.",
        "Note: a note",
        "normfree reproduce fixup/fake · commit 0123456789+dirty · date 2026-01-02 · seeds 0, 1 · time 2 h",
        "hardware a GPU, a processor, 2 cores · versions python 3.12.1, torch 2.13.0",
        "Everything was run.",
    ):
        assert words in seen.text


def test_origin_of_trained_numbers_is_that_of_their_runs() -> None:
    result = {"seeds": [0], "seconds": 0.1, "hardware": {"cpu": "that judged"}, "versions": {"torch": "2.13.0"}}
    assert origin_of(result)["hardware"] == "that judged"
    assert {"time", "hardware", "versions"}.isdisjoint(origin_of({**result, "runs": {"Fixup, seed 0": "folder"}}))


def test_run_that_translates_is_shown_with_its_bleu() -> None:
    result = {"status": "finished", "test": {"accuracy": 0.7}, "epochs": 60.0, "seconds": 5.0, "commit": "0" * 40}
    assert "70.00 %" in run_cells("Fixup, seed 0", result)
    assert "BLEU 43.28" in run_cells("Fixup, seed 0", {**result, "bleu": {"score": 43.278}})


def test_claim_that_fails_says_so(tmp_path: Path) -> None:
    store(tmp_path, made_up(), values={"one": {"values": [7.0, 7.0]}, "two": {"values": ["nan"]}})
    text = text_of(tmp_path, made_up())
    assert "1 claim: 1 fails." in text
    assert "✗ fails" in text
    assert [(row[0], row[5]) for row in Reader(text).tables[1][1:]] == [("✗ fails", "7 [± 0]"), ("✗ fails", "nan")]


@pytest.mark.parametrize("found", [1.0, -1.0])
def test_error_of_the_paper_is_told_where_the_right_number_came_out(tmp_path: Path, found: float) -> None:
    wrong = Check(name="one", statement="one", paper=3.0, low=0.0, why="counted", erratum="It misprints *one*.")
    claim = made_up(checks=(wrong,))
    store(tmp_path, claim, values={"one": {"values": [found] * 2}})
    sentence = "Error in the paper: It misprints *one*."
    shown = (
        Reader(text_of(tmp_path, claim)).text,
        page(entries(tmp_path, [claim]), tmp_path).sections[-1].text,
    )
    assert [sentence in text for text in shown] == [found > 0] * 2


def test_claim_that_was_not_run_has_its_command_and_hours(tmp_path: Path) -> None:
    text = text_of(tmp_path, made_up(), made_up("cpu", cost=Cost(quick_seconds=1, full_seconds=90)))
    seen = Reader(text)
    assert "2 claims: 2 not run." in text
    assert [row[3] for row in seen.tables[0][1:]] == ["– not run"] * 2
    assert seen.tables[-1][1:] == [
        ["fixup/fake", "all", "2 h on one H200", "normfree reproduce fixup/fake --device cuda"],
        ["fixup/cpu", "all", "2 min on one core", "normfree reproduce fixup/cpu"],
    ]
    assert "../" not in text


def test_claim_whose_data_is_missing_names_it(tmp_path: Path) -> None:
    seen = Reader(text_of(tmp_path, made_up(lacks="ImageNet")))
    command = "normfree reproduce fixup/fake --device cuda"
    assert seen.tables[-1][1] == ["fixup/fake", "all, for lack of ImageNet", "2 h on one H200", command]
    store(tmp_path, made_up(lacks="ImageNet"), "quick")
    seen = Reader(text_of(tmp_path, made_up(lacks="ImageNet")))
    assert seen.tables[-1][1][1] == "the full scale, for lack of ImageNet"


def test_quick_result_is_marked_as_a_stand_in(tmp_path: Path) -> None:
    store(tmp_path, made_up(), "quick")
    seen = Reader(text_of(tmp_path, made_up()))
    assert seen.tables[0][1][3] == "✓ holds (quick run)"
    assert any(link.endswith("fixup/fake.quick.json") for link in seen.links)
    both = text_of(tmp_path, made_up(), made_up("other"))
    assert "2 claims: 1 not run; of 1 only a quick run was made: 1 holds." in both
    assert seen.tables[-1][1][1:3] == ["the full scale", "2 h on one H200"]
    store(tmp_path, made_up())
    seen = Reader(text_of(tmp_path, made_up()))
    assert seen.tables[0][1][3] == "✓ holds"
    assert any(link.endswith("fixup/fake.quick.json") for link in seen.links)  # still to be found
    assert "Everything was run." in seen.text


def test_stand_ins_departures_precision_and_planted_errors_stand_beside_the_verdict(tmp_path: Path) -> None:
    stand_in = made_up(
        stand_in="CIFAR-10 in place of ImageNet", departures=("ten epochs", "one rate"), precision="float64"
    )
    other = made_up("other")
    refuted = {"fails_with_readings": {"it diverges": ["one"]}, "gpu_minutes_of_mutants": {"no_scale": 7}}
    small = {"broken_by": {"no_scale": ["one"]}, "scale": "quick", "small_runs": {"^he": {"model": "mlp-3-16"}, "": {}}}
    planted = {
        stand_in.id: {"broken_by": {"no_scale": ["one"]}},
        "fixup/third": {**refuted, "remark": "one seed only"},
        "fixup/fifth": {**refuted, **small},
        "fixup/sixth": {"broken_by": {}},
    }
    write_json(tmp_path / "mutants.json", {"claims": planted})
    for claim in (stand_in, other):
        store(tmp_path, claim)
    rest = (made_up(name) for name in ("third", "fourth", "fifth", "sixth"))
    text = Reader(text_of(tmp_path, stand_in, other, *rest)).text
    assert "6 claims: 1 holds, 4 not run; 1 on a stand-in for the paper's data or networks: 1 holds." in text
    for words in (
        "✓ holds (stand-in)",
        "Stand-in: CIFAR-10 in place of ImageNet",
        "Departures from the paper: ten epochs; one rate",
        "Precision: float64",
        "Planted errors: fails with no_scale",
        "Planted errors: not yet in training runs; with made-up runs it fails if it diverges; to be trained with the "
        "claim: no_scale (about 7 GPU minutes); one seed only",
        "Planted errors: not yet tested",
        "Planted errors: fails with no_scale in small training runs of mlp-3-16 on a CPU, by the quick check 'one'; "
        "with made-up runs it fails if it diverges; to be trained with the claim: no_scale (about 7 GPU minutes)",
        "Planted errors: none of those tried makes it fail",
    ):
        assert words in text
    sections = page(entries(tmp_path, [stand_in, other]), tmp_path).sections
    assert "Departures from the paper: ten epochs; one rate" in sections[1].text


def test_missing_numbers_of_an_undecided_claim_are_named(tmp_path: Path) -> None:
    store(tmp_path, made_up(), values={"one": {"values": [1.0, 1.0]}})
    assert "Not measured: two is above 1" in Reader(text_of(tmp_path, made_up())).text


def test_stale_runs_are_marked_and_the_verdict_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = Freshness("stale", ("1 of 1 runs made with nf:bias=false, not nf",))
    monkeypatch.setattr(claim_status, "freshness_of", lambda runs, out: stale if runs else Freshness())
    keep_run(tmp_path)
    store(tmp_path, made_up(), runs={"one": {"folder": FOLDER, "method": "nf"}})
    seen = Reader(text_of(tmp_path, made_up()))
    assert seen.tables[0][1][3] == "✓ holds (stale)"
    assert "1 claim: 1 holds; 1 rests on stale runs." in seen.text
    assert "Runs: stale: 1 of 1 runs made with nf:bias=false, not nf" in seen.text
    assert "Precision: bf16" in seen.text


def test_result_of_an_older_measurement_does_not_count(tmp_path: Path) -> None:
    store(tmp_path, made_up())
    assert entries(tmp_path, [made_up(version=2)])[0].status == "not run"


def test_result_without_any_number_is_not_run(tmp_path: Path) -> None:
    store(tmp_path, made_up(), values={}, panels=[], runs={"one": {"gpu_seconds": 1800}, "two": {"gpu_seconds": 9000}})
    (entry,) = entries(tmp_path, [made_up()])
    assert (entry.status, entry.status_text) == ("not run", "– not run")
    seen = Reader(text_of(tmp_path, made_up()))
    assert seen.tables[-1][1][1:3] == ["2 of 2 training runs", "3 h on one H200"]


def test_quick_result_is_shown_where_the_full_one_has_no_number(tmp_path: Path) -> None:
    store(tmp_path, made_up(), values={}, panels=[], runs={"large": {"gpu_seconds": 7200}})
    store(tmp_path, made_up(), "quick", runs={"small": {"folder": FOLDER}})
    keep_run(tmp_path)
    seen = Reader(text_of(tmp_path, made_up()))
    assert seen.tables[0][1][3] == "✓ holds (quick run, unknown whether stale)"
    assert [row[0] for table in seen.tables for row in table if row[0] in ("small", "large")] == ["small", "large"]
    assert "normfree reproduce fixup/fake --only large --device cuda" in seen.text
    assert seen.tables[-1][1][1:3] == ["1 of 1 training runs", "2 h on one H200"]


def test_runs_are_listed_with_their_files_and_those_not_made_with_their_command(tmp_path: Path) -> None:
    out = tmp_path / "results"
    keep_run(out)
    runs = {
        "fixup, seed 0": {"folder": FOLDER},
        "fixup's, seed 1": {"gpu_seconds": 5400},
        "gone": {"folder": "gone-0123456789ab"},
    }
    store(out, made_up(), values={"one": {"values": [1.0, 1.0]}}, runs=runs)
    text = text_of(out, made_up())
    seen = Reader(text)
    assert seen.tables[0][1][3] == "◐ undecided (unknown whether stale, 2 of 3 runs made)"
    made, left = (next(t for t in seen.tables if t[0][0] == "run" and len(t[0]) == n) for n in (9, 3))
    assert made[1] == [
        "fixup, seed 0",
        "finished",
        "92.77 %",
        "3",
        "bf16",
        "61 s",
        "NVIDIA H200, a processor, 16 cores",
        "fedcba9876",
        "result configuration metrics",
    ]
    assert made[2][:3] == ["gone", "no longer kept", ""]
    assert left[1] == [
        "fixup's, seed 1",
        "2 h",
        "normfree reproduce fixup/fake --only 'fixup'\"'\"'s, seed 1' --device cuda",
    ]
    for file in ("result.json", "config.toml", "metrics.jsonl"):
        assert f"../results/runs/{FOLDER}/{file}" in seen.links
    assert seen.tables[-1][1] == [
        "fixup/fake",
        "1 of 3 training runs",
        "2 h on one H200",
        "normfree reproduce fixup/fake --device cuda",
    ]
    assert "normfree train --config results/runs/RUN/config.toml" in seen.text
    assert not [
        link for link in seen.links if link.startswith("../") and not (tmp_path / "docs" / link).resolve().exists()
    ]


def test_diverged_run_shows_no_accuracy(tmp_path: Path) -> None:
    keep_run(tmp_path, status="diverged", test=None)
    store(tmp_path, made_up(), runs={"wild": {"folder": FOLDER}})
    assert ["wild", "diverged", ""] in [
        row[:3] for table in Reader(text_of(tmp_path, made_up())).tables for row in table
    ]


def test_long_tables_are_folded(tmp_path: Path) -> None:
    rows = [[str(i), "x"] for i in range(40)]
    store(tmp_path, made_up(), tables=[{"title": "Many", "columns": ["a", "b"], "rows": rows}])
    text = text_of(tmp_path, made_up())
    assert "<details><summary>Many</summary>" in text
    assert [len(table) for table in Reader(text).tables] == [2, 3, 41, 3]
    (section,) = page(entries(tmp_path, [made_up()]), tmp_path).sections[1:]
    assert [table.title for table in section.tables] == ["Checks"]
    assert [len(table.rows) for table in section.folded] == [40, 2]


def test_markup_in_names_is_shown_as_it_is(tmp_path: Path) -> None:
    evil = made_up(statement=EVIL, how=EVIL, paper_value=EVIL, where=EVIL)
    evil = replace(evil, checks=tuple(replace(check, statement=EVIL, why=EVIL) for check in evil.checks))
    keep_run(tmp_path)
    table = {"title": EVIL, "columns": [EVIL, "b"], "rows": [[EVIL, EVIL]] * 20}
    runs = {EVIL: {"folder": FOLDER}, EVIL + "2": {"gpu_seconds": 1}}
    store(tmp_path, evil, notes=[EVIL], runs=runs, tables=[table], command=f"normfree {EVIL}")
    text = text_of(tmp_path, evil)
    seen = Reader(text)
    assert not {"b", "script", "s", "del"} & seen.tags
    assert "w" not in seen.links
    cells = {cell for rows in seen.tables for row in rows for cell in row}
    assert EVIL in cells
    assert seen.text.count(EVIL) >= 12
    assert all(len(row) == len(rows[0]) for rows in seen.tables for row in rows)
    html = render_page(page(entries(tmp_path, [evil]), tmp_path))
    assert "<script>alert" not in html
    assert "<b>|" not in html


@pytest.mark.parametrize("text", [EVIL, "x_l and _y_", "f(x)_", "2 < 3 & 4", "a\n\n# b", "!["])
def test_escaped_text_is_rendered_as_it_was(text: str) -> None:
    assert Reader(f"x {escape(text)}").text.strip() == "x " + " ".join(text.split())
    assert Reader(f"x {code(text)}").text.strip() == "x " + " ".join(text.split())


@pytest.mark.parametrize(
    ("check", "values", "verdict"),
    [
        ({}, [1.0, 1.0], ("✓ holds", "good")),
        ({}, [7.0, 7.0], ("✗ fails", "bad")),
        ({}, [1.0, 7.0], ("◐ undecided", "warn")),
        ({"main": False}, [7.0, 7.0], ("✗ fails (aside)", "bad")),
        ({"main": False}, [1.0, 1.0], ("✓ holds (aside)", "good")),
        ({}, [], ("– missing", "info")),
        ({"lacks": "SVHN"}, [1.0, 1.0], ("– missing (no SVHN)", "info")),
        ({"erratum": "It misprints one."}, [1.0, 1.0], ("◐ paper errs", "warn")),
    ],
)
def test_verdict_has_the_mark_and_colour_of_how_it_stands(
    check: dict[str, Any], values: list[float], verdict: tuple[str, str]
) -> None:
    checks = (Check(name="one", statement="one", low=0.0, high=2.0, why="it is", **check),)
    shown = cells(judge(made_up(checks=checks), {"values": {"one": {"values": values}}}).rows[0])[0]
    assert (shown, CHECK_COLUMNS[0].status(shown)) == verdict


# One page


def test_page_has_a_card_and_a_section_a_claim(tmp_path: Path) -> None:
    claims = [made_up(), made_up("fails"), made_up("gone"), made_up("quick")]
    store(tmp_path, claims[0])
    store(tmp_path, claims[1], values={"one": {"values": [5.0, 5.0]}})
    store(tmp_path, claims[3], "quick")
    made = page(entries(tmp_path, claims), tmp_path)
    assert [(card.name, card.status, card.headline) for card in made.cards] == [
        ("fixup/fake", "good", "holds"),
        ("fixup/fails", "bad", "fails"),
        ("fixup/gone", "info", "not run"),
        ("fixup/quick", "good", "holds (quick run)"),
    ]
    assert {(card.text, card.group) for card in made.cards} == {("One is one.", PAPERS["fixup"])}
    assert set(made.places) == {
        PAPERS["fixup"],
        *(claim.id for claim in claims),
        "not run",
    }  # every card leads somewhere
    assert [section.title for section in made.others] == ["What was not run"]
    assert [section.title for section in made.sections[1:-1]] == [
        "fixup/fake, Figure 9: ✓ holds",
        "fixup/fails, Figure 9: ✗ fails",
        "fixup/gone, Figure 9: – not run",
        "fixup/quick, Figure 9: ✓ holds (quick run)",
    ]
    assert made.sections[1].panels[0].curves[0].values == (1.0, 2.0)
    assert made.sections[3].text == (
        "One is one.",
        "The paper: 1",
        "Measured: By looking.",
        "Planted errors: not yet tested",
        "Not run: all, about 2 h on one H200: `normfree reproduce fixup/gone --device cuda`",
    )
    assert [row[0] for row in made.sections[-1].tables[0].rows] == ["fixup/gone", "fixup/quick"]


def test_page_of_all_results_can_be_made_and_its_links_lead_somewhere() -> None:
    html = render_page(page(entries(ROOT / "results"), ROOT / "docs"))
    assert all(claim.id in html for claim in all_claims())
    links = [unquote(link) for link in re.findall(r'href="([^"#]+)"', html)]
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
    shown = [entry for entry in entries(ROOT / "results") if entry.result]
    files = {result_path(Path("../results"), entry.claim, entry.result["scale"]) for entry in shown if entry.result}
    assert set(map(Path, links)) >= files
    runs = {run.path.name for entry in shown for run in entry.runs.values()}
    assert {Path(link).parent.name for link in links if link.endswith("config.toml")} == runs


def test_page_leads_to_the_json_the_runs_and_the_reasons(tmp_path: Path) -> None:
    out = tmp_path / "results"
    keep_run(out)
    runs = {"first": {"folder": FOLDER}, "gone": {"folder": "gone"}, "second": {"gpu_seconds": 5400}}
    store(out, made_up(), runs=runs)
    store(out, made_up(), "quick")
    made = page(entries(out, [made_up()]), tmp_path / "docs")
    section = made.sections[1]
    assert [(link.text, link.href) for link in section.links] == [
        ("fake.json", "../results/fixup/fake.json"),
        ("its quick run", "../results/fixup/fake.quick.json"),
    ]
    table = next(table for table in section.tables if table.title == "2 training runs")
    assert [[link.text for link in row] for row in table.links] == [["result", "configuration", "metrics"], []]
    assert table.links[0][1].href == f"../results/runs/{FOLDER}/config.toml"
    left = next(table for table in section.tables if table.title == "1 training run not made")
    assert left.rows == (("second", "2 h", "`normfree reproduce fixup/fake --only second --device cuda`"),)
    (reasons,) = section.folded
    assert reasons.rows[0] == ("one is about 1", "it is 1", "one")
    (words,) = made.summary
    assert "it is shown and does not decide" in dict(words.rows)["aside"]


def test_name_of_every_number_in_the_json_stands_in_the_document(document: str) -> None:
    for part in sections(document).values():
        seen = Reader(part)
        if "*From*" not in part:
            continue
        rows = next(table for table in seen.tables if table[0][-1] == "in the JSON")[1:]
        checks = next(table for table in seen.tables if table[0][0] == "verdict")[1:]
        assert [row[0] for row in rows] == [row[1] for row in checks]
        file = next(link for link in seen.links if link.endswith(".json") and "/runs/" not in link)
        values = json.loads((ROOT / "docs" / file).read_text())["values"]
        assert {row[2] for row, check in zip(rows, checks, strict=True) if check[5]} <= set(values)


@pytest.mark.browser
def test_page_opens_in_a_browser(open_file: Open, tmp_path: Path) -> None:
    write_ledger(tmp_path / "claims.html", ROOT / "results")
    tab = open_file(tmp_path / "claims.html")
    found = entries(ROOT / "results")
    assert tab.locator(".card").count() == len(found)
    drawn = sum(len(entry.result["panels"]) for entry in found if entry.result)
    assert tab.locator(".panel svg g.curve").count() >= drawn
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    tab.locator("#filter").fill("theorem wninit/")
    wanted = [entry.claim.id for entry in found if entry.claim.id.startswith("wninit/thm")]
    assert set(wanted) <= set(tab.locator(".card:visible h2").all_inner_texts()) < {e.claim.id for e in found}
    hidden = tab.locator("section.part").count() - tab.locator("section.part:visible").count()
    assert hidden == len(found) - tab.locator(".card:visible").count() > 40  # papers keep their headings
    tab.locator("#filter").fill("")
    assert tab.locator(".card:visible").count() == len(found)
    tab.set_viewport_size({"width": 688, "height": 1000})  # A4 between its margins
    tab.emulate_media(media="print")
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


# The command line


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["reproduce", *arguments])
        return int(caught.value.code or 0), capsys.readouterr().err

    return call


def test_command_writes_both_kinds(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    out, docs = tmp_path / "results", tmp_path / "docs"
    store(out, made_up())  # of no registered claim: all are listed as not run
    status, err = run("--write", str(docs / "a.md"), "--write", str(docs / "b.html"), "--out", str(out))
    assert status == 0
    assert err.count("wrote") == 2
    assert (docs / "a.md").read_text() == markdown(entries(out), docs)
    assert (docs / "b.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in docs.iterdir()) == ["a.md", "b.html"]


def test_command_writes_the_claims_that_are_named(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    for name in ("some.md", "some.html"):
        file = tmp_path / name
        status, _ = run("fixup/thm1", "normdead/sec2_3", "--write", str(file), "--out", str(ROOT / "results"))
        assert status == 0
        text = file.read_text()
        assert "2 claims: " in text
        assert [claim.id for claim in all_claims() if claim.id in text] == ["fixup/thm1", "normdead/sec2_3"]


@pytest.mark.parametrize(
    ("file", "out", "says"),
    [
        ("claims.pdf", ".", "expected a file that ends in .md or .html"),
        ("claims.md", "nowhere", "expected a folder of results"),
    ],
)
def test_wrong_files_are_one_line(
    run: Callable[..., tuple[int, str]], file: str, out: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, err = run("--write", file, "--out", out)
    assert status == 2
    assert says in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_damaged_result_is_told_and_the_file_stays(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    path = tmp_path / "results" / "fixup" / "thm1.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    (tmp_path / "claims.md").write_text("before")
    status, err = run("--write", str(tmp_path / "claims.md"), "--out", str(tmp_path / "results"))
    assert (status, (tmp_path / "claims.md").read_text()) == (2, "before")
    assert "expected the result of a claim as it was written" in err


def test_entries_are_those_of_the_registry() -> None:
    found = entries(ROOT / "results")
    assert [entry.claim for entry in found] == list(all_claims())
    assert all(isinstance(entry, Entry) for entry in found)


@pytest.mark.parametrize(
    ("ends", "text"),
    [((1.0, None), "≥ 1"), ((None, 2.5), "≤ 2.5"), ((0.9, 1.1), "0.9 to 1.1"), ((38.015, 38.025), "38.015 to 38.025")],
)
def test_check_says_its_range(ends: tuple[float | None, float | None], text: str) -> None:
    assert range_text(Check(name="x", statement="x", low=ends[0], high=ends[1], why="x")) == text


def test_interval_of_a_percentage_is_shown_within_the_possible_range() -> None:
    row = Row(expect("x", high=20).reading("test error of x, in %", why="the text"), (6.0, 7.0, 90.0))
    assert row.interval is not None
    assert row.interval.low < 0 < 100 < row.interval.high
    assert mean_text(row) == "34 [0, 100]"
