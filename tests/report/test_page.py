import json
import math
import os
import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from normfree.report.page import Card, Page, Section, formulas, page_data, render_page, write_page
from normfree.report.panels import Curve, Panel
from normfree.report.tables import Column, Link, Table

EVIL = "</script><script>alert('1 & 2')</script><img src=x onerror=\"alert(3)\">"
PAGE = Page(
    title=f"Report {EVIL}",
    subtitle=f"subtitle {EVIL}",
    cards=(Card(EVIL, "bad", f"headline {EVIL}", f"text {EVIL}"), Card("fixup", "good", "preserved")),
    panels=(
        Panel(
            f"forward {EVIL}",
            (
                Curve(EVIL, (1.0, math.inf, -math.inf, math.nan, 0.1 + 0.2)),
                Curve("fixup", (1.0, 0.0, 1.0, 5e-324, 1e308)),
            ),
            y_label=f"variance {EVIL}",
            x_label=f"block {EVIL}",
            log_y=True,
            stages=(2, 4),
            point_names=tuple(f"layer{i} {EVIL}" for i in range(5)),
            note=f"note {EVIL}",
        ),
    ),
    tables=(Table(f"table {EVIL}", (Column(EVIL), Column("b", "right")), ((EVIL, "1"),), f"caption {EVIL}"),),
    notes=(f"footnote {EVIL}",),
)


class Reader(HTMLParser):
    """Collects tags with their attributes, the text outside scripts and styles, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self.inside = "", [], ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside != "style":
            self.text += data


def embedded(text: str) -> dict:
    """The data block of a page, with the strings that stand for NaN and infinity."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_render_page_shows_every_text_as_text() -> None:
    reader = Reader(render_page(PAGE))
    assert len(reader.scripts) == 2
    assert not [tag for tag, _ in reader.tags if tag == "img"]
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    for word in ("Report", "subtitle", "headline", "text", "forward", "variance", "block", "note", "table", "caption"):
        assert f"{word} {EVIL}" in reader.text
    assert f"footnote {EVIL}" in reader.text
    # The control: the reader does see tags that are not escaped.
    assert [tag for tag, _ in Reader(EVIL).tags] == ["script", "img"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a_1 ⋯ a_m x", "a<sub>1</sub> ⋯ a<sub>m</sub> x"),
        ("L^(-1/(2m-2)), 2^((L - 1)/2)", "L<sup>−1/(2m−2)</sup>, 2<sup>(L − 1)/2</sup>"),
        ("(1 + 1/B)^B and 0.9^l, L^-1/2", "(1 + 1/B)<sup>B</sup> and 0.9<sup>l</sup>, L<sup>−1/2</sup>"),
        ("J_l^i of Σ_{k<l} x_{l-1}", "J<sub>l</sub><sup>i</sup> of Σ<sub>k&lt;l</sub> x<sub>l−1</sub>"),
        ("Σ 1/a_i² of ∂ℓ_{avg}", "Σ 1/a<sub>i</sub>² of ∂ℓ<sub>avg</sub>"),
        ("2.1669e-06 [± 5e-07], 1e5", "2.1669·10<sup>−6</sup> [± 5·10<sup>−7</sup>], 10<sup>5</sup>"),
        ("-0.5 [-0.51, -0.49], -η x - y", "−0.5 [−0.51, −0.49], −η x − y"),
        ("72.5 % of a = 2", "72.5\N{NO-BREAK SPACE}% of a =\N{NO-BREAK SPACE}2"),
        ("with `a_1 - 1e-3` < b_1", "with <code>a_1 - 1e-3</code> &lt; b<sub>1</sub>"),
        ("`run --on ray -m a-b`", "<code>run <span>--on</span> ray <span>-m</span> a-b</code>"),
        ("he_in, fan_out, a_b_c, x_all, run/a_1", "he_in, fan_out, a_b_c, x_all, run/a_1"),
        (
            "c8740f2e0c, seed2-6e9ac1, 2026-11-16, --jobs, ` alone",
            "c8740f2e0c, seed2-6e9ac1, 2026-11-16, --jobs, ` alone",
        ),
    ],
)
def test_formulas_set_powers_and_indices(text: str, shown: str) -> None:
    assert formulas(text) == shown


