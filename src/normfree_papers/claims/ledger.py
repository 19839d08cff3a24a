"""The ledger: every claim beside its measured numbers, as Markdown or as one HTML page.

Each number links to the JSON file that holds it, with its name there, to the configurations of its training runs, and
to the command that measures it again. The ledger depends only on the claims and the results.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from normfree.report import Column, Link, Table, to_markdown
from normfree.report.page import Card, Page, Section, write_page
from normfree.storage.writing import atomic_path, explain_os_errors
from normfree_papers.claims.claim import Claim
from normfree_papers.claims.claim_status import (
    CHECK_COLUMNS,
    RUN_COLUMNS,
    Entry,
    cells,
    command_of,
    counts_of,
    entries,
    limits_of,
    not_run_of,
    origin_of,
    rough_duration,
    run_cells,
    runs_of,
)
from normfree_papers.claims.judgement import Row, Status
from normfree_papers.claims.registry import PAPERS
from normfree_papers.claims.reproduction import Result, panels_of, result_path, tables_of

_COLOURS: dict[Status, Literal["good", "warn", "bad", "info"]] = {
    "holds": "good",
    "fails": "bad",
    "undecided": "warn",
    "not run": "info",
}
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
    with explain_os_errors("the claims", path), atomic_path(path) as temporary:
        if path.suffix == ".html":
            write_page(page(found, out, path.parent), temporary)
        else:
            temporary.write_text(markdown(found, out, path.parent), encoding="utf-8")


def require_kind(path: str | Path) -> Path:
    """Return the path of a ledger, or raise `ValueError` if its suffix is not .md or .html."""
    path = Path(path)
    if path.suffix not in (".md", ".html"):
        raise ValueError(f"expected a file that ends in .md or .html to write the claims to, got '{path}'; rename it")
    return path


# Common to Markdown and HTML


def _words(title: str = "") -> Table:
    return Table(title, (Column("word"), Column("meaning")), _WORDS)


def _link(text: str, path: Path, folder: Path) -> Link:
    """A link for a file in `folder`."""
    return Link(text, quote(Path(os.path.relpath(path, folder)).as_posix()))


def _results(entry: Entry, result: Result, out: Path) -> list[tuple[str, Path]]:
    """The file of the shown result, and that of its quick run, if there is one."""
    own, quick = result_path(out, entry.claim, result["scale"]), result_path(out, entry.claim, "quick")
    return [(own.name, own), *([("its quick run", quick)] if own != quick and quick.exists() else [])]


def _runs(entry: Entry, out: Path, folder: Path) -> list[Table]:
    """The table of training runs with links to their files, if there are any runs."""
    found = runs_of(entry, out)
    if not found:
        return []
    kept = [{text: at / file for text, file in _FILES.items() if result is not None} for _, at, result in found]
    return [
        Table(
            f"{len(found)} training runs" if len(found) > 1 else "The training run",
            tuple(map(Column, RUN_COLUMNS)),
            tuple(run_cells(name, result) for name, _, result in found),
            links=tuple(
                tuple(_link(text, path, folder) for text, path in files.items() if path.exists()) for files in kept
            ),
        )
    ]


def _missing_runs(entry: Entry) -> list[Table]:
    """The table of missing training runs with their commands, if there are any."""
    rows = tuple(
        (name, rough_duration(seconds), code(command_of(entry.claim, entry.planned["scale"], name)))
        for name, seconds in entry.missing_runs.items()
    )
    title = f"{len(rows)} training run{'s' if len(rows) > 1 else ''} not made"
    return [Table(title, (Column("run"), Column("about", "right"), Column("command")), rows)] if rows else []


def _reasons(rows: Sequence[Row]) -> Table:
    """The reason for the range of each check, and the name of its number in the JSON."""
    return Table(
        "Why these ranges, and where the numbers are",
        tuple(map(Column, ("check", "why this range", "in the JSON"))),
        tuple((row.check.statement, row.check.why, row.check.name) for row in rows),
    )


# Markdown


def markdown(found: Sequence[Entry], out: str | Path, folder: str | Path) -> str:
    """The ledger as Markdown, with links from `folder` to the results below `out`."""
    writer = _Writer(Path(out), Path(folder))
    return "\n\n".join(writer.lines(found)) + "\n"


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


def _anchor(claim: Claim) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "-", claim.id)


class _Writer:
    """Writes the blocks of the Markdown, with links from `folder` to `out`."""

    def __init__(self, out: Path, folder: Path) -> None:
        self._out, self._folder = out, folder

    def _link(self, text: str, path: Path) -> str:
        link = _link(text, path, self._folder)
        return f"[{escape(link.text)}]({link.href})"

    def lines(self, found: Sequence[Entry]) -> Iterable[str]:
        yield "# The claims of the papers, run and judged"
        yield (
            "Written by `make claims` from the claims in `src/normfree_papers` and the measurements in `results`; do "
            "not edit it by hand."
        )
        yield f"{counts_of(found)}."
        yield to_markdown(_words())
        papers = {paper: [entry for entry in found if entry.claim.paper == paper] for paper in PAPERS}
        papers = {paper: of for paper, of in papers.items() if of}
        yield "## Contents"
        for paper, of in papers.items():
            yield f"**[{paper}](#{paper})**: {escape(PAPERS[paper])}"
            yield self._contents(of)
            drawn = "; ".join(f"{figure} is {what}" for figure, what in DRAWINGS.get(paper, {}).items())
            if drawn:
                yield f"*Without a claim:* {escape(drawn)}."
        yield "[What was not run](#not-run)"
        for paper, of in papers.items():
            yield f'<a id="{paper}"></a>'
            yield f"## {paper}: {escape(PAPERS[paper])}"
            for entry in of:
                yield from self._claim(entry)
        yield '<a id="not-run"></a>'
        yield "## What was not run"
        yield self._not_run(found)

    def _contents(self, found: Sequence[Entry]) -> str:
        rows = tuple(
            (
                f"[{escape(entry.claim.id)}](#{_anchor(entry.claim)})",
                escape(entry.claim.where),
                escape(entry.claim.statement),
                escape(entry.status_text),
                "" if entry.status == "not run" else escape(entry.judgement.summary),
            )
            for entry in found
        )
        return to_markdown(Table("", tuple(map(Column, ("claim", "where", "it says", "status", "checks"))), rows))

    def _claim(self, entry: Entry) -> Iterable[str]:
        claim, result = entry.claim, entry.result
        yield f'<a id="{_anchor(claim)}"></a>'
        yield f"### {escape(claim.id)}: {escape(claim.where)}"
        yield f"**{escape(entry.status_text)}**: {escape(claim.statement)}"
        yield f"*The paper:* {escape(claim.paper_value)}" if claim.paper_value else "*The paper* gives no number."
        yield f"*Measured:* {escape(claim.how)}"
        yield from (f"*{name}:* {escape(text)}" for name, text in limits_of(entry).items())
        if left := not_run_of(entry):
            yield self._remedy(entry, *left)
        if result is None:
            return
        yield to_markdown(self._checks(entry.judgement.rows))
        yield from (f"*Error in the paper:* {escape(text)}" for text in entry.judgement.errata)
        yield from (f"*Note:* {escape(text)}" for text in result.get("notes", []))
        picture = result_path(self._out, claim, result["scale"], ".png")
        if picture.exists():
            yield "!" + self._link(f"{claim.id}, {claim.where}, measured", picture)
        for table in tables_of(result):
            yield _folded(table.title or "Table", _escaped(table))
        yield from self._runs(entry)
        yield self._provenance(entry, result)

    def _checks(self, rows: Sequence[Row]) -> Table:
        return Table("", CHECK_COLUMNS, tuple(tuple(map(escape, cells(row))) for row in rows))

    def _remedy(self, entry: Entry, what: str, time: str) -> str:
        return f"*Not run:* {escape(what)}, about {time}: {code(command_of(entry.claim))}"

    def _runs(self, entry: Entry) -> Iterable[str]:
        for table in _runs(entry, self._out, self._folder):
            yield _folded(table.title, _escaped(table))
            command = f"normfree train --config {self._out.resolve().name}/runs/RUN/{_FILES['configuration']}"
            yield f"One is made again from its configuration by {code(command)}."
        for table in _missing_runs(entry):
            rows = tuple((escape(name), time, command) for name, time, command in table.rows)
            yield _folded(table.title, Table("", table.columns, rows))

    def _provenance(self, entry: Entry, result: Result) -> str:
        origin = origin_of(result)
        own, *others = (self._link(text, path) for text, path in _results(entry, result, self._out))
        parts = [own, code(origin.pop("command"))]
        parts += [f"{name} {escape(text)}" for name, text in origin.items() if text]
        why = _reasons(entry.judgement.rows)
        return f"*From* {' · '.join([*parts, *others])}\n\n{_details(why.title, to_markdown(_escaped(why)))}"

    def _not_run(self, found: Sequence[Entry]) -> str:
        rows = []
        for entry in found:
            if (left := not_run_of(entry)) is not None:
                name = f"[{escape(entry.claim.id)}](#{_anchor(entry.claim)})"
                rows.append((name, escape(left[0]), left[1], code(command_of(entry.claim))))
        if not rows:
            return "Everything was run."
        return to_markdown(Table("", tuple(map(Column, ("claim", "not run", "about", "command"))), tuple(rows)))


def _escaped(table: Table) -> Table:
    columns = tuple(Column(escape(column.name), column.justify) for column in table.columns)
    return Table("", columns, tuple(tuple(map(escape, row)) for row in table.rows), links=table.links)


def _folded(title: str, table: Table) -> str:
    """A table of escaped cells under its title; a long one is folded."""
    if len(table.rows) <= _LONG:
        return f"**{escape(title)}**\n\n{to_markdown(table)}"
    return _details(title, to_markdown(table))


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n\n{text}\n\n</details>"


# One page


def page(found: Sequence[Entry], out: str | Path, folder: str | Path) -> Page:
    """The ledger as a page in `folder`: one card per claim, then each claim with its interactive figures."""
    sections = []
    for paper, title in PAPERS.items():
        of = [entry for entry in found if entry.claim.paper == paper]
        if of:
            drawn = (f"{figure} has no claim: it is {what}." for figure, what in DRAWINGS.get(paper, {}).items())
            sections.append(Section(title, (counts_of(of).capitalize() + ".", *drawn), name=title))
            sections += [_section(entry, Path(out), Path(folder)) for entry in of]
    left = [(entry, what) for entry in found if (what := not_run_of(entry)) is not None]
    rows = tuple((e.claim.id, e.claim.where, *what, code(command_of(e.claim))) for e, what in left)
    columns = tuple(map(Column, ("claim", "where", "not run", "about", "command")))
    if rows:
        sections.append(Section("What was not run", tables=(Table("", columns, rows),), name="not run"))
    return Page(
        "The claims of the papers, run and judged",
        subtitle=f"{counts_of(found)}.",
        summary=(_words("What the words mean"),),
        cards=tuple(_card(entry) for entry in found),
        sections=tuple(sections),
        notes=("Made from the results by: `normfree reproduce --write claims.html`",),
    )


def _card(entry: Entry) -> Card:
    claim = entry.claim
    return Card(claim.id, _COLOURS[entry.status], entry.status_text[2:], claim.statement, group=PAPERS[claim.paper])


def _section(entry: Entry, out: Path, folder: Path) -> Section:
    claim, result = entry.claim, entry.result
    title = f"{claim.id}, {claim.where}: {entry.status_text}"
    text = [claim.statement, f"The paper: {claim.paper_value}" if claim.paper_value else "", f"Measured: {claim.how}"]
    text += [f"{name}: {words}" for name, words in limits_of(entry).items()]
    if left := not_run_of(entry):
        text.append(f"Not run: {left[0]}, about {left[1]}: {code(command_of(claim))}")
    if result is None:
        return Section(title, tuple(filter(None, text)), name=claim.id)
    text += [f"Error in the paper: {erratum}" for erratum in entry.judgement.errata]
    text += [f"Note: {note}" for note in result.get("notes", [])]
    origin = origin_of(result)
    parts = [code(origin.pop("command")), *(f"{key} {value}" for key, value in origin.items() if value)]
    text.append("From " + " · ".join(parts))
    more = [*tables_of(result), *_runs(entry, out, folder), *_missing_runs(entry)]
    return Section(
        title,
        tuple(filter(None, text)),
        panels_of(result),
        (
            Table("Checks", CHECK_COLUMNS, tuple(cells(row) for row in entry.judgement.rows)),
            *(table for table in more if len(table.rows) <= _LONG),
        ),
        name=claim.id,
        links=tuple(_link(name, path, folder) for name, path in _results(entry, result, out)),
        folded=(*(table for table in more if len(table.rows) > _LONG), _reasons(entry.judgement.rows)),
    )
