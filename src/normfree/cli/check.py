"""`normfree check`: compare the files of stored folders with their checksums."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from normfree.cli.options import print_json
from normfree.report.tables import Column, Table, print_table


def check_folders(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Runs, converted models or data folders.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
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
