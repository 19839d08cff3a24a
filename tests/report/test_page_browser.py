"""The page in a real Chromium: run with -m browser."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chromium import Open, settle
from normfree.report.page import Card, Page, Section, page_data, write_page
from normfree.report.panels import Curve, Panel
from normfree.report.tables import Column, Table

if TYPE_CHECKING:
    from playwright.sync_api import Locator
    from playwright.sync_api import Page as Tab

pytestmark = pytest.mark.browser

EVIL = "<script>alert(1)</script>"
NAMES = ("he_in", "fixup", EVIL, "a_rather_long_name_of_a_method:with=options,and=more_of_them")
BLOCKS = 54


def panel(title: str, rates: tuple[float, ...], log_y: bool = True) -> Panel:
    curves = tuple(
        Curve(name, tuple(10.0 ** (rate * i) if rate * i < 308 else math.inf for i in range(BLOCKS)))
        for name, rate in zip(NAMES, rates, strict=False)
    )
    names = tuple(f"layer{1 + i // 18}.{i % 18} {EVIL}" for i in range(BLOCKS))
    return Panel(title, curves, "variance", log_y=log_y, stages=(19, 37), point_names=names)


REPORT = Page(
    title=f"Signal propagation {EVIL}",
    subtitle="At initialization, one batch of 128 images.",
    cards=(Card("he_in", "bad", "exploding", "Use fixup."), Card(EVIL, "info", "unknown", "A method of your own.")),
    panels=(
        panel("forward", (0.55, 0.01, -0.1, 0.0)),
        panel("out of range", (15.0, 0.01, 0.3)),
        Panel("zeros", (Curve("fixup", (0.0, 1.0, 0.0, 2.0, 3.0, 0.0)), Curve(EVIL, (0.0,) * 6))),
        Panel("ends", (Curve("fixup", (1.7e308, -1.7e308)), Curve("he_in", (5e-324, 1e-320))), log_y=False),
        Panel("rates", (Curve("fixup", (0.0012, 0.5, 0.25)),), x_label="η", x=(0.001, 0.01, 0.1)),
    ),
    tables=(
        Table("Growth", tuple(Column(f"column {i}") for i in range(12)), (("a long cell of many words " * 3,) * 12,)),
    ),
    notes=("A note with a long word: " + "x" * 200,),
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(REPORT, path)
    return path


@pytest.fixture
def open_tab(open_file: Open, address: Path) -> Open:
    """Opens the report."""
    return partial(open_file, address)


def curves(tab: Tab, panel: int) -> list[str]:
    """The names of the curves that are drawn in a panel."""
    return (
        tab.locator(".panel")
        .nth(panel)
        .locator("g.curve:has(path)")
        .evaluate_all("all => all.map(g => g.dataset.name)")
    )


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", path)]


def point_at(tab: Tab, panel: int, name: str, index: int) -> tuple[float, float]:
    """Where on the screen the n-th point of a drawn curve is, read from its paths."""
    svg = tab.locator(".chart svg").nth(panel)
    svg.scroll_into_view_if_needed()
    settle(tab)  # the scroll event, which closes a tooltip, comes a frame later
    paths = svg.locator(".path").evaluate_all(
        "all => all.map(path => ({name: path.parentNode.dataset.name, d: path.getAttribute('d')}))"
    )
    places = [numbers(path["d"]) for path in paths if path["name"] == name]
    place = sorted({pair for path in places for pair in zip(path[::2], path[1::2], strict=True)})[index]
    box = svg.bounding_box()
    assert box
    return box["x"] + place[0], box["y"] + place[1]


def inside(tab: Tab, locator: Locator) -> bool:
    box = locator.bounding_box()
    size = tab.viewport_size
    assert box
    assert size
    return (
        box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= size["width"]
        and box["y"] + box["height"] <= size["height"]
    )


@pytest.mark.parametrize("width", [390, 1200])
def test_page_draws_every_curve_inside_its_chart(open_tab: Open, width: int) -> None:
    tab = open_tab(width)
    for index, panel in enumerate(REPORT.panels):
        svg = tab.locator(".chart svg").nth(index)
        box = svg.bounding_box()
        assert box
        drawn = svg.locator("path").evaluate_all("all => all.map(path => path.getAttribute('d'))")
        assert drawn
        for path in drawn:
            assert "NaN" not in path
            assert "Infinity" not in path
        for path in svg.locator(".path").evaluate_all("all => all.map(path => path.getAttribute('d'))"):
            places = numbers(path)
            assert all(0 <= x <= box["width"] for x in places[::2])
            assert all(0 <= y <= box["height"] for y in places[1::2])
        drawable = [
            c.name for c in panel.curves if any(math.isfinite(v) and (v > 0 or not panel.log_y) for v in c.values)
        ]
        assert curves(tab, index) == drawable


@pytest.mark.parametrize("width", [390, 1200])
def test_page_labels_do_not_overlap(open_tab: Open, width: int) -> None:
    tab = open_tab(width)
    tab.locator(".scale button[data-scale=linear]").first.click()
    overlaps = tab.locator(".chart svg").evaluate_all(
        """all => all.flatMap(svg => {
            const texts = [...svg.querySelectorAll("text")];
            const boxes = texts.map(t => t.getBoundingClientRect());
            return boxes.flatMap((a, i) => boxes.slice(i + 1).map((b, j) => [a, b, texts[i], texts[i + 1 + j]]))
                .filter(([a, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
                .map(pair => pair[2].textContent + " and " + pair[3].textContent);
        })"""
    )
    assert not overlaps


def test_legend_click_toggles_the_curve_in_every_panel(open_tab: Open) -> None:
    tab = open_tab()
    entry = tab.locator(".entry").nth(1)
    assert entry.get_attribute("aria-pressed") == "true"
    with_it = [i for i in range(len(REPORT.panels)) if "fixup" in curves(tab, i)]
    assert with_it == [0, 1, 2, 3, 4]
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    assert not [i for i in range(len(REPORT.panels)) if "fixup" in curves(tab, i)]
    assert curves(tab, 0) == [name for name in NAMES if name != "fixup"]
    entry.press("Enter")
    assert [i for i in range(len(REPORT.panels)) if "fixup" in curves(tab, i)] == with_it


@pytest.mark.parametrize("how", ["shift", "double"])
def test_legend_isolates_a_curve_and_shows_all_again(open_tab: Open, how: str) -> None:
    tab = open_tab()
    entry = tab.locator(".entry").nth(2)

    def isolate() -> None:
        if how == "shift":
            entry.click(modifiers=["Shift"])
        else:
            entry.dblclick()

    isolate()
    assert curves(tab, 0) == [EVIL]
    assert curves(tab, 1) == [EVIL]
    tab.locator("#all").click()
    assert curves(tab, 0) == list(NAMES)
    assert tab.locator("#all").is_hidden()
    isolate()
    isolate()
    assert curves(tab, 0) == list(NAMES)


def test_hiding_every_curve_says_so(open_tab: Open) -> None:
    tab = open_tab()
    for entry in tab.locator(".entry").all():
        entry.click()
    assert tab.locator(".chart svg").first.get_by_text("all curves are hidden").is_visible()


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize(
    ("panel", "name", "index", "texts"),
    [
        (0, "he_in", 10, ["he_in", "3.16e5", f"layer1.10 {EVIL}", "residual block 11"]),
        (0, EVIL, 53, [EVIL, "5.01e-6", f"layer3.17 {EVIL}", "residual block 54"]),
        (1, "he_in", 20, ["he_in", "1e300", "residual block 21"]),
        (2, "fixup", 1, ["fixup", "2", "residual block 4"]),
        (4, "fixup", 0, ["fixup", "1.2e-3", "η 1e-3"]),
    ],
)
def test_hover_reads_the_point(open_tab: Open, width: int, panel: int, name: str, index: int, texts: list[str]) -> None:
    tab = open_tab(width)
    tooltip = tab.locator("#tooltip")
    assert tooltip.is_hidden()
    x, y = point_at(tab, panel, name, index)
    tab.mouse.move(x + 1, y - 1)
    lines = tooltip.locator("span, b, .where").all_text_contents()
    assert lines[0] == texts[0]
    assert set(texts) <= set(lines)
    assert inside(tab, tooltip)
    tab.mouse.move(2, 2)
    assert tooltip.is_hidden()


def test_touch_reads_the_point(open_tab: Open) -> None:
    tab = open_tab(390, 844, has_touch=True, is_mobile=True)
    x, y = point_at(tab, 0, "he_in", 10)
    tab.touchscreen.tap(x, y)
    assert "3.16e5" in tab.locator("#tooltip").inner_text()
    assert inside(tab, tab.locator("#tooltip"))


def test_arrow_keys_read_the_points(open_tab: Open) -> None:
    tab = open_tab()
    svg = tab.locator(".chart svg").first
    svg.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        svg.press(key)
    assert "residual block 3" in tab.locator("#tooltip").inner_text()
    svg.press("ArrowDown")
    assert tab.locator("#tooltip .name span").first.text_content() == "fixup"
    svg.press("Escape")
    assert tab.locator("#tooltip").is_hidden()


def test_scale_toggles_one_panel(open_tab: Open) -> None:
    tab = open_tab()
    figure = tab.locator(".panel").nth(2)
    other = tab.locator(".chart svg").nth(0).inner_html()
    assert curves(tab, 2) == ["fixup"]
    assert figure.locator(".gaps").nth(0).is_visible()
    figure.locator("[data-scale=linear]").first.click()
    assert curves(tab, 2) == ["fixup", EVIL]  # zeros have a place on a linear axis
    assert figure.locator(".gaps").nth(0).is_hidden()
    assert figure.locator(".scale [aria-pressed=true]").text_content() == "linear"
    assert tab.locator(".chart svg").nth(0).inner_html() == other


def test_names_with_markup_are_text(open_tab: Open) -> None:
    tab = open_tab()
    assert tab.locator("h1").text_content() == REPORT.title
    assert tab.locator(".entry span").nth(2).text_content() == EVIL
    assert tab.locator(".card h2 span").nth(1).text_content() == EVIL
    assert tab.locator("script").count() == 2


def background(tab: Tab) -> list[int]:
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    return [int(channel) for channel in re.findall(r"\d+", colour)[:3]]


def test_dark_mode_follows_the_system_and_the_button(open_tab: Open) -> None:
    light, dark = open_tab(color_scheme="light"), open_tab(color_scheme="dark")
    assert min(background(light)) > 200
    assert max(background(dark)) < 60
    for tab, other in ((light, dark), (dark, light)):
        before = background(other)
        tab.locator("#theme").click()
        assert background(tab) == before
        tab.locator("#theme").click()


@pytest.mark.parametrize("width", [320, 390, 699, 1200])
def test_page_does_not_scroll_sideways(open_tab: Open, width: int) -> None:
    tab = open_tab(width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    lefts = set(tab.locator(".panel").evaluate_all("all => all.map(p => p.getBoundingClientRect().left)"))
    assert len(lefts) == (1 if width < 700 else 2)


def test_legend_of_a_phone_shows_every_name_whole(open_tab: Open) -> None:
    tab = open_tab(390)
    legend = tab.locator("#legend")
    assert legend.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert legend.evaluate("e => e.clientHeight <= innerHeight / 4 + 1")
    for entry, name in zip(legend.locator(".entry").all(), NAMES, strict=True):
        entry.scroll_into_view_if_needed()
        assert inside(tab, entry)
        assert entry.locator("span").text_content() == name
        assert entry.locator("span").evaluate("e => e.scrollWidth <= e.clientWidth")


def test_charts_follow_the_width(open_tab: Open) -> None:
    tab = open_tab(1200)
    tab.set_viewport_size({"width": 390, "height": 844})
    settle(tab)
    svg = tab.locator(".chart svg").first
    box = svg.bounding_box()
    assert box
    assert box["width"] < 390
    assert float((svg.get_attribute("viewBox") or "").split()[2]) == pytest.approx(box["width"], abs=1)


def test_download_gives_the_data(open_tab: Open, tmp_path: Path) -> None:
    tab = open_tab()
    with tab.expect_download() as waiting:
        tab.locator("#download").click()
    waiting.value.save_as(tmp_path / "data.json")
    assert json.loads((tmp_path / "data.json").read_text()) == json.loads(json.dumps(page_data(REPORT)))


def test_page_without_a_script_shows_tables(open_tab: Open) -> None:
    tab = open_tab(java_script_enabled=False)
    assert tab.locator(".panel table").count() == len(REPORT.panels)
    assert tab.locator(".panel table").first.is_visible()
    assert tab.locator("#legend").is_hidden()


def test_printed_page_keeps_marks_and_draws_charts_for_the_width_of_paper(open_tab: Open) -> None:
    tab = open_tab(width=1600)
    wide = "svg => Number(svg.getAttribute('viewBox').split(' ')[2])"
    chart = tab.locator(".chart svg").first
    on_screen = chart.evaluate(wide)
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.emulate_media(media="print")
    settle(tab)  # an observer of the width would draw now
    assert chart.evaluate(wide) == 660
    exact = "node => getComputedStyle(node).printColorAdjust"
    assert tab.locator(".mark").first.evaluate(exact) == "exact"
    assert not tab.locator("#theme").is_visible()
    tab.emulate_media(media="screen")
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert chart.evaluate(wide) == on_screen


def test_curves_and_their_entries_differ_by_the_shape_of_their_points(open_tab: Open) -> None:
    tab = open_tab()
    shapes = tab.locator("#legend .entry .dots").evaluate_all("all => all.map(dots => dots.getAttribute('d'))")
    assert len(shapes) == len(set(shapes)) == len(NAMES)
    drawn = tab.locator(".chart svg").first.locator(".dots").evaluate_all("all => all.map(d => d.getAttribute('d'))")
    assert len({path.split("m", 1)[1].split("M")[0] for path in drawn}) == len(NAMES)


def ticks(tab: Tab, axis: str) -> list[list[str]]:
    """The labels of an axis of every chart, 'end' for the vertical one and 'middle' for the horizontal one."""
    read = "(svg, axis) => [...svg.querySelectorAll(`text[text-anchor=${axis}]`)].map(text => text.textContent)"
    return [svg.evaluate(read, axis) for svg in tab.locator(".chart svg").all()]


def test_panels_beside_each_other_write_their_numbers_alike(open_file: Open, tmp_path: Path) -> None:
    short, long = (Panel("p", (Curve("a", (1.0, top)),)) for top in (70.0, 1e12))
    section = Section("part", panels=(short,), name="part")
    write_page(Page("report", panels=(short, long), sections=(section,)), tmp_path / "page.html")
    first, second, alone = ticks(open_file(tmp_path / "page.html"), "end")
    assert first == ["100", "101"]  # powers of ten: the exponent is a text of its own
    assert all(re.fullmatch(r"10\d+", label) for label in second)
    assert alone == ["1", "2", "5", "10", "20", "50"]


def test_small_numbers_are_powers_of_ten_on_a_linear_axis_too(open_file: Open, tmp_path: Path) -> None:
    small = Panel("p", (Curve("a", (1e-4, 3e-4)),), log_y=False)
    write_page(Page("report", panels=(small,)), tmp_path / "page.html")
    (labels,) = ticks(open_file(tmp_path / "page.html"), "end")
    assert {"0", "10−4", "1.5·10−4", "2·10−4"} <= set(labels)


def test_epochs_are_whole_numbers_while_one_is_in_progress(open_file: Open, tmp_path: Path) -> None:
    epochs = Panel("p", (Curve("a", (3.0, 2.0, 1.5, 1.2), (1.0, 2.0, 3.0, 3.7)),), log_y=False, x_label="epoch")
    write_page(Page("report", panels=(epochs,)), tmp_path / "page.html")
    assert ticks(open_file(tmp_path / "page.html"), "middle") == [["1", "2", "3"]]
