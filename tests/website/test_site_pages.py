"""The pages of the documentation site, before they are built."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import griffe  # noqa: F401  (the file is left out where the packages of the site are missing)
import latex2mathml  # noqa: F401
import pytest
import zensical  # noqa: F401

import build_site
import doctest_fences
import markdown_pages
import normfree
from link_check import broken_links
from markdown_pages import Links, Page, for_python_markdown, promoted, sections
from methods_page import VALUES, law_latex, residual_latex
from normfree.methods import get, names


@pytest.mark.parametrize("module", [markdown_pages, doctest_fences])
def test_examples_in_docstrings(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


def test_links_follow_a_section_to_its_page() -> None:
    pages = [
        Page("index.md", "[a](guide.md#one) [b](guide.md#two) [c](../LICENSE) [d](http://x.org)", "docs/start.md"),
        Page("guides/one.md", "# One\n\n[b](#two) [self](#one) ![p](images/demo.png)", "docs/guide.md"),
        Page("guides/two.md", "# Two\n\n```\n[a](#one)\n```", "docs/guide.md"),
    ]
    links = Links(pages)
    index, one, two = (links.rewritten(page) for page in pages)
    assert index == "[a](guides/one.md#one) [b](guides/two.md#two) c [d](http://x.org)\n"
    assert "[b](two.md#two) [self](#one) ![p](../files/docs/images/demo.png)" in one
    assert "[a](#one)" in two  # code stays
    assert links.files == {"docs/images/demo.png"}


def test_sections_keep_all_text() -> None:
    text = '# T\n\nintro\n\n<a id="x"></a>\n\n## A\n\n```\n## no heading\n```\n\n## B\n\n### C\n'
    parts = sections(text)
    assert list(parts) == ["", "A", "B"]
    assert parts["A"].startswith('<a id="x"></a>')
    assert promoted(parts["B"]) == "# B\n\n## C\n"
    assert "".join("".join(parts.values()).split()) == "".join(text.split())


def test_lists_are_indented_by_four() -> None:
    text = "1. a\n\n   ```\n   code\n     more\n   ```\n2. b\n   - c\n     d\n\nend\n\n    code"
    expected = "1. a\n\n    ```\n    code\n      more\n    ```\n2. b\n    - c\n        d\n\nend\n\n    code"
    assert for_python_markdown(text) == expected


def test_every_method_has_its_equation() -> None:
    page = next(page.text for page in build_site.collected() if page.path == "methods.md")
    assert set(names()) <= set(re.findall(r"^### (\w+)$", page, re.M))
    for name in names():
        for law in get(name).rule.laws().values():
            text = law.text.removeprefix("learnable, ")
            assert text in VALUES or text in ("0", "1", "none"), f"methods_page.VALUES lacks {text}"
    assert residual_latex(get("sqrt_half")) == r"x_{l+1} = p\bigl(c\,(x_l + f(x_l))\bigr)"
    assert law_latex(get("sqrt_half").rule.c) == r"\sqrt{\tfrac{1}{2}}"
    assert law_latex(get("fixup").rule.beta) == r"1\ \text{at first, learnable}"


def test_every_public_name_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.findall(r"^::: ([\w.]+)$", build_site.api_page(), re.M)
    assert {name.rpartition(".")[2] for name in shown} >= set(normfree.__all__) - {"__version__"}
    monkeypatch.setattr(normfree, "__all__", [*normfree.__all__, "made_up"])
    with pytest.raises(ValueError, match="made_up"):
        build_site.api_page()


def test_every_claim_is_on_the_page_of_its_paper() -> None:
    pages = {page.path: page.text for page in build_site.claim_pages()}
    listed = re.findall(r"^\| \[(\w+)/(\w+)\]\(#", pages["claims/index.md"], re.M)
    assert len(listed) >= 60
    for paper, claim in listed:
        assert f"## {paper}/{claim}: " in pages[f"claims/{paper}.md"]


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a id="x"></a><a href="b.html#y">b</a><a href="#x">x</a><img src="no.png">')
    (tmp_path / "b.html").write_text('<a href="a.html#x">a</a><a href="c.html">c</a>')
    assert broken_links(tmp_path) == ["a.html: b.html#y (no such anchor)", "a.html: no.png", "b.html: c.html"]
