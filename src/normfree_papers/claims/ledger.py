"""The ledger: every claim beside its measured numbers, as Markdown or as one HTML page.

Each number links to the JSON file that holds it, with its name there, to the configurations of its training runs, and
to the command that measures it again. The ledger depends only on the claims and the results.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from normfree.report import Column, Link, Table, to_markdown
from normfree.report.page import Card, Page, Section, render_page
from normfree.report.tables import MARKS as TABLE_MARKS
from normfree.storage.writing import explain_os_errors, write_text
from normfree_papers.claims.claim import Claim
from normfree_papers.claims.claim_status import (
    CHECK_COLUMNS,
    RUN_COLUMNS,
    Entry,
    cells,
    counts_of,
    entries,
    limits_of,
    not_run_of,
    origin_of,
    rough_duration,
    run_cells,
)
from normfree_papers.claims.registry import PAPERS
from normfree_papers.claims.reproduction import Result, default_command, panels_of, result_path, tables_of
from normfree_papers.claims.run_cache import missing_runs

DRAWINGS = {  # figures without numbers, which need no claim
    "fixup": {
        "Figure 1": "a drawing of three residual blocks: with batch norm, without, and with Fixup's scalars",
        "Figure 2": "a drawing that shows sets of layers to which Theorem 2 applies",
    },
    "robust": {"Figure 1": "a drawing of the identity block and the convolutional block"},
    "normdead": {
        "Figure 1": "a drawing of the axes of inputs: batch, channels and pixels",
        "Figure 2": "a drawing of the axes over which four normalization layers average",
        "Figure 3": "a drawing of the skip connections of ResNets, DenseNets and highway networks",
    },
}
_LONG = 12  # rows; longer tables are folded
_FILES = {"result": "result.json", "configuration": "config.toml", "metrics": "metrics.jsonl"}
_WORDS = (
    ("holds, fails, undecided", "A check holds if its interval lies in the expected range, and fails if it lies "
     "outside. Otherwise, and with a single value, it is undecided. A claim fails if a main check fails, and holds if "
     "all main checks hold."),
    ("[95 %]", "The confidence interval of the mean over the seeds or draws: by Student's t, or, for a share of yes "
     "and no, by the exact binomial limits. Of a share or a percentage, only the possible part is shown."),
    ("n", "The number of seeds or draws; 'exact' for a number without randomness, of which one value decides."),
    ("by", "Where the expected range comes from: a figure of the paper, derived from theory, or our reading of "
     "one of the paper's words."),
    ("aside", "A check of a side remark; it is shown and does not decide."),
    ("paper errs", "The paper's number is wrong; the expected range is that of the correct one."),
    ("stand-in", "Other data or networks than the paper's; counted apart."),
    ("quick run", "A small run on a CPU, which says little about the claim itself."),
    ("fresh, stale, unknown", "Whether today's code would make the same training runs: yes, no, or not known."),
    ("planted error", "An error that our tests put into the library, to see whether the claim notices it."),
    ("made-up runs", "Invented results of training runs, which a claim must judge as failed where they refute it."),
)  # fmt: skip


def write_ledger(path: str | Path, out: str | Path, claims: Sequence[Claim] | None = None) -> None:
    """Write the ledger of the results below `out`.

    Args:
        path: The file; the suffix .md or .html chooses the format.
        out: Folder of the results.
        claims: The claims to write; all by default.

    Raises:
        ValueError: for another suffix, a missing folder, and a stored file that is no result.
        OSError: if the file cannot be written.
    """
    path = require_kind(path)
    if not Path(out).is_dir():
        raise ValueError(f"expected a folder of results at '{out}', found none; name the one that holds them")
    found = entries(out, claims)
    text = render_page(page(found, path.parent)) if path.suffix == ".html" else markdown(found, path.parent)
    with explain_os_errors("the claims", path):
        write_text(path, text)


def require_kind(path: str | Path) -> Path:
    """Return the path of a ledger, or raise `ValueError` if its suffix is not .md or .html."""
    path = Path(path)
    if path.suffix not in (".md", ".html"):
        raise ValueError(f"expected a file that ends in .md or .html to write the claims to, got '{path}'; rename it")
    return path


# Common to Markdown and HTML


def _words(title: str = "") -> Table:
    return Table(title, (Column("word"), Column("meaning")), _WORDS)


def _by_paper(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The entries of each paper that has any."""
    papers = {paper: [entry for entry in found if entry.claim.paper == paper] for paper in PAPERS}
    return {paper: of for paper, of in papers.items() if of}


def _facts(entry: Entry) -> Iterable[tuple[str, str]]:
    """The claim, its measurement and the limits of its verdict: each text with its name."""
    yield from (("The paper", entry.claim.paper_value), ("Measured", entry.claim.how), *limits_of(entry).items())


def _remarks(entry: Entry, result: Result) -> Iterable[tuple[str, str]]:
    """The errors in the paper, and the notes on the result."""
    yield from (("Error in the paper", text) for text in entry.judgement.errata)
    yield from (("Note", text) for text in result.get("notes", []))


