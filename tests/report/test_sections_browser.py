"""Sections, levels, error bars, names and a logarithmic lower axis in a real Chromium: run with -m browser."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chromium import Open, settle
from normfree.report.page import Card, Page, Section, write_page
from normfree.report.panels import Curve, Panel, ReferenceLine
from normfree.report.tables import Column, Table

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

pytestmark = pytest.mark.browser

EVIL = "<script>alert(1)</script>"
DEPTH = Panel(
    f"accuracy {EVIL}",
    (
        Curve("fixup", (83.0, 84.0, 85.0), (10.0, 100.0, 1000.0), spread=(1.0, 0.0, 2.0)),
        Curve(EVIL, (80.0, 10.0, 10.0), (10.0, 100.0, 1000.0), crossed=(1, 2)),
    ),
    y_label="test accuracy in %",
    x_label="layers",
    log_y=False,
    log_x=True,
    levels=(ReferenceLine(f"linear {EVIL}", 83.5), ReferenceLine("chance", 10.0)),
)
SHORT = ("layer norm", "Fixup", "Fixup, bounded", "T-Fixup", "ReZero", EVIL)
LONG = tuple(f"body.{i}.0: shortcut.conv + a_branch_with_a_long_name.conv{i}" for i in range(6))
NAMED = tuple(
    Panel(
        "names",
        (
            Curve("fixup", (43.0, 44.0, 12.0), (1.0, 2.0, 6.0), spread=(1.0, 0.0, 2.0)),
            Curve(EVIL, (43.0, 44.0, math.inf), (1.0, 2.0, 3.0)),
        ),
        x_label="",
        log_y=False,
        names=names,
    )
    for names in (SHORT, LONG)
)
ALIKE = Panel("alike", (Curve("fixup", (9.0, 9.0, 9.0, 1.0)), Curve(EVIL, (1.0, 9.0, 9.0, 9.0))), log_y=False)
GROUND = replace(DEPTH, levels=(ReferenceLine("ground", 0.0125),))
REPORT = Page(
    "Demo",
    cards=(Card(EVIL, "bad", "diverges"), Card("far below", "good", "trains")),
    sections=(
        Section(f"signal {EVIL}", (f"text {EVIL}",), (Panel("variance", (Curve("fixup", (1.0, 2.0)),)),)),
        Section("depth", panels=(DEPTH,), tables=(Table("numbers", (Column(EVIL),), ((EVIL,),)),)),
        Section("names", panels=(*NAMED, ALIKE, GROUND), name="far below"),
    ),
)


@pytest.fixture(params=[390, 1200])
def tab(request: pytest.FixtureRequest, open_file: Open, tmp_path: Path) -> Tab:
    """The report at the width of a phone and of a screen."""
    write_page(REPORT, tmp_path / "report.html")
    return open_file(tmp_path / "report.html", request.param)


def test_drawing_stays_until_its_width_changes(tab: Tab) -> None:
    drawn = tab.locator(".chart svg").nth(3).locator(".place").first.element_handle()
    settle(tab)
    assert drawn.evaluate("text => text.isConnected")
    tab.set_viewport_size({"width": 700, "height": 900})
    settle(tab)
    assert not drawn.evaluate("text => text.isConnected")


def test_sections_show_names_as_text(tab: Tab) -> None:
    assert tab.locator(".part > h2").all_text_contents() == [f"signal {EVIL}", "depth", "names # ↑"]
    assert tab.locator(".part .lead").text_content() == f"text {EVIL}"
    assert tab.locator(".part td").first.text_content() == EVIL
    assert tab.locator(".level-name").all_text_contents() == [f"linear {EVIL}", "chance"]
    assert tab.locator(".entry span").all_text_contents() == ["fixup", EVIL]
    assert tab.locator("script").count() == 2
    assert tab.evaluate("document.documentElement.scrollWidth") <= (tab.viewport_size or {})["width"]


def test_card_leads_to_the_section_of_its_name_and_back(tab: Tab) -> None:
    assert tab.locator(".card a").all_text_contents() == ["far below"]
    tab.locator(".card a").click()
    assert tab.locator("#far-below").evaluate("e => e.getBoundingClientRect().top") == pytest.approx(16, abs=2)
    tab.locator("#far-below .up").click()
    tab.wait_for_function("window.scrollY === 0")


@pytest.mark.parametrize("width", [390, 1200])
def test_many_cards_are_small_and_their_names_break_at_slashes_and_underscores_alone(
    open_file: Open, width: int, tmp_path: Path
) -> None:
    name = "a_paper_of_some_length/table3_of_the_long_appendix_with_everything"
    cards = tuple(Card(name, "good", "holds (small stand-in)", "many words " * 40, group="paper") for _ in range(9))
    write_page(Page("Cards", cards=cards, sections=(Section("s", name=name),)), tmp_path / "cards.html")
    opened = open_file(tmp_path / "cards.html", width)
    assert opened.locator(".group").all_inner_texts() == ["paper"]
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    lines = opened.locator(".card h2 a").first.evaluate(
        """a => {
            const lines = new Map();
            for (const node of [...a.childNodes].filter(node => node.nodeType === Node.TEXT_NODE)) {
                const range = document.createRange();
                range.selectNode(node);
                for (const box of range.getClientRects()) {
                    lines.set(box.top, (lines.get(box.top) ?? "") + node.textContent);
                }
            }
            return [...lines.values()];
        }"""
    )
    box = opened.locator(".card").first.bounding_box()
    assert "".join(lines) == name  # no part of it is on two lines
    assert len(lines) > 1
    assert box
    assert box["height"] < 150


def test_level_on_the_lower_axis_is_not_drawn_among_the_numbers(tab: Tab) -> None:
    chart = tab.locator(".panel").last
    assert chart.locator(".level, .level-name").count() == 0
    chart.locator("[data-scale=log]").first.click()
    assert chart.locator(".level-name").all_text_contents() == ["ground"]


def test_names_of_levels_lie_over_the_curves(tab: Tab) -> None:
    after = "all => all.every(e => !e.parentElement.querySelector('.level-name ~ .curve'))"
    assert tab.locator(".level-name").evaluate_all(after)


def test_chart_of_a_section_has_bars_crosses_and_even_decades(tab: Tab) -> None:
    chart = tab.locator(".chart svg").nth(1)
    assert (chart.locator(".whisker").get_attribute("d") or "").count("V") == 2
    assert (chart.locator(".cross").get_attribute("d") or "").count("m-5-5") == 2
    line = chart.locator(".path").first.get_attribute("d") or ""
    x = [float(point.split()[0]) for point in line.replace("L", "M").split("M")[1:]]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.3)
    assert {"10", "100", "1,000"} <= set(chart.locator("text").all_text_contents())
    chart.focus()
    chart.press("ArrowRight")
    assert "83 ± 1" in tab.locator("#tooltip").inner_text()
    for key in ("ArrowDown", "ArrowRight"):
        chart.press(key)
    assert "10 ×" in tab.locator("#tooltip").inner_text()
    tab.locator(".entry").nth(1).click()
    assert chart.locator("g.curve").count() == 1


def test_point_chosen_by_the_keys_stays_while_the_page_scrolls(tab: Tab) -> None:
    chart = tab.locator(".chart svg").nth(1)
    chart.focus()
    chart.press("ArrowRight")
    for _ in range(2):
        before = tab.locator("#tooltip").bounding_box()
        tab.evaluate("scrollBy(0, 40)")
        settle(tab)
        after = tab.locator("#tooltip").bounding_box()
        assert before
        assert after
        assert after["y"] == pytest.approx(before["y"] - 40, abs=1)
    chart.press("ArrowRight")
    assert "fixup\n84" in tab.locator("#tooltip").inner_text()


def test_point_under_the_mouse_is_left_when_the_page_scrolls(tab: Tab) -> None:
    chart = tab.locator(".chart svg").nth(1)
    chart.scroll_into_view_if_needed()
    settle(tab)
    chart.hover()
    assert tab.locator("#tooltip").is_visible()
    tab.evaluate("scrollBy(0, 40)")
    settle(tab)
    assert tab.locator("#tooltip").is_hidden()


@pytest.mark.parametrize(("panel", "names"), [(2, SHORT), (3, LONG)])
def test_names_stand_at_their_points_and_neither_overlap_nor_are_cut(
    tab: Tab, panel: int, names: tuple[str, ...]
) -> None:
    chart = tab.locator(".chart svg").nth(panel)
    found = chart.locator(".place").evaluate_all(
        """all => all.map(text => {
            const { left, right, bottom } = text.getBoundingClientRect(), { width, height } = text.getBBox();
            return { text: text.textContent, x: Number(text.getAttribute("x")), left, right, bottom, width, height,
                     slanted: text.hasAttribute("transform") };
        })"""
    )
    assert ["".join(label["text"].split()) for label in found] == ["".join(name.split()) for name in names]
    box = tab.locator(".panel").nth(panel).bounding_box()
    below = tab.locator(".panel").nth(panel).locator(".axis").bounding_box()
    assert box
    assert below
    for label in found:
        assert box["x"] <= label["left"] < label["right"] <= box["x"] + box["width"]
        assert label["bottom"] <= below["y"] + 1
    room = found[1]["x"] - found[0]["x"]
    if found[0]["slanted"]:
        assert all(label["height"] <= room * math.sin(math.radians(60)) for label in found)
    else:
        assert all(label["width"] <= room for label in found)
    assert chart.locator(".path").count() == 0
    assert chart.locator(".cross").count() == 0
    dots = [dot.get_attribute("d") or "" for dot in chart.locator(".dots").all()]
    first, second = ([float(d.split()[0]) for d in dot.split("M")[1:]] for dot in dots)
    assert second[0] - first[0] > 5  # beside each other
    assert (first[0] + second[0]) / 2 == pytest.approx(found[0]["x"], abs=0.2)


def test_hover_says_the_name_of_a_point(tab: Tab) -> None:
    chart = tab.locator(".chart svg").nth(2)
    chart.scroll_into_view_if_needed()
    settle(tab)
    box = chart.bounding_box()
    assert box
    third = (chart.locator(".dots").first.get_attribute("d") or "").split("M")[3]
    x, y = (float(v) for v in third.split("m")[0].split())
    tab.mouse.move(box["x"] + x, box["y"] + y)
    assert tab.locator("#tooltip .name").all_inner_texts() == ["fixup\n12 ± 2"]
    assert tab.locator("#tooltip .where").all_text_contents() == [EVIL]
    gaps = tab.locator(".panel").nth(2).locator(".gaps:visible li")
    assert gaps.all_inner_texts() == [f"{EVIL} infinite at Fixup, bounded"]


def test_curve_under_another_has_a_band_there_and_both_keep_their_dash(tab: Tab) -> None:
    chart = tab.locator(".chart svg").nth(4)
    (band,) = chart.locator(".band").all()
    assert "curve-0" in (band.get_attribute("class") or "")  # the earlier of the two
    assert (band.get_attribute("d") or "").count("L") == 1  # from the second point to the third
    wide = "path => parseFloat(getComputedStyle(path).strokeWidth)"
    assert band.evaluate(wide) > 2 * chart.locator(".path").first.evaluate(wide)
    dashes = chart.locator(".path, .band").evaluate_all("all => all.map(p => getComputedStyle(p).strokeDasharray)")
    assert dashes == ["none"] * 3
    chart.scroll_into_view_if_needed()
    tab.locator(".entry").nth(1).click()  # hides what lies on it
    assert chart.locator(".band").count() == 0


def test_many_curves_have_a_legend_a_section(open_file: Open, tmp_path: Path) -> None:
    groups = [["shared", *(f"curve {first + i}" for i in range(20))] for first in (0, 100)]
    parts = tuple(
        Section(str(n), panels=(Panel("p", tuple(Curve(name, (1.0, 2.0 + k)) for k, name in enumerate(group))),))
        for n, group in enumerate(groups)
    )
    write_page(Page("Many", cards=(Card("shared", "info", "x"),), sections=parts), tmp_path / "many.html")
    opened = open_file(tmp_path / "many.html")
    sections = [opened.locator(".part").nth(n) for n in (0, 1)]
    assert [part.locator(".legend .entry").all_inner_texts() for part in sections] == groups
    looks = [part.locator(".entry").evaluate_all("all => all.map(e => e.className)") for part in sections]
    assert looks[0] == looks[1]
    assert len(set(looks[0])) == 21
    shown = "all => all.filter(g => g.querySelector('path')).length"
    sections[0].locator(".entry").first.click()
    assert [part.locator("g.curve").evaluate_all(shown) for part in sections] == [20, 21]
    assert [part.locator(".all").is_visible() for part in sections] == [True, False]
    sections[1].locator(".entry").nth(3).click(modifiers=["Shift"])
    assert [part.locator("g.curve").evaluate_all(shown) for part in sections] == [20, 1]
    sections[1].locator(".all").click()
    assert [part.locator("g.curve").evaluate_all(shown) for part in sections] == [20, 21]


@pytest.mark.parametrize("width", [390, 1200])
def test_names_of_levels_stay_clear_of_curves_and_of_each_other(open_file: Open, tmp_path: Path, width: int) -> None:
    low = Curve("falls", (60.0, 99.0, 20.0), (4.0, 10.0, 100.0))
    high = Curve("flat", (79.0, 78.0, 78.0), (4.0, 10.0, 100.0))
    near = (ReferenceLine("linear classifier, 25.8 %", 25.8), ReferenceLine("chance, 20.0 %", 20.0))
    over = (ReferenceLine("linear classifier, 80.5 %", 80.5),)
    panels = tuple(
        Panel("p", (curve,), log_y=False, log_x=True, levels=levels) for curve, levels in ((low, near), (high, over))
    )
    write_page(Page("t", panels=panels), tmp_path / "page.html")
    tab = open_file(tmp_path / "page.html", width=width)
    crossed = """all => all.map(svg => {
        const boxes = [...svg.querySelectorAll('.level-name')].map(name => name.getBBox());
        const path = svg.querySelector('.path'), long = path.getTotalLength();
        const points = Array.from({length: 2000}, (_, i) => path.getPointAtLength(long * i / 2000));
        const met = boxes.some(b => points.some(p =>
            p.x > b.x && p.x < b.x + b.width && p.y > b.y + 2 && p.y < b.y + b.height - 2));
        const [a, b] = boxes, apart = !b || a.y + a.height < b.y + 4 || b.y + b.height < a.y + 4;
        return boxes.length > 0 && boxes.every(b => b.width > 50) && !met && apart;
    })"""
    assert tab.locator(".chart svg").evaluate_all(crossed) == [True, True]


def test_names_in_a_legend_are_whole(open_file: Open, tmp_path: Path) -> None:
    names = [f"compare/a-model-with-a-long-name-batchnorm-lr0.03-seed{i}-435c74fb19f6" for i in range(3)]
    write_page(Page("t", panels=(Panel("p", tuple(Curve(name, (1.0, 2.0)) for name in names)),)), tmp_path / "p.html")
    for width in (390, 1200):
        entries = open_file(tmp_path / "p.html", width=width).locator(".entry span")
        cut = (
            "all => all.map(e => e.scrollWidth > e.clientWidth + 1 || getComputedStyle(e).textOverflow === 'ellipsis')"
        )
        assert entries.evaluate_all(cut) == [False] * 3
        assert entries.all_text_contents() == names


def test_tooltip_shows_the_name_of_a_curve_as_the_legend_does(open_file: Open, tmp_path: Path) -> None:
    curve = Curve("(1 + 1/B)^(B/2)", (1.0, 2.0))
    write_page(Page("t", panels=(Panel("p", (curve,)),)), tmp_path / "p.html")
    tab = open_file(tmp_path / "p.html")
    tab.locator(".chart svg").press("ArrowRight")
    assert tab.locator("#tooltip .name span").inner_html() == "(1 + 1/B)<sup>B/2</sup>"


def test_wide_pale_lines_are_explained_where_they_are(tab: Tab) -> None:
    explained = "all => all.map(f => [f.querySelector('.band') !== null, f.querySelector('.covers').offsetHeight > 0])"
    found = tab.locator(".panel").evaluate_all(explained)
    assert all(band == note for band, note in found)
    assert {note for _, note in found} == {True, False}