def test_formulas_let_no_tag_through() -> None:
    evil = f"x_{{{EVIL}}} L^({EVIL}) {EVIL}"
    assert {tag for tag, _ in Reader(formulas(evil)).tags} <= {"sub", "sup"}
    assert "<sup>" in formulas("L^(1 <script>)")  # the control: such a text is set as a formula


def test_render_page_sets_formulas_and_paragraphs() -> None:
    table = Table("", (Column("a"),), (("e^(N/2)",),))
    text = render_page(Page("t", "first\nsecond L^2", cards=(Card("c", "good", "h", "a_1"),), tables=(table,)))
    assert "a<sub>1</sub>" in text
    assert "e<sup>N/2</sup></td>" in text
    assert '<p class="subtitle">first</p>' in text
    assert '<p class="subtitle">second L<sup>2</sup></p>' in text


def test_render_page_embeds_no_sign_that_could_end_its_block() -> None:
    text = render_page(PAGE)
    block = text.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&") & set(block)
    assert "\\u003c/script\\u003e" in block


def test_render_page_embeds_the_data_exactly() -> None:
    data = embedded(render_page(PAGE))
    assert data == json.loads(json.dumps(page_data(PAGE), allow_nan=False))
    curve, other = data["panels"][0]["curves"]
    values = [1.0, "Infinity", "-Infinity", "NaN", 0.1 + 0.2]
    rest = {"x": [], "spread": [], "crossed": [], "singles": [], "joined": True}
    assert curve == {"name": EVIL, "values": values, **rest}
    assert tuple(other["values"]) == PAGE.panels[0].curves[1].values
    assert data["panels"][0]["point_names"][4] == f"layer4 {EVIL}"
    assert data["tables"][0]["rows"] == [[EVIL, "1"]]


def test_render_page_refers_to_nothing_outside() -> None:
    text = render_page(PAGE)
    assert not re.findall(r"https?:|//[a-z]+\.", text.replace("http://www.w3.org/2000/svg", ""))
    attributes = [(name, value) for _, pairs in Reader(text).tags for name, value in pairs.items()]
    assert not [pair for pair in attributes if pair[0] in ("src", "href", "action", "srcset")]
    assert not re.search(r"@import|url\(", text)
    assert not [pair for pair in attributes if pair[0] == "style"]  # the policy would drop them


