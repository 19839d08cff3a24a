"""The documentation site in a real Chromium: run with -m browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import griffe  # noqa: F401  (the file is left out where the packages of the site are missing)
import latex2mathml  # noqa: F401
import pytest
import zensical  # noqa: F401

import build_site

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning and with every link checked."""
    folder = tmp_path_factory.mktemp("site")
    assert build_site.build(folder) > 30
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(site))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


Open = Callable[..., "Tab"]


@pytest.fixture
def open_tab(browser: Browser, address: str) -> Iterator[Open]:
    """Opens a tab; at the end there must have been no error, no failed request and none to the network."""
    wrong: list[str] = []
    contexts = []

    def open_it(path: str = "index.html", *, base: str = address, width: int = 1200, **options: object) -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: m.type in ("error", "warning") and wrong.append(f"{tab.url}: {m.text}"))
        tab.on("pageerror", lambda error: wrong.append(f"{tab.url}: {error}"))
        tab.on("response", lambda r: r.status >= 400 and wrong.append(f"{tab.url}: {r.status} {r.url}"))
        allowed = (address, "file:", "blob:", "data:")
        tab.on("request", lambda r: r.url.startswith(allowed) or wrong.append(f"{tab.url}: {r.url}"))
        tab.goto(base + path)
        return tab

    yield open_it
    for context in contexts:
        context.close()
    assert not wrong


def paths(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))


def test_every_page_opens_without_an_error(site: Path, address: str, open_tab: Open) -> None:
    tab = open_tab()
    for path in paths(site):
        tab.goto(address + path)
        assert tab.locator("h1").first.is_visible(), path
        unloaded = tab.locator("img").evaluate_all(
            "all => all.filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        )
        assert unloaded == [], path


@pytest.mark.parametrize(("width", "media"), [(390, "screen"), (768, "screen"), (720, "print")])
def test_no_page_is_too_wide(
    site: Path, address: str, open_tab: Open, width: int, media: Literal["screen", "print"]
) -> None:
    tab = open_tab(width=width)
    tab.emulate_media(media=media)
    for path in paths(site):
        tab.goto(address + path)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, path


def test_pictures_keep_a_readable_size_on_a_phone(open_tab: Open) -> None:
    tab = open_tab("index.html", width=390)
    picture = tab.locator("article img").first
    assert picture.evaluate("i => i.getBoundingClientRect().width") >= 600
    assert picture.locator("xpath=..").evaluate("p => p.scrollWidth > p.clientWidth")


@pytest.mark.parametrize("served", [True, False])
def test_search_finds_a_name(site: Path, address: str, open_tab: Open, served: bool) -> None:
    base = address if served else f"{site.as_uri()}/"
    tab = open_tab(base=base)
    tab.get_by_role("button", name="Search").first.click()
    words = tab.get_by_role("combobox", name="Search")
    words.fill("clip_grad_agc_")
    tab.get_by_role("listbox").get_by_text("clip").first.wait_for()
    words.press("Enter")
    tab.wait_for_url(lambda url: url.startswith(base) and "index.html" not in url)
    assert "clip_grad_agc_" in tab.locator("article").inner_text()


def test_claims_are_filtered_by_words_and_result(open_tab: Open) -> None:
    tab = open_tab("claims/index.html")
    after = "document.querySelectorAll('.filter ~ * tbody tr')"  # the words above are explained whatever is chosen
    shown = f"() => [...{after}].filter(r => r.offsetHeight > 0).map(r => r.innerText)"
    everything = tab.evaluate(shown)
    assert len(everything) >= 60
    tab.locator(".filter select").select_option("fails")
    failing = tab.evaluate(shown)
    assert 0 < len(failing) < 10
    assert all("fails" in row for row in failing)
    tab.locator(".filter select").select_option("not run")
    assert 0 < len(tab.evaluate(shown)) < len(everything)
    tab.locator(".filter select").select_option("all")
    tab.locator(".filter input").fill("theorem wninit")
    assert all("Theorem" in row and "wninit" in row for row in tab.evaluate(shown))
    tab.locator(".filter input").fill("")
    assert tab.evaluate(shown) == everything
    tab.locator("a", has_text="fixup/thm2").click()
    tab.wait_for_url("**/claims/fixup.html#fixup-thm2")


def test_models_are_filtered_by_name(open_tab: Open) -> None:
    tab = open_tab("models.html")
    tab.locator(".filter input").fill("resnet18 nf")
    rows = tab.locator("tbody tr:visible")
    assert rows.count() >= 1
    assert all("resnet18" in text for text in rows.all_inner_texts())  # also in rows whose first cell is empty


def test_formulas_are_rendered(open_tab: Open) -> None:
    tab = open_tab("methods.html")
    assert tab.locator("math").count() > 60
    fraction = tab.locator("math mfrac").first
    above, below = fraction.locator("> *").first.bounding_box(), fraction.locator("> *").last.bounding_box()
    assert above is not None
    assert below is not None
    assert above["y"] + above["height"] <= below["y"] + 1  # numerator above the denominator: it is drawn as a formula


@pytest.mark.parametrize("width", [390, 1200])
def test_an_option_of_a_command_stands_on_one_line(open_tab: Open, width: int) -> None:
    for path in ("commands.html", "claims/not-run.html"):
        options = open_tab(path, width=width).locator("code .option")
        assert options.count() > 5
        assert set(options.evaluate_all("all => all.map(option => option.getClientRects().length)")) == {1}


def test_colours_follow_the_system_and_the_button(open_tab: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    dark, light = open_tab(color_scheme="dark"), open_tab(color_scheme="light")
    assert dark.evaluate(ground) < 150 < 600 < light.evaluate(ground)
    light.locator("label[title='Switch to dark mode']:visible").click()
    light.wait_for_function(f"{ground} < 150")


def test_pages_work_from_a_file(site: Path, open_tab: Open) -> None:
    tab = open_tab("guides/convert.html", base=f"{site.as_uri()}/")
    tab.locator("article a", has_text="every model and method").click()
    tab.wait_for_url("**/models.html")
    tab.locator(".filter input").wait_for()


def test_print_leaves_the_navigation_out(open_tab: Open) -> None:
    tab = open_tab("claims/fixup.html")
    tab.emulate_media(media="print")
    assert not tab.locator(".md-header").is_visible()
    assert not tab.locator(".md-sidebar").first.is_visible()
    details = tab.locator("details table").first
    assert details.is_visible()  # what is folded on the screen is on paper