def _link(text: str, path: Path, folder: Path) -> Link:
    """A link for a file in `folder`."""
    return Link(text, quote(Path(os.path.relpath(path, folder)).as_posix()))


def _results(entry: Entry, result: Result, folder: Path) -> list[Link]:
    """The file of the shown result, and that of its quick run, if there is one."""
    own, quick = (result_path(entry.out, entry.claim, scale) for scale in (result["scale"], "quick"))
    others = [_link("its quick run", quick, folder)] if own != quick and quick.exists() else []
    return [_link(own.name, own, folder), *others]


def _runs(entry: Entry, folder: Path) -> list[Table]:
    """The table of training runs with links to their files, if there are any runs."""
    if not entry.runs:
        return []
    title = f"{len(entry.runs)} training runs" if len(entry.runs) > 1 else "The training run"
    rows = tuple(run_cells(name, run.result) for name, run in entry.runs.items())
    links = (
        tuple(_link(text, run.path / file, folder) for text, file in _FILES.items() if (run.path / file).exists())
        if run.result is not None
        else ()
        for run in entry.runs.values()
    )
    return [Table(title, tuple(map(Column, RUN_COLUMNS)), rows, links=tuple(links))]


def _missing_runs(entry: Entry) -> list[Table]:
    """The table of missing training runs with their commands, if there are any."""
    rows = tuple(
        (name, rough_duration(seconds), code(default_command(entry.claim, entry.planned["scale"], name)))
        for name, seconds in missing_runs(entry.planned).items()
    )
    title = f"{len(rows)} training run{'s' if len(rows) > 1 else ''} not made"
    return [Table(title, (Column("run"), Column("about", "right"), Column("command")), rows)] if rows else []


def _reasons(entry: Entry) -> Table:
    """The reason for the range of each check, and the name of its number in the JSON."""
    return Table(
        "Why these ranges, and where the numbers are",
        tuple(map(Column, ("check", "why this range", "in the JSON"))),
        tuple((row.check.statement, row.check.why, row.check.name) for row in entry.judgement.rows),
    )


# Markdown


def markdown(found: Sequence[Entry], folder: str | Path) -> str:
    """The ledger as Markdown, with links from `folder` to the results."""
    return "\n\n".join(_blocks(found, Path(folder))) + "\n"


def escape(text: str) -> str:
    """Escape a text for one line of Markdown.

    >>> escape("a*b < c_d _e_ [f]")
    'a\\\\*b &lt; c_d \\\\_e\\\\_ \\\\[f\\\\]'
    """
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]~$])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def code(text: str) -> str:
    """Write a text as inline code, with as many backticks as it needs.

    >>> code("a `b`")
    '`` a `b` ``'
    """
    text = " ".join(text.split())
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    space = " " if longest else ""
    return f"{'`' * (longest + 1)}{space}{text}{space}{'`' * (longest + 1)}"


def _blocks(found: Sequence[Entry], folder: Path) -> Iterable[str]:
    yield "# The claims of the papers, run and judged"
    yield (
        "Written by `make claims` from the claims in `src/normfree_papers` and the measurements in `results`; do not "
        "edit it by hand."
    )
    yield f"{counts_of(found)}."
    yield to_markdown(_words())
    papers = _by_paper(found)
    yield "## Contents"
    for paper, of in papers.items():
        yield f"**[{paper}](#{paper})**: {escape(PAPERS[paper])}"
        yield _contents(of)
        drawn = "; ".join(f"{figure} is {what}" for figure, what in DRAWINGS.get(paper, {}).items())
        if drawn:
            yield f"*Without a claim:* {escape(drawn)}."
    yield "[What was not run](#not-run)"
    for paper, of in papers.items():
        yield f'<a id="{paper}"></a>'
        yield f"## {paper}: {escape(PAPERS[paper])}"
        for entry in of:
            yield from _claim(entry, folder)
    yield '<a id="not-run"></a>'
    yield "## What was not run"
    rows = [(_reference(e), escape(what), time, code(run)) for e in found for what, time, run in not_run_of(e)]
    yield _markdown_table(("claim", "not run", "about", "command"), rows) if rows else "Everything was run."


def _contents(found: Sequence[Entry]) -> str:
    rows = []
    for entry in found:
        summary = "" if entry.status == "not run" else entry.judgement.summary
        texts = entry.claim.where, entry.claim.statement, entry.status_text, summary
        rows.append((_reference(entry), *map(escape, texts)))
    return _markdown_table(("claim", "where", "it says", "status", "checks"), rows)


