"""The page of a run and the page over many runs in a real Chromium: run with -m browser."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chromium import Open
from normfree.report.page import Page, write_page
from normfree.train.run.run_list import runs_page
from normfree.train.run.run_page import WatchedRun, run_page
from watched_folders import records

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

pytestmark = pytest.mark.browser

EVIL = "<script>alert(1)</script>"
RUNNING = WatchedRun(
    folder=Path("runs/a"), state="running", model="resnet8", method=EVIL, data="fashion14", epochs=4, epoch=2.5,
    loss=0.7, accuracy=0.71, validation=(1.2, 0.4), throughput=800.0, classes=10, seconds=5.0, left=60.0, updated=100.0,
)  # fmt: skip
SIGNALS: list[dict[str, Any]] = [
    {
        "step": 10 * e, "epoch": e, "status": "preserved", "sentence": "the signal is preserved",
        "forward": [1.0 + 0.1 * e * i for i in range(50)], "backward": [1.0 + 0.2 * e * i for i in range(50)],
        "forward_in_all": 1.2, "backward_in_all": 0.8,
    }
    for e in (0, 1, 2)
]  # fmt: skip
DIVERGED = [{**record, "train_loss": math.nan} for record in records(1)]
NAMES = [f"resnet20-fixup-fashion14-lr0.1-seed{i}-2e83829dbe3d" for i in range(40)]
MANY = [
    replace(RUNNING, folder=Path(name), state=state)  # type: ignore[arg-type]
    for name, state in zip(NAMES, ["running", "finished", "diverged", "stopped", "damaged"] * 8, strict=True)
]
SETTINGS = {"model": "resnet8", "milestones": [0.5, 0.75]}
PAGES: dict[str, Callable[[], Page]] = {
    "running": lambda: run_page(RUNNING, f"run {EVIL}", records(2), SIGNALS, SETTINGS),
    "starting": lambda: run_page(replace(RUNNING, state="starting", epoch=None, loss=None), "run", []),
    "one epoch": lambda: run_page(replace(RUNNING, state="finished", test=(1.0, 0.6)), "run", records(1)),
    "diverged": lambda: run_page(replace(RUNNING, state="diverged", loss=math.nan), "run", DIVERGED, SIGNALS[:1]),
    "many": lambda: runs_page(MANY, NAMES, {run.folder: records(9) for run in MANY[:32]}, Path()),
    "none": lambda: runs_page([], [], {}, Path()),
}


def wait_for_title(tab: Tab, title: str) -> None:
    """Wait until a page of this title is there; the policy of a page forbids the browser's own way to wait."""
    for _ in range(100):
        if tab.title() == title:
            return
        tab.wait_for_timeout(100)
    pytest.fail(f"expected the title {title!r}, got {tab.title()!r}")


@pytest.mark.parametrize("width", [320, 390, 1200])
@pytest.mark.parametrize("name", PAGES)
def test_page_opens_without_an_error_and_does_not_scroll_sideways(
    open_file: Open, tmp_path: Path, name: str, width: int
) -> None:
    page = PAGES[name]()
    write_page(page, tmp_path / "page.html")
    tab = open_file(tmp_path / "page.html", width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("h1").text_content() == page.title
    assert tab.locator(".chart svg").count() == len(page.all_panels)
    drawn = tab.locator(".chart svg path").evaluate_all("all => all.map(path => path.getAttribute('d'))")
    assert bool(drawn) == bool(page.all_panels)
    assert not [path for path in drawn if "NaN" in path or "Infinity" in path]


@pytest.mark.parametrize("name", ["running", "many"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_colours_of_the_system(open_file: Open, tmp_path: Path, name: str, scheme: str) -> None:
    write_page(PAGES[name](), tmp_path / "page.html")
    tab = open_file(tmp_path / "page.html", color_scheme=scheme)
    shade = re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[0]
    assert (int(shade) > 200) == (scheme == "light")


@pytest.mark.parametrize("name", ["running", "many"])
def test_print_is_light_and_cuts_no_table(open_file: Open, tmp_path: Path, name: str) -> None:
    write_page(PAGES[name](), tmp_path / "page.html")
    tab = open_file(tmp_path / "page.html", 794, color_scheme="dark")  # the width of A4
    tab.emulate_media(media="print")
    assert tab.evaluate("getComputedStyle(document.body).colorScheme") in ("light", "normal")
    assert tab.locator("#theme").is_hidden()
    for table in tab.locator(".wide").all():
        assert table.evaluate("e => getComputedStyle(e).overflowY") == "visible"
    mark = tab.locator(".mark").first
    assert mark.evaluate("e => getComputedStyle(e).printColorAdjust") == "exact"
    assert len(tab.pdf(format="A4")) > 10_000


def test_running_page_loads_itself_again_until_the_run_ends(open_file: Open, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(replace(PAGES["running"](), refresh=1), path)
    tab = open_file(path)
    assert tab.locator("#written").inner_text() in ("Written 0 s ago.", "Written 1 s ago.")
    tab.locator(".entry", has_text="validation").click()  # hides its curves
    tab.locator("#theme").click()
    before = tab.evaluate("document.documentElement.dataset.theme")
    tab.evaluate("scrollTo(0, 200)")
    write_page(replace(PAGES["running"](), refresh=1, title="later"), path)
    wait_for_title(tab, "later")
    assert tab.locator(".entry", has_text="validation").get_attribute("aria-pressed") == "false"
    assert tab.evaluate("document.documentElement.dataset.theme") == before
    write_page(replace(PAGES["one epoch"](), title="ended"), path)
    wait_for_title(tab, "ended")
    write_page(replace(PAGES["one epoch"](), title="never shown"), path)
    tab.wait_for_timeout(2500)
    assert tab.title() == "ended"


def test_page_of_a_killed_run_says_that_nothing_is_new(open_file: Open, tmp_path: Path) -> None:
    write_page(replace(PAGES["running"](), written=time.time() - 600), tmp_path / "page.html")
    tab = open_file(tmp_path / "page.html")
    assert tab.locator("#written").inner_text() == (
        "Written 10 min ago. Nothing new since: the run may have been stopped."
    )


def test_page_over_many_links_to_the_page_of_a_run(open_file: Open, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a: b #1?"
    folder.mkdir(parents=True)
    write_page(PAGES["one epoch"](), folder / "page.html")
    run = replace(RUNNING, folder=folder, state="finished")
    write_page(runs_page([run], ["a: b #1?"], {folder: records(3)}, tmp_path), tmp_path / "all.html")
    tab = open_file(tmp_path / "all.html")
    tab.locator("td.files a").click()
    wait_for_title(tab, "run")
