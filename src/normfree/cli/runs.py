"""`normfree watch`, `normfree evaluate` and `normfree check`: show, score and verify stored runs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normfree.cli.options import (
    DEVICE,
    AsJson,
    Plugins,
    Trust,
    load_plugins,
    print_json,
    require_either,
    require_output,
)
from normfree.report import Column, Table, open_console, print_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from normfree.report.page import Page
    from normfree.train.run.run_list import RunList
    from normfree.train.run.run_page import WatchedRun

_PAGE_SECONDS = 10.0  # between two writings of the page


def watch_runs(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER…", help="Runs, or folders above them; default: runs.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the runs once, as in a pipe.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="Time between refreshes.")] = 2.0,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Also write one page over all runs, .html, while it watches."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the runs once, as JSON.")] = False,
) -> None:
    """Show running and finished runs: state, epoch, loss, accuracy, speed and the time left.

    It refreshes in place until ctrl-C, and finds new runs below the folders. A run is running if a process holds its
    lock, and starting until its first step. It is stopped if it can be resumed, else finished, diverged or damaged. It
    is unknown if it has not ended and its lock cannot be read. Each run also has a page of its own, page.html in its
    folder.

    For example: normfree watch runs --page runs.html
    """
    require_either(context, "--every", ["--once", "--json"], "the runs are printed once")
    places = folders or [Path("runs")]
    for place in places:
        if not place.is_dir():
            what = "a file" if place.exists() else "nothing"
            raise ValueError(f"expected a folder with runs at '{place}', found {what}; give the folder of --out")
    if page is not None:
        require_output(page, (".html",), option="--page")
    from normfree.train.run.run_list import RunList

    runs = RunList(places)
    if once or as_json or not sys.stdout.isatty():
        _print_once(runs, places, page, as_json)
        return
    try:
        _refresh(runs, places, every, page)
    except KeyboardInterrupt:  # the way to leave
        return


def _print_once(runs: RunList, places: list[Path], page: Path | None, as_json: bool) -> None:
    found = runs.read()
    if page is not None:
        _write_page(found, page)
    if as_json:
        print_json([{**asdict(run), "folder": str(run.folder)} for run in found])
        return
    console = open_console()
    if not found:
        console.print(_nothing(places), markup=False)
        return
    from normfree.report.tables import narrowed
    from normfree.train.run.run_list import EXPENDABLE, run_names, runs_table

    table = runs_table(found, run_names([run.folder for run in found]))
    print_table(narrowed(table, console.width, EXPENDABLE), console)
    for sentence in _remarks(found, runs):
        console.print(sentence, markup=False)


def _refresh(runs: RunList, places: list[Path], every: float, page: Path | None) -> None:
    """Show the runs in place until ctrl-C."""
    from rich.live import Live as Display

    console, written = open_console(), 0.0
    with Display(console=console, auto_refresh=False, vertical_overflow="crop") as display:
        while True:
            found = runs.read()
            display.update(_screen(found, runs, places, console), refresh=True)
            if page is not None and time.monotonic() - written >= _PAGE_SECONDS:
                _write_page(found, page)
                written = time.monotonic()
            time.sleep(every)


def _screen(found: list[WatchedRun], runs: RunList, places: list[Path], console: Console) -> RenderableType:
    """Return as many runs as the terminal has lines for, and how many there are."""
    from rich.console import Group
    from rich.text import Text

    from normfree.report.tables import narrowed, table_lines
    from normfree.train.run.run_list import EXPENDABLE, run_names, runs_table

    if not found:
        return Text(_nothing(places), "dim")
    remarks = [*_remarks(found, runs), "ctrl-C leaves"]
    room = max(1, console.height - 3 - len(remarks))  # two lines are the heading
    shown, names = found[:room], run_names([run.folder for run in found])[:room]
    if len(found) > room:
        remarks.insert(0, f"and {len(found) - room:,} more runs")
    table = narrowed(runs_table(shown, names), console.width, EXPENDABLE)
    lines = [Text(sentence, "dim", no_wrap=True, overflow="ellipsis") for sentence in remarks]
    return Group(table_lines(table, console.width), *lines)


def _nothing(places: list[Path]) -> str:
    return f"no run in {', '.join(map(str, places))} yet; start one with: normfree train spirals --out runs/spirals"


def _remarks(found: list[WatchedRun], runs: RunList) -> list[str]:
    """Say what is wrong with damaged runs, and whether some folders were left out."""
    said = [f"{run.folder}: {run.note}" for run in found if run.state == "damaged"][:3]
    if not runs.complete:
        said.append("there are too many folders to look into all of them; name the folders of the runs")
    return said


def _write_page(found: list[WatchedRun], path: Path) -> None:
    from normfree.report.page import write_page
    from normfree.storage.writing import explain_os_errors

    with explain_os_errors("the page", path):
        write_page(_page(found, path), path)


def _page(found: list[WatchedRun], path: Path) -> Page:
    from normfree.train.run.run_list import drawn_runs, run_names, runs_page
    from normfree.train.run.run_records import METRICS, read_lines

    curves = {}
    for run in drawn_runs(found):
        try:
            curves[run.folder] = [record for _, record in read_lines(run.folder / METRICS)]
        except (ValueError, OSError):  # damaged since, or without metrics so far
            continue
    return runs_page(found, run_names([run.folder for run in found]), curves, path.absolute().parent)


def evaluate_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    device: Annotated[str, DEVICE] = "auto",
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the data, if it moved.")
    ] = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
    trust: Trust = False,
) -> None:
    """Score the model of a run on its test data.

    For example: normfree evaluate runs/fashion
    """
    load_plugins(plugin)
    from normfree.report.terminal import percent, progress
    from normfree.train import evaluate, evaluate_translation, read_config

    config = read_config(run)
    with progress(config.model) as update:
        found = evaluate(
            run, device=device, data_dir=data_dir, progress=lambda done: update(done, None, "batches"), trust=trust
        )
    with progress("translating") as update:
        translated = evaluate_translation(
            run, device=device, data_dir=data_dir, progress=lambda done, total: update(done, total, "sentences")
        )
    if as_json:
        print_json(found._asdict() | ({} if translated is None else {"bleu": translated._asdict()}))
        return
    what = f"{config.model} ({config.method}) on {config.data}"
    typer.echo(f"{what}: accuracy {percent(found.accuracy, digits=2)}, loss {found.loss:.4g}")
    if translated is not None:
        typer.echo(f"BLEU {translated.score:.2f}  ({translated.signature})")


def check_folders(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Runs, converted models or data folders.")],
    as_json: AsJson = False,
) -> None:
    """Compare the files of stored folders with their checksums: runs, converted models, prepared text and images.

    The exit status is 0 if every file is whole or was written by an earlier release without a checksum, and 1 if one is
    damaged. No code of a folder runs.

    For example: normfree check runs/fashion
    """
    from normfree.train.run.folder_check import verify_folder

    found = [(folder, *verify_folder(folder)) for folder in folders]
    if as_json:
        print_json(
            [{"folder": str(path), "kind": kind, "files": list(map(asdict, files))} for path, kind, files in found]
        )
    else:
        columns = (Column("file", style="cyan"), Column("state"), Column("reason"))
        for folder, kind, files in found:
            rows = tuple((file.name, file.state, file.why) for file in files)
            counts = ", ".join(f"{count} {state}" for state, count in Counter(file.state for file in files).items())
            print_table(Table(f"{kind} in {folder}", columns, rows, caption=f"{counts}."))
    if any(file.state == "damaged" for _, _, files in found for file in files):
        raise typer.Exit(1)