def test_render_page_script_never_reads_data_as_markup() -> None:
    script = Reader(render_page(PAGE)).scripts[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|DOMParser", script)


def test_render_page_forbids_other_scripts() -> None:
    policy = next(a["content"] for t, a in Reader(render_page(PAGE)).tags if a.get("http-equiv"))
    assert re.fullmatch(r"default-src 'none'; script-src 'sha256-[\w+/=]+'; style-src 'sha256-[\w+/=]+'", policy or "")


def test_render_page_is_small_when_empty() -> None:
    text = render_page(Page("Empty"))
    assert len(text.encode()) < 60_000
    assert "<figure" not in text
    assert 'id="legend"' not in text


def test_render_page_gives_card_and_curve_one_colour() -> None:
    text = render_page(PAGE)
    assert re.search(r'<i class="dot curve-1 dash-0"></i><span>fixup', text)
    assert re.search(r'class="entry curve-1 dash-0"[^>]*title="fixup', text)


def test_render_page_says_what_is_not_drawn_on_each_scale() -> None:
    lists = re.findall(r'<ul class="gaps" data-scale="(\w+)"( hidden)?>(.*?)</ul>', render_page(PAGE), re.DOTALL)
    assert [(scale, hidden) for scale, hidden, _ in lists] == [("log", ""), ("linear", " hidden")]
    assert "<b>fixup</b> zero at 2" in lists[0][2]
    assert "fixup" not in lists[1][2]
    assert "infinite at 2 to 3; not a number at 4" in unescape(lists[1][2])


def test_render_page_without_a_script_shows_tables() -> None:
    text = render_page(PAGE)
    fallback = "".join(re.findall(r"<noscript>(.*?)</noscript>", text, re.DOTALL))
    assert "need JavaScript" in fallback
    assert '<td>fixup</td><td class="right">5</td><td class="right">1</td><td class="right">0</td>' in fallback


def test_render_page_without_jinja2_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs jinja2, which is not installed; .*run: pip install '\.\[plots\]'"):
        render_page(PAGE)


def test_write_page_writes_what_is_rendered_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_page(PAGE, path)
    write_page(PAGE, path)
    assert path.read_text(encoding="utf-8") == render_page(PAGE)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_write_page_gives_the_usual_permissions_and_keeps_those_there(tmp_path: Path) -> None:
    path, usual = tmp_path / "report.html", tmp_path / "usual"
    usual.touch()
    write_page(PAGE, path)
    assert path.stat().st_mode == usual.stat().st_mode
    path.chmod(0o600)
    write_page(PAGE, path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_write_page_leaves_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_page(PAGE, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_cells_of_a_marked_column_have_the_status_of_their_mark() -> None:
    rows = (("✓ holds", "✗ plain"), ("✗ fails", "x"), ("other", "x"))
    page = Page("Report", tables=(Table("t", (Column("verdict", marked=True), Column("any")), rows),))
    cells = [attributes["class"] for tag, attributes in Reader(render_page(page)).tags if tag == "td"]
    assert cells == [f"left short{status}" for status in (" marked good", "", " marked bad", "", "", "")]


def test_cards_stand_under_their_group_and_lead_to_the_sections_of_their_names() -> None:
    names = ("one", "one", "two & <b>")
    cards = tuple(Card(f"x/a_{i}", "good", "holds", "says", group=name) for i, name in enumerate(names))
    page = Page("Report", cards=cards, sections=(Section("s", name="x/a_1"), Section("t", name="one")))
    text = render_page(page)
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    assert headings[:5] == [
        '<a href="#one">one</a>',
        "<span>x/<wbr>a_<wbr>0</span>",
        '<a href="#x-a-1">x/<wbr>a_<wbr>1</a>',
        "<span>two &amp; &lt;b&gt;</span>",
        "<span>x/<wbr>a_<wbr>2</span>",
    ]
    assert '<section class="cards grouped"' in text
    assert '<nav class="others"' not in text
    assert '<section class="cards"' in render_page(PAGE)


def test_sections_have_ids_of_their_names_and_those_without_a_card_are_listed() -> None:
    names = ("fixup/table3_a", "fixup/table3/a", "data", "", "new")
    page = Page(
        "Report", cards=(Card("new", "good", "holds"),), sections=tuple(Section(f"<{n}>", name=n) for n in names)
    )
    ids = ["fixup-table3-a", "fixup-table3-a-1", "data-2", "new"]
    assert list(page.places.values()) == ids
    text = render_page(page)
    assert re.findall(r'<section class="part" id="(.*?)">', text) == ids
    assert re.findall(r'class="here" href="#(.*?)"', text) == ids
    listed = re.search(r'<nav class="others".*?</nav>', text)
    assert listed is not None
    assert re.findall(r'href="#(.*?)">(.*?)<', listed[0]) == [
        (i, f"&lt;{n}&gt;") for i, n in zip(ids[:3], names[:3], strict=True)
    ]


def test_section_shows_its_files_and_folds_tables() -> None:
    table = Table("runs", (Column("run"),), ((EVIL,),), links=((Link(EVIL, "a%20b/config.toml"),),))
    section = Section("s", links=(Link("one.json", "../one.json"), Link("two", "two.json")), folded=(table,))
    reader = Reader(render_page(Page("Report", sections=(section,))))
    links = [attributes["href"] for tag, attributes in reader.tags if tag == "a" and "href" in attributes]
    assert links == ["../one.json", "two.json", "a%20b/config.toml"]
    assert [tag for tag, _ in reader.tags if tag in ("details", "summary", "img")] == ["details", "summary"]
    assert reader.text.count(EVIL) == 2
    assert "one.json · two" in reader.text
    assert embedded(render_page(Page("Report", sections=(section,))))["sections"][0]["folded"][0]["columns"] == ["run"]


def test_card_refuses_an_unknown_status() -> None:
    with pytest.raises(ValueError, match=r"card 'a': expected status good, warn, bad or info, got 'fine'; choose"):
        Card("a", "fine", "b")  # type: ignore[arg-type]
