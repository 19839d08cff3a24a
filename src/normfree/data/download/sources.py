"""Data sets by name: fetched, checked, stored and read."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from normfree.data.download.catalog import DATA_SETS
from normfree.data.download.fetching import Progress, fetch
from normfree.data.download.layouts import DataSet, Layout, Source
from normfree.data.images import embedded
from normfree.data.images.image_set import ImageSet, image_set
from normfree.files import explained, replacing


def names() -> tuple[str, ...]:
    """The data sets that `load` knows; `fashion14` is part of the package and needs no files."""
    return (embedded.NAME, *DATA_SETS)


def load(name: str, root: str | Path = ".data", *, check: bool = True) -> ImageSet:
    """Read a data set from the folder `root`, in whichever of its layouts is there.

    Every file is compared with its published checksum (a second or less), unless `check` is False, for files of your
    own in the same formats.

    Raises:
        ValueError: if the name is unknown, nothing is there, or a file is missing, truncated or altered.
    """
    if name == embedded.NAME:
        return embedded.load()
    data, root = _find(name), Path(root)
    found = _present(data, root)
    if found is None and data.stand_in and _present(DATA_SETS[data.stand_in], root) is not None:
        return load(data.stand_in, root, check=check)
    remedy = _remedy(name, root)
    if found is None:
        forms = [f"{layout.folder}/{next(iter(layout.files))}" for layout in data.layouts]
        raise ValueError(
            f"expected {data.title} in the folder '{root}', as {' or '.join(forms)}, found "
            f"{'neither' if len(forms) == 2 else 'none'}; {remedy}"
        )
    layout, folder = found
    for file, checksum in layout.files.items():
        if not (folder / file).is_file():
            raise ValueError(f"expected '{file}' beside the other files of {data.title} in '{folder}'; {remedy}")
        if check:
            checksum.check(folder / file, file, f"{remedy}, which replaces it")
    train, test = layout.read(folder)
    return image_set(name, data.classes, train, test)


def get(
    name: str, root: str | Path = ".data", *, tarball: str | Path | None = None, progress: Progress | None = None
) -> Path:
    """Fetch a data set into the folder `root`, and give the folder of its files.

    The sources are tried in order: the official address, then others with the same content. Every parcel and every
    file is checked before the file gets its name; a file that is already right is left alone, and nothing is fetched
    when all are. `tarball` is a parcel that is already here. `progress` is called with bytes done, bytes expected and
    the address.

    Raises:
        ValueError: if the name is unknown, no source could give the files, or `tarball` is none of the parcels.
        OSError: if the files cannot be written.
    """
    if name == embedded.NAME:
        return embedded.ASSET.parent
    data, root = _find(name), Path(root)
    found = _present(data, root)  # what `load` would read
    if found is not None and all(checksum.fits(found[1] / file) for file, checksum in found[0].files.items()):
        return found[1]
    if tarball is not None:
        return _unpack(data, root, Path(tarball))
    failures = []
    for source in data.sources:
        try:
            files = _files(source, {address: _parcel(source, address, progress) for address in source.parcels})
        except (OSError, ValueError) as error:
            failures.append(f"{_shown(next(iter(source.parcels)))}: {_reason(error)}")
            continue
        return _store(source.layout, root, files)
    if data.stand_in and found is None:  # otherwise `load` would go on refusing what is there
        try:
            return get(data.stand_in, root, progress=progress)
        except ValueError as error:
            failures.append(str(error))
    raise ValueError(
        f"expected a source that gives {data.title}, found none ({'; '.join(failures)}); try again with a connection, "
        f"or put the files into '{root / data.layouts[0].folder}' by hand"
    )


def stand_in_note(name: str, root: str | Path = ".data") -> str:
    """Why `load(name)` gives another data set than the one named, '' where it does not."""
    data = DATA_SETS.get(name)
    if (
        data is None
        or not data.stand_in
        or _present(data, Path(root))
        or not _present(DATA_SETS[data.stand_in], Path(root))
    ):
        return ""
    other = DATA_SETS[data.stand_in]
    return f"this is {other.title} ({other.name}), not {data.title} itself, which could not be had: {other.about}"


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """What of a data set lies in a folder, by the names of the files; their contents are not checked."""

    name: str
    about: str
    state: Literal["part of the package", "complete", "in part", "no"]
    folder: Path | None = None
    size: int = 0


def on_disk(root: str | Path = ".data") -> list[OnDisk]:
    """What of each known data set is in the folder `root`."""
    size = embedded.ASSET.stat().st_size
    rows = [OnDisk(name=embedded.NAME, about=embedded.ABOUT, state="part of the package", size=size)]
    for data in DATA_SETS.values():
        found = _present(data, Path(root))
        if found is None:
            rows.append(OnDisk(name=data.name, about=data.about, state="no"))
            continue
        layout, folder = found
        sizes = [(folder / file).stat().st_size for file in layout.files if (folder / file).is_file()]
        state: Literal["complete", "in part"] = "complete" if len(sizes) == len(layout.files) else "in part"
        rows.append(OnDisk(name=data.name, about=data.about, state=state, folder=folder, size=sum(sizes)))
    return rows


def _find(name: str) -> DataSet:
    if name in DATA_SETS:
        return DATA_SETS[name]
    if name.startswith("folder:"):
        raise ValueError(
            f"expected a data set that fits into memory, got '{name}'; an image folder is streamed instead"
        )
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names(), n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    if Path(name).is_dir():
        hint = f"did you mean 'folder:{name}'? "
    raise ValueError(f"expected a data set, got '{name}'; {hint}known are {', '.join(names())}")


def _remedy(name: str, root: Path) -> str:
    return f"run: normfree data get {name}" + ("" if root == Path(".data") else f" --dir {root}")


def _places(layout: Layout, root: Path) -> tuple[Path, ...]:
    return (root / layout.folder, root) if layout.bare else (root / layout.folder,)


def _present(data: DataSet, root: Path) -> tuple[Layout, Path] | None:
    """The first layout that is there as a whole, else the first that is there in part, else None."""
    found = None
    for layout in data.layouts:
        for folder in _places(layout, root):
            there = [(folder / file).is_file() for file in layout.files]
            if all(there):
                return layout, folder
            if any(there) and found is None:
                found = layout, folder
    return found


def _parcel(source: Source, address: str, progress: Progress | None) -> bytes:
    checksum = source.parcels[address]
    content = fetch(address, size=checksum.size, progress=progress)
    checksum.check(content, _shown(address), "the next source is tried")
    return content


def _files(source: Source, parcels: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a source's parcels, all of them checked."""
    files = source.unpack(parcels)
    for file, checksum in source.layout.files.items():
        checksum.check(files[file], file, "the next source is tried")
    return files


def _unpack(data: DataSet, root: Path, tarball: Path) -> Path:
    """Store the files of a parcel that is already here."""
    if not tarball.is_file():
        raise ValueError(f"expected an archive of {data.title} in '{tarball}', found no such file; check the name")
    for source in data.sources:
        for address, checksum in source.parcels.items():
            if len(source.parcels) == 1 and checksum.fits(tarball):
                return _store(source.layout, root, _files(source, {address: tarball.read_bytes()}))
    raise ValueError(
        f"expected '{tarball.name}' to be an archive of {data.title} with a known checksum, it is none of them, or "
        f"damaged; run: normfree data get {data.name}"
    )


def _store(layout: Layout, root: Path, files: dict[str, bytes]) -> Path:
    """Write what is not already right, each file whole or not at all."""
    folder = root / layout.folder
    for file, checksum in layout.files.items():
        if not checksum.fits(folder / file):
            with explained("the data file", folder / file), replacing(folder / file) as temporary:
                temporary.write_bytes(files[file])
    return folder


def _shown(address: str) -> str:
    return address.replace("npm:", "npm package ")


def _reason(error: Exception) -> str:
    """Why a source failed, in few words: urllib wraps the system's reason."""
    return str(getattr(error, "reason", None) or error)
