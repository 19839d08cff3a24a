"""Builds the documentation site: collects the pages, runs zensical on them, and checks every link.

Run `make docs`, or `python website/build_site.py [FOLDER]`; the default folder is `site`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import normfree
from example_pages import NAMES, TITLES, example_page
from link_check import broken_links
from markdown_pages import ROOT, Links, Page, document, for_python_markdown, promoted, sections
from methods_page import EQUATION, formula, markdown_text, methods_page
from normfree.report.page import set_formulas

HERE = Path(__file__).parent
STAGE = ROOT / "build" / "website"

PLAIN = {  # documents that are one page each
    "docs/start.md": "index.md",
    "docs/cluster.md": "cluster.md",
    "docs/frameworks.md": "frameworks.md",
    "docs/diagnosis.md": "diagnosis.md",
    "docs/kernels.md": "kernels.md",
    "docs/reliability.md": "reliability.md",
    "docs/findings.md": "findings.md",
    "docs/errata.md": "errata.md",
    "docs/benchmarks.md": "benchmarks.md",
    "docs/design.md": "design.md",
    "docs/moved.md": "moved.md",
    "examples/README.md": "examples/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
GUIDES = {  # sections of docs/guide.md by their page
    "guides/convert.md": ("Convert your own model",),
    "guides/debug.md": ("See where the signal goes",),
    "guides/train.md": ("Build and train in your own loop", "Train", "Translate, and other Transformers"),
    "guides/reproduce.md": ("Reproduce the papers' claims",),
}
EXAMPLES_OF = {  # the examples that belong to a guide
    "guides/convert.md": ("convert_timm", "convert_gpt2", "private_training"),
    "guides/debug.md": ("debug_training", "thousand_layers"),
    "guides/train.md": ("training_loop", "thousand_layers", "add_a_method"),
}
API = {  # every public name, by what it is for; records that they take or return follow
    "Build": ("build", "discover", "initialize_", "ResidualPlan"),
    "Convert": ("convert", "convert_", "fold_", "fold_batchnorm"),
    "Diagnose": ("diagnose", "Monitor"),
    "Optimize": ("param_groups", "clip_grad_agc_", "find_lr"),
    "Train": ("TrainConfig", "recipe", "fit", "evaluate", "load"),
    "Compare and extend": ("compare", "register"),
}
RECORDS = {
    "Diagnose": ("normfree.diagnostics.Diagnosis", "normfree.diagnostics.verdict.Verdict"),
    "Optimize": ("normfree.optim.rate_search.RateSearch",),
    "Train": ("normfree.train.RunResult",),
    "Compare and extend": (
        "normfree.comparison.comparison_result.Comparison",
        "normfree.methods.Method",
        "normfree.methods.Law",
        "normfree.methods.Rule",
    ),
}
CONSTRUCTED = ("Monitor", "Method", "Law", "Rule")  # classes that users make themselves: they show their arguments
MEMBERS = {  # what users call on an object
    "Diagnosis": ("save", "to_json"),
    "Verdict": ("word", "is_healthy", "at_least"),
    "Monitor": ("step", "save"),
    "RateSearch": ("save",),
    "Comparison": ("points", "save", "to_json"),
    "TrainConfig": ("with_changes", "to_toml", "from_toml"),
}
FILTER = '<div class="filter" data-kinds="{kinds}"></div>\n\n'


def guide_pages() -> list[Page]:
    """Return the four guides, which are sections of docs/guide.md."""
    parts = sections(document("docs/guide.md"))
    used = [heading for headings in GUIDES.values() for heading in headings]
    if unused := set(parts) - {"", *used}:
        raise ValueError(f"expected every section of docs/guide.md in GUIDES, found {sorted(unused)} in no guide")
    pages = []
    for path, headings in GUIDES.items():
        if len(headings) == 1:
            text = promoted(parts[headings[0]])
        else:
            text = "# Train without normalization\n\n" + "\n".join(parts[heading] for heading in headings)
        if examples := EXAMPLES_OF.get(path):
            links = ", ".join(f"[{TITLES[name]}](../examples/{name}.py)" for name in examples)
            text += f"\nExamples that run: {links}.\n"
        pages.append(Page(path, text, "docs/guide.md"))
    return pages


def claim_pages() -> list[Page]:
    """Return the ledger of claims as a page with a filter, and a page per paper."""
    pages = []
    for heading, text in sections(document("docs/claims.md")).items():
        if heading == "Contents":
            continue
        if not heading:
            contents = sections(document("docs/claims.md"))["Contents"]
            text = re.sub(r"^Written by .*?\n\n", "", text, flags=re.M | re.S)  # a word to those who would edit it
            text += "\n" + FILTER.format(kinds="holds,fails,undecided,not run") + _formulas(contents)
            pages.append(Page("claims/index.md", text, "docs/claims.md"))
        else:
            name = heading.partition(":")[0].lower().replace("what was not run", "not-run")
            text = _formulas(promoted(text)).replace("\\`", "`")
            pages.append(Page(f"claims/{name}.md", text, "docs/claims.md"))
    return pages


def _formulas(text: str) -> str:
    """Return claims with their powers and indices set as such; code and pictures stay as they are."""
    parts = re.split(r"(`[^`\n]*`|!?\[[^\]\n]*\]\([^)\n]*\))", text)
    return "".join(part if number % 2 else set_formulas(part.replace("\\_", "_")) for number, part in enumerate(parts))


def _unbroken(row: re.Match[str]) -> str:
    """Return the row of a table in which no line breaks behind a sign, in 'not run', or in names such as 'Figure 2'."""
    named = r"(?<=[✓✗◐–<≥≤]) (?=[\w.])|(?<=\b[Ff]igure) (?=\d)|(?<=\b[Tt]able) (?=\d)|(?<=\bnot) (?=run\b)"
    return re.sub(named, "\N{NO-BREAK SPACE}", row.group(0))


def api_page() -> str:
    """Return the reference of the public names, which mkdocstrings fills in from their docstrings."""
    named = {name for names in API.values() for name in names}
    if named != set(normfree.__all__) - {"__version__"}:
        raise ValueError(f"expected every public name in API, differing: {named ^ set(normfree.__all__)}")
    lines = ["# Python interface", "", "`import normfree as nf` loads nothing; every name loads on first use.", ""]
    for title, names in API.items():
        lines += [f"## {title}", ""]
        for name in (*(normfree._PUBLIC[name] + "." + name for name in names), *RECORDS.get(title, ())):
            short = name.rpartition(".")[2]
            lines += [f"::: {name}", "    options:"]
            lines += [f"      merge_init_into_class: {str(short in CONSTRUCTED).lower()}"]
            lines += [f"      members: [{', '.join(MEMBERS.get(short, ()))}]", ""]
            if short == "TrainConfig":
                lines += ["The page of [settings](settings.md) lists the arguments.", ""]
    return "\n".join(lines)


def settings_page() -> str:
    """Return the settings of a training run, with their defaults and meanings."""
    listing = normfree.TrainConfig().to_toml(explained=True)
    rows = re.findall(r"^(?:# )?(\w+) = (.*?) +# (.*)$", listing, re.M)
    if len(rows) != len(fields(normfree.TrainConfig)):
        raise ValueError(f"expected a line for every setting, got {len(rows)} in:\n{listing}")
    lines = [
        "# Settings of a run",
        "",
        "These are all settings of `nf.TrainConfig`. `--set NAME=VALUE` of `normfree train` changes one, and",
        "`normfree train RECIPE --show` prints those of a recipe as TOML. `--config FILE` reads such a file.",
        "",
        "| setting | default | meaning |",
        "| --- | --- | --- |",
    ]
    for name, default, meaning in rows:
        shown = "none" if default == "…" else f"`{default}`"
        lines.append(f"| `{name}` | {shown} | {markdown_text(meaning).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def collected() -> list[Page]:
    """Return all pages of the site, with the links of the repository."""
    readme = sections(document("README.md"))
    pages = [Page(path, document(source), source) for source, path in PLAIN.items()]
    pages += [*guide_pages(), *claim_pages()]
    models = document("docs/models.md").replace(
        "\n| model | method |", "\n" + FILTER.format(kinds="learns,slow,diverges,refused") + "| model | method |", 1
    )
    pages.append(Page("models.md", models, "docs/models.md"))
    pages.append(Page("commands.md", promoted(readme["On the command line"]), "README.md"))
    when = readme["What to use when"].partition("\n\nEvery method")[0]
    pages.append(Page("methods.md", methods_page(when), "README.md"))
    pages.append(Page("api.md", api_page(), "docs/api.md"))
    pages.append(Page("settings.md", settings_page(), "docs/settings.md"))
    pages += [Page(f"examples/{name}.md", example_page(name), f"examples/{name}.py") for name in NAMES]
    return pages


def stage(folder: Path) -> None:
    """Write the settings, the pages and the files that they link to into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = collected()
    links = Links(pages)
    for page in pages:
        path = folder / "pages" / page.path
        path.parent.mkdir(parents=True, exist_ok=True)
        text = for_python_markdown(links.rewritten(page))
        text = re.sub(r"^\|.*$", _unbroken, text, flags=re.M)
        equation = re.compile(r"^    x_?\S* = p\( c · .*$", re.M)  # the equation of the documents
        path.write_text(equation.sub(lambda _: formula(EQUATION, block=True), text), encoding="utf-8")
    for name in links.files:
        target = folder / "pages" / "files" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    shutil.copytree(HERE / "assets", folder / "pages" / "assets")
    shutil.copyfile(HERE / "zensical.toml", folder / "zensical.toml")


def build(site: Path) -> int:
    """Build the site, and return its number of pages.

    Raises:
        ValueError: If zensical fails or warns, or if a link leads nowhere.
    """
    stage(STAGE)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=STAGE, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode or re.search(r"warn|error", said, re.I):
        raise ValueError(f"expected a build without warnings, zensical says:\n{said}")
    if broken := broken_links(STAGE / "site"):
        raise ValueError("expected every link to lead somewhere, these do not:\n" + "\n".join(broken))
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(STAGE / "site", site)
    return len(list(site.rglob("*.html")))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    try:
        count = build(target)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{count} pages in {target}; open {target / 'index.html'}")