def _claim(entry: Entry, folder: Path) -> Iterable[str]:
    claim, result = entry.claim, entry.result
    yield f'<a id="{_anchor(claim)}"></a>'
    yield f"### {escape(claim.id)}: {escape(claim.where)}"
    yield f"**{escape(entry.status_text)}**: {escape(claim.statement)}"
    yield from (f"*{name}:* {escape(text)}" for name, text in _facts(entry))
    yield from (f"*Not run:* {escape(what)}, about {time}: {code(run)}" for what, time, run in not_run_of(entry))
    if result is None:
        return
    yield to_markdown(Table("", CHECK_COLUMNS, tuple(tuple(map(escape, cells(row))) for row in entry.judgement.rows)))
    yield from (f"*{name}:* {escape(text)}" for name, text in _remarks(entry, result))
    picture = result_path(entry.out, claim, result["scale"], ".png")
    if picture.exists():
        yield "!" + _linked(_link(f"{claim.id}, {claim.where}, measured", picture, folder))
    yield from map(_folded, tables_of(result))
    for table in _runs(entry, folder):
        yield _folded(table)
        command = f"normfree train --config {entry.out.resolve().name}/runs/RUN/{_FILES['configuration']}"
        yield f"One is made again from its configuration by {code(command)}."
    yield from map(_folded, _missing_runs(entry))
    origin = origin_of(result)
    own, *others = map(_linked, _results(entry, result, folder))
    parts = [own, code(origin.pop("command")), *(f"{name} {escape(text)}" for name, text in origin.items() if text)]
    yield f"*From* {' · '.join([*parts, *others])}"
    yield _details(_reasons(entry))


def _anchor(claim: Claim) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", claim.id)


def _reference(entry: Entry) -> str:
    return f"[{escape(entry.claim.id)}](#{_anchor(entry.claim)})"


def _linked(link: Link) -> str:
    return f"[{escape(link.text)}]({link.href})"


def _markdown_table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> str:
    return to_markdown(Table("", tuple(map(Column, columns)), tuple(rows)))


def _escaped(table: Table) -> Table:
    """A table without its title, all cells escaped but the commands, which are code."""
    columns = tuple(Column(escape(column.name), column.justify) for column in table.columns)
    is_code = [column.name == "command" for column in table.columns]
    rows = (
        tuple(cell if as_is else escape(cell) for cell, as_is in zip(row, is_code, strict=True)) for row in table.rows
    )
    return Table("", columns, tuple(rows), links=table.links)


def _folded(table: Table) -> str:
    """A table under its title; a long one is folded."""
    if len(table.rows) > _LONG:
        return _details(table)
    return f"**{escape(table.title)}**\n\n{to_markdown(_escaped(table))}"


def _details(table: Table) -> str:
    return f"<details><summary>{escape(table.title)}</summary>\n\n{to_markdown(_escaped(table))}\n\n</details>"


# One page


def page(found: Sequence[Entry], folder: str | Path) -> Page:
    """The ledger as a page in `folder`: one card per claim, then each claim with its interactive figures."""
    sections = []
    for paper, of in _by_paper(found).items():
        title = PAPERS[paper]
        drawn = (f"{figure} has no claim: it is {what}." for figure, what in DRAWINGS.get(paper, {}).items())
        sections.append(Section(title, (counts_of(of).capitalize() + ".", *drawn), name=title))
        sections += [_section(entry, Path(folder)) for entry in of]
    rows = [(e.claim.id, e.claim.where, what, time, code(run)) for e in found for what, time, run in not_run_of(e)]
    columns = tuple(map(Column, ("claim", "where", "not run", "about", "command")))
    if rows:
        sections.append(Section("What was not run", tables=(Table("", columns, tuple(rows)),), name="not run"))
    return Page(
        "The claims of the papers, run and judged",
        subtitle=f"{counts_of(found)}.",
        summary=(_words("What the words mean"),),
        cards=tuple(map(_card, found)),
        sections=tuple(sections),
        notes=("Made from the results by: `normfree reproduce --write claims.html`",),
    )


def _card(entry: Entry) -> Card:
    claim, mark = entry.claim, TABLE_MARKS[entry.status_text[0]]
    return Card(claim.id, mark, entry.status_text[2:], claim.statement, group=PAPERS[claim.paper])


def _section(entry: Entry, folder: Path) -> Section:
    claim, result = entry.claim, entry.result
    title = f"{claim.id}, {claim.where}: {entry.status_text}"
    text = [claim.statement, *(f"{name}: {words}" for name, words in _facts(entry))]
    text += [f"Not run: {what}, about {time}: {code(run)}" for what, time, run in not_run_of(entry)]
    if result is None:
        return Section(title, tuple(text), name=claim.id)
    origin = origin_of(result)
    parts = [code(origin.pop("command")), *(f"{key} {value}" for key, value in origin.items() if value)]
    text += [*(f"{name}: {words}" for name, words in _remarks(entry, result)), "From " + " · ".join(parts)]
    checks = Table("Checks", CHECK_COLUMNS, tuple(map(cells, entry.judgement.rows)))
    more = [*tables_of(result), *_runs(entry, folder), *_missing_runs(entry)]
    return Section(
        title,
        tuple(text),
        panels_of(result),
        (checks, *(table for table in more if len(table.rows) <= _LONG)),
        name=claim.id,
        links=tuple(_results(entry, result, folder)),
        folded=(*(table for table in more if len(table.rows) > _LONG), _reasons(entry)),
    )
